"""Pages with hostile text in every field: no element, no attribute and no script comes of it.

The same page is made with harmless text and with hostile text, and both must have the same elements. `open_in_browser` opens
the pages in Chromium too, beside a page without any defence, which shows that the text does harm where it can.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.browsers import CHROMIUM, browser
from support.commands import GOLDEN
from support.servers import PATIENCE, Running, open_shop, running

from coral_lens.audit.measure import audit
from coral_lens.audit.page import render_audit
from coral_lens.audit.reading import read_audited
from coral_lens.audit.settings import AuditSettings
from coral_lens.lens.artefact import Lens
from coral_lens.records import Predictions
from coral_lens.report.figures.style import Picture
from coral_lens.report.findings import Gathered
from coral_lens.report.pages.compare import write_comparison
from coral_lens.report.pages.features import render_features
from coral_lens.report.pages.reproduction import ClaimLine, PaperSection, Reproduction, render_reproduction
from coral_lens.report.pages.run import render_report
from coral_lens.report.pages.study import render_study
from coral_lens.report.runs import Evaluation, Run, load_run
from coral_lens.report.tables.formats import Cell, Row
from coral_lens.report.tables.paper_shape import Block, Panel
from coral_lens.report.tables.run import results_table
from coral_lens.report.tables.study import StudyTable, read_tables
from coral_lens.serve.lenses import ServedLenses
from faults.outcomes import Tally

HARM = "harmed"
"""The title of a page in which a script ran."""
MEANT = {"base", "temperature"}
"""Methods that a report knows by their names."""


def hostile_text(url: str = "http://127.0.0.1:9/leak") -> str:
    """Return text that would become a script, a request or an attribute wherever it is not escaped."""
    script = f"document.title='{HARM}';fetch('{url}')"
    return (
        f"</title></style></script></textarea></table><script>{script}</script><img src='{url}' onerror=\"{script}\">"
        f"<svg onload=\"{script}\">\"onload=\"{script}\"' autofocus onfocus='{script}'<link rel=stylesheet href='{url}'>"
        f"<a href='javascript:{script}'>x</a><base href='{url}'>\u2028\u2029<!-- ]]> {{{{ 7 * 7 }}}} ${{7}} &lt;b&gt; \\u003cb"
    )


HARMLESS = re.sub("[<>\"'&]", "x", hostile_text())
"""The same text without what makes markup; as long, since pages shorten what is long."""

# -------------------------------------------------------------------------------------------------------------- pages


def hostile_run(text: str) -> Run:
    """Return a run in which every text of a user's is this one: title, lens, tasks, questions, methods, provenance."""
    run = load_run(GOLDEN / "run")
    lens = run.lens | {"model": run.lens["model"] | {"name": text, "dtype": text}}
    lens["training"] = lens["training"] | {
        "tasks": {f"{text}:train": 3},
        "terms": {text: text},
        "versions": {text: text},
    }
    evaluations = tuple(hostile_evaluation(e, f"{text} {i}") for i, e in enumerate(run.evaluations))
    return Run(text, evaluations, lens, run.provenance | {text: text, "lens": text, "command": [text, {text: text}]})


def hostile_evaluation(evaluation: Evaluation, text: str) -> Evaluation:
    """Return an evaluation with this text in every field."""

    def name_of(method: str) -> str:
        return method if method in MEANT else f"{method} {text}"

    questions = tuple(
        replace(
            q,
            id=f"{text}{i}",
            group=text,
            text=text,
            task=text,
            split=text,
            options=tuple(f"{text}{j}" for j in range(len(q.options))),
        )
        for i, q in enumerate(evaluation.questions)
    )
    predictions: dict[str, Predictions] = {
        name_of(m): replace(p, method=name_of(m), model=text, task=text, split=text, ids=tuple(q.id for q in questions))
        for m, p in evaluation.predictions.items()
    }
    view = replace(evaluation.view, method=name_of(evaluation.view.method)) if evaluation.view else None
    return replace(evaluation, name=text, questions=questions, predictions=predictions, view=view)


def run_page(text: str, _: Path) -> str:
    """The page of `coral eval`."""
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><script>document.title="{HARM}"</script></svg>'.encode()
    finding = Gathered(text, text, text, text, text, svg, (text, text), ((text, text),), 9)
    run = hostile_run(text)
    return render_report(run, table=results_table(run, n_boot=20), findings=[finding, replace(finding, svg=b"")])


def comparison_page(text: str, home: Path) -> str:
    """The page of `coral report RUN OTHER`."""
    run = hostile_run(text)
    other = replace(run, title=f"{text} b", provenance={text: f"{text} b"})
    return write_comparison(run, other, home / "compared", n_boot=20).read_text("utf-8")


def study_page(text: str, _: Path) -> str:
    """The page of `coral run`."""
    folder = GOLDEN / "study" / "runs" / "model" / "mine"

    def renamed(table: StudyTable) -> StudyTable:
        rows = tuple(replace(r, method=r.method if r.method in MEANT else f"{r.method} {text}") for r in table.rows)
        return replace(table, test=text, rows=rows, comparisons=())

    tables = [renamed(t) for t in read_tables(folder, model=text, mixture=text)]
    about = {"source": text, text: {text: [text]}}
    record = {
        "name": text,
        "mixtures": {text: about},
        "tests": {text: about},
        "study": {text: text},
        "versions": {text: text},
    }
    return render_study(record, tables, [], [(text, "runs/model/mine/report.html")])


def features_page(text: str, _: Path) -> str:
    """The page of `coral sae report`."""
    effect = {"accuracy": {"value": 0.0}, "ece": {"value": 0.0, "low": 0.0, "high": 0.0}}
    top = [{"text": text, "option": text, "is_answer": True, "value": 1.0}]
    shown = {"feature": 3, "r": 0.1, "frequency": 0.5, "effects": [(text, effect)], "top": top}
    dashboard = {"title": text, "lead": [text], "features": [shown], "names": {text: text}, "foot": text}
    return render_features(dashboard, {})


def audit_page(text: str, _: Path) -> str:
    """The page of `coral audit`, with every part that it can have."""
    probs = {f"{text} a": [0.7, 0.3], f"{text} b": [0.4, 0.6]}
    made = [
        {"id": f"{text}{i}", "question": f"{text}{i // 2}", "options": [f"{text} {w}" for w in order], "probs": probs}
        | {"answer_index": i % 3 % 2, text: text}
        for i in range(48)
        for order in [("x", "y") if i % 2 else ("y", "x")]
    ]
    audited = replace(read_audited([made]), name=text, sources={text: text})
    return render_audit(audit(audited, AuditSettings(by=(text,), risk=0.4)))


def reproduction_page(text: str, _: Path) -> str:
    """The page of `coral reproduce`, with every part that it can have."""
    rows = (Row(text, {text: Cell(text, text), "ECE": Cell(text, best=True)}),)
    picture = Picture("picture", lambda figure: figure.suptitle(text), 2.0, text, text)
    section = PaperSection(
        "steering",
        text,
        text,
        words=(text,),
        blocks=(Block(text, (Panel(text, rows, text), Panel(text, rows, ours=False))),),
        table=text,
        pictures=((picture, text),),
        claims=(ClaimLine(text, text, text, "agrees", text),),
        missing=(text,),
        links=((text, "runs/model/mine/report.html"),),
    )
    return render_reproduction(Reproduction(text, (text,), (section,), {text: {text: [text]}}))


PAGES = {
    "run": run_page,
    "comparison": comparison_page,
    "study": study_page,
    "features": features_page,
    "audit": audit_page,
    "reproduction": reproduction_page,
}

# -------------------------------------------------------------------------------------------------------------- looks


@dataclass
class Looked(HTMLParser):
    """The elements of a page with the names of their attributes, its policy, and whatever leads out of it."""

    elements: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    policy: str = ""
    out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        values = {name: value or "" for name, value in attrs}
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        for name in {"src", "href", "action", "srcset", "style"} & values.keys():
            inside = values[name].startswith(("#", "data:image/", "runs/")) or (
                name == "style" and "url" not in values[name]
            )
            self.out += [] if inside else [f"{tag} {name}={values[name]}"]
        self.out += [f"{tag} {name}" for name in values if name.startswith("on")]


def looked_at(page: str) -> Looked:
    """Return what a page is made of."""
    found = Looked()
    found.feed(page)
    found.close()
    return found


def wrong_page(harmless: str, hostile: str) -> str:
    """Say what the text of a page became, other than text."""
    plain, found = looked_at(harmless), looked_at(hostile)
    if found.elements != plain.elements:
        pairs = zip(found.elements, plain.elements, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found.elements), len(plain.elements)))
        return f"element {first} is {found.elements[first : first + 1]}, not {plain.elements[first : first + 1]}"
    if found.out:
        return f"leads out: {found.out[0][:200]}"
    return "" if "default-src 'none'" in found.policy else f"policy {found.policy!r}"


# ------------------------------------------------------------------------------------------------------------ browser


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """Yield an address of this machine, and what is asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/leak", asked
    finally:
        server.shutdown()


def opened(page: Path) -> str:
    """Return the page as the browser has it after its scripts ran."""
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    return subprocess.run(
        [*command, profile, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout


def open_in_browser(home: Path) -> Tally:
    """Open every page in Chromium, those of a server too: no script runs, no request leaves."""
    if CHROMIUM is None:
        sys.exit("no Chromium is installed, in which pages could be opened: apt-get install chromium")
    tally = Tally("pages in Chromium")
    home.mkdir(exist_ok=True)
    with listening() as (url, asked):
        text = hostile_text(url)
        pages = {name: make(text, home) for name, make in PAGES.items()}
        for name, page in {"undefended": f"<title>x</title>{text}", **pages}.items():
            path = home / f"{name}.html"
            path.write_text(page, "utf-8")
            asked.clear()
            ran = f"<title>{HARM}" in opened(path)
            if name == "undefended":
                assert ran, "the text is harmless, so this shows nothing"
                assert asked, "no request is seen, so this shows nothing"
            else:
                tally.add(name, "silent" if ran or asked else "same bytes", json.dumps([ran, asked]))
        asked.clear()
        for name, said in served_pages(home / "served", text).items():
            tally.add(name, "silent" if said or asked else "same bytes", json.dumps([said, asked]))
    return tally


# ------------------------------------------------------------------------------------------------------------- server


def hostile_lenses(lenses: ServedLenses, text: str) -> ServedLenses:
    """Return the lenses of a server with this text for their names, and for what they were fitted on."""

    def hostile(lens: Lens) -> Lens:
        training = replace(lens.training, tasks={f"{text} {task}": n for task, n in lens.training.tasks.items()})
        return replace(lens, model=lens.model | {"name": text}, training=training)

    named = {f"{text} {name}": served for name, served in lenses.by_name.items()}
    return ServedLenses({name: replace(s, name=name, lens=hostile(s.lens)) for name, s in named.items()})


def served_pages(home: Path, text: str) -> dict[str, list[str]]:
    """Use both pages of a server with this text in every field; return what went wrong on each."""
    shop, said = open_shop(home), dict[str, list[str]]()
    with running(shop.model, hostile_lenses(shop.lenses, text)) as server, browser() as chromium:
        for path, use in {"/": ask_hostile, "/docs": read_docs}.items():
            page, heard = chromium.new_page(), said.setdefault(f"served {path}", [])
            page.set_default_timeout(1000 * PATIENCE)
            page.on("console", lambda message, heard=heard: heard.append(message.text))
            page.on("pageerror", lambda error, heard=heard: heard.append(str(error)))
            page.on("request", lambda request, heard=heard: heard.extend(foreign(request.url, server)))
            page.goto(f"{server.address}{path}")
            heard += use(page, text)
    return said


def foreign(url: str, server: Running) -> list[str]:
    """Return an address if it is not one of the server itself."""
    return [] if url.startswith((f"{server.address}/", "blob:")) else [url]


def ask_hostile(page: Any, text: str) -> list[str]:
    """Ask the playground with this text in each field in turn, then in a table; return what became of it, other than text."""
    said = []
    answer = "#result:not(.waiting) #verdict .said"
    page.wait_for_selector(answer)
    fields = ["#state", "#question", "#options li:nth-child(1) .text", "#options li:nth-child(2) .text"]
    for place in fields:
        before = page.input_value(place)
        page.fill(place, text)
        page.click("#go")
        page.wait_for_function("(text) => document.querySelector('#code').innerText.includes('harmed')", arg=text)
        page.wait_for_selector(answer)
        said += became(page)
        page.fill(place, before)
    for form in ("openai", "typesafe", "python", "curl"):
        page.click(f"#copy-{form}")
        said += became(page)
    page.click("#tab-table")
    rows = [
        ["id", "question", "option_a", "option_b", "answer"],
        [text, "Which?", text, "no", text],
        ["b", text, "y", "n", "A"],
    ]
    page.fill("#table", "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows))
    page.click("#go")
    page.wait_for_selector("#rows-table tbody tr:nth-child(2)")
    return said + became(page)


def read_docs(page: Any, _: str) -> list[str]:
    """Read the description of the routes."""
    page.wait_for_selector("#PredictRequest")
    return became(page)


def became(page: Any) -> list[str]:
    """Return what a text on a page of the server became: a script that ran, or an element that the page has none of."""
    strange = page.evaluate(
        "[...document.querySelectorAll('script:not([src]), base, [onload], [onerror], [onfocus]')].length"
    )
    title = page.title()
    return [
        *([f"the title is {title}"] if HARM in title else []),
        *([f"{strange} strange elements"] if strange else []),
    ]
