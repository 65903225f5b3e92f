"""Documents say what is so: the names, files and links in them exist, and their lines are short enough to read."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_architecture import FILES, LEAVES, ORDER, PACKAGE, ROOT

from coral_lens.lens.readouts import READ_OUTS
from coral_lens.lens.rules import BASE_SCORES
from coral_lens.methods.registry import BASELINES, METHODS
from coral_lens.report.runs import load_run

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
HISTORY = {"CHANGELOG.md", "docs/log.md"}
"""Tell what was, under the names of its time."""
LIVING = [path for path in DOCUMENTS if path.relative_to(ROOT).as_posix() not in HISTORY]
BASELINE_PAGES = sorted((ROOT / "docs" / "method").glob("*.md"))
METHOD_PAGES = [ROOT / "docs" / "method.md", *BASELINE_PAGES]
FILES_PAGE = ROOT / "docs" / "reference" / "files.md"
WIDEST = 120
FILE_ENDINGS = {"csv", "css", "html", "json", "jsonl", "md", "png", "py", "safetensors", "svg", "toml"}
WORDS = {"coral_lens", "lens", "notes"}
"""Words in backticks of the method that are no name of a method or rule: the package, a setting, a key of a record."""
FORMER_MODULES = {"scratch", "manifest", "terms", "listing", "stats", "confidence_curves", "joined", "store", "models",
                  "layout", "token_budget", "attention", "fused", "resume", "prefixes", "guarantees", "choosing",
                  "simulation", "inputs", "fitting", "listwise_mlp", "kinds", "card", "hub", "steering", "samples",
                  "estimators", "jobs", "lens_method", "evaluation", "places", "planning", "predicting", "running",
                  "lm_eval_command", "lm_eval_logs", "lm_eval_metrics", "lm_eval_model", "lm_eval_requests",
                  "lm_eval_scoring", "printing", "baselines"}  # fmt: skip
"""What modules were called in release 0.1; a document that still says so leads nowhere."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
living_document = pytest.mark.parametrize("path", LIVING, ids=name_of)


# ---------------------------------------------------------------------------------------------------- reading documents


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_spans(path: Path) -> list[str]:
    """What stands in backticks, outside blocks of code."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_fences(path.read_text("utf-8")))


def has_attribute(owner: Any, name: str) -> bool:
    # a field without a default is no attribute of its class
    return hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {})


def resolves(dotted: str) -> bool:
    """Whether a name below coral_lens is a module, or something in one, or a field of that."""
    parts = dotted.split(".")
    n_module = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in FILES), 0)
    owner: Any = importlib.import_module(".".join(["coral_lens", *parts[:n_module]]))
    for name in parts[n_module:]:
        if not has_attribute(owner, name):
            return False
        owner = getattr(owner, name, None)
    return True


def is_dotted_name(span: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", span)) and span.split(".")[-1] not in FILE_ENDINGS


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)}


# ---------------------------------------------------------------------------------------------------------------- names


def test_names_that_do_not_exist_do_not_resolve() -> None:
    assert resolves("lens.rules")
    assert resolves("records.Predictions.method")
    assert resolves("FitSettings.depth")
    assert not resolves("lens.rules.steered")
    assert not resolves("records.Predictions.verdict")
    assert not resolves("steering.residuals")


@pytest.mark.parametrize("path", METHOD_PAGES, ids=name_of)
def test_every_name_of_the_method_exists(path: Path) -> None:
    settings = setting_names(path)
    for span in code_spans(path):
        key, is_setting, _ = span.partition(" = ")
        if is_dotted_name(span):
            assert resolves(span), span
        elif is_setting:
            assert key in {"kind", *settings} or path not in BASELINE_PAGES, span
        elif re.fullmatch(r"[\w-]+", span) and not span.startswith("-"):
            # a bare word is what a user types, never a function: those are dotted
            assert span in {*METHODS, *BASE_SCORES, *READ_OUTS, *WORDS, *settings}, span


@living_document
def test_dotted_names_of_our_packages_exist(path: Path) -> None:
    ours = {"coral_lens", *LEAVES, *(name.split(".")[0] for name in FILES if name)}
    for span in filter(is_dotted_name, code_spans(path)):
        if span.split(".")[0] in ours:
            assert resolves(span.removeprefix("coral_lens.")), span
    for dotted in re.findall(r"\bcoral_lens((?:\.[A-Za-z_]\w*)+)", path.read_text("utf-8")):
        assert resolves(dotted.lstrip(".")), dotted


@living_document
def test_no_document_leads_to_a_former_module(path: Path) -> None:
    # on the page of files a bare word is a key of a file, which tests/end_to_end/test_files.py looks up there
    keys = {span for span in code_spans(path) if span.isidentifier()} if path == FILES_PAGE else setting_names(path)
    for span in set(code_spans(path)) - keys:
        first = re.split(r"[./]", span)[0]
        assert not (first in FORMER_MODULES and re.fullmatch(r"[\w./]+", span)), span


# ------------------------------------------------------------------------------------------------------------ baselines

HEADINGS = ("What", "The equation", "Settings", "Where the published code differs", "Where in the code", "What it costs",
            "Where it failed")  # fmt: skip
"""How the headings of a baseline's page begin, in order."""


def settings_of(path: Path) -> Any:
    """Return the class of settings that a baseline's page names below METHODS, or None where it has a table of none."""
    if path not in BASELINE_PAGES or "| setting |" not in path.read_text("utf-8"):
        return None
    (dotted,) = {span for span in code_spans(path) if re.fullmatch(r"methods\.[\w.]+Settings", span)}
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(f"coral_lens.{module}"), name)


def setting_names(path: Path) -> set[str]:
    return {field.name for field in fields(settings_of(path))} if settings_of(path) else set()


def shown(default: Any) -> str:
    """Return a default as the pages write it."""
    if default is MISSING:
        return "required"
    if isinstance(default, tuple):
        return ", ".join(map(shown, default)) or "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


@pytest.mark.parametrize("path", BASELINE_PAGES, ids=name_of)
def test_the_page_of_a_baseline_has_its_settings_and_their_defaults(path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", path.read_text("utf-8"), flags=re.MULTILINE)
    settings = settings_of(path)
    assert dict(rows) == ({f.name: shown(f.default) for f in fields(settings)} if settings else {})


@pytest.mark.parametrize("path", BASELINE_PAGES, ids=name_of)
def test_the_pages_of_baselines_answer_the_same_questions(path: Path) -> None:
    found = re.findall(r"^## (.+)$", path.read_text("utf-8"), flags=re.MULTILINE)
    assert len(found) == len(HEADINGS)
    for heading, begins in zip(found, HEADINGS, strict=True):
        assert heading.startswith(begins), heading


def test_every_baseline_has_a_page_and_the_table_of_the_method_leads_there() -> None:
    kinds = [kind for path in BASELINE_PAGES for kind in re.findall(r'`kind = "([\w-]+)"`', path.read_text("utf-8"))]
    assert sorted(kinds) == sorted(BASELINES)
    links = re.findall(r"\]\((method/[\w-]+\.md)\)", METHOD_PAGES[0].read_text("utf-8"))
    assert sorted(links) == [path.relative_to(ROOT / "docs").as_posix() for path in BASELINE_PAGES]


# ------------------------------------------------------------------------------------------------------ files and links


@living_document
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    for span in code_spans(path):
        assert not re.fullmatch(r"test_\w+(\.py)?", span), f"{span}: give its path, tests/<package>/{span}"
        if not re.fullmatch(r"(src|tests|docs|bench|examples|configs)/[\w./:-]*", span):
            continue
        file, _, test = span.partition("::")
        assert (ROOT / file).exists(), span
        assert not test or test in names_in(ROOT / file), span


def anchors_of(path: Path) -> set[str]:
    """The headings of a document as they are linked to."""
    headings = re.findall(r"^#+ (.+)$", without_fences(path.read_text("utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_fences(path.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


# ---------------------------------------------------------------------------------------------------------------- lines


def long_lines(text: str) -> list[str]:
    """The lines that are too long, outside tables and blocks of code; addresses do not count."""
    return [
        line
        for line in without_fences(text).splitlines()
        if not line.lstrip().startswith("|") and len(re.sub(r"\]\(\S+\)|https?://\S+", "", line)) > WIDEST
    ]


def test_long_lines_are_found_outside_tables_code_and_addresses() -> None:
    long = "word " * 30
    assert long_lines(f"short\n{long}\n") == [long]
    assert long_lines(f"| {long} |\n```\n{long}\n```\nhttps://example.org/{'x' * 200}\n") == []


@every_document
def test_lines_are_short_enough_to_read(path: Path) -> None:
    assert long_lines(path.read_text("utf-8")) == []


GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_a_guide_begins_with_what_its_reader_will_have(path: Path) -> None:
    title, first = re.split(r"\n\n", path.read_text("utf-8"))[:2]
    assert title.startswith("# ")
    assert re.match(r"At the end you (have|know) ", first)


# ----------------------------------------------------------------------------------------------------------- the README

README = ROOT / "README.md"
FIRST_SCREEN = 40
"""Lines that a reader sees without scrolling."""


def test_the_readme_fits_and_its_first_screen_has_a_picture_the_two_commands_and_ten_lines_of_python() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 100
    screen = "\n".join(lines[:FIRST_SCREEN])
    assert re.search(r"^!\[.+\]\(docs/images/reliability\.svg\)$", screen, re.MULTILINE)
    assert "\nmake demo" in screen
    assert "\npip install" in screen
    code = re.search(r"^```python\n(.*?)^```$", screen, re.MULTILINE | re.DOTALL)
    assert code, "the block of Python ends on the first screen"
    assert 5 <= len(code[1].splitlines()) <= 10


@pytest.mark.parametrize("repository", [None, "https://example.org/coral-lens"])
def test_on_an_index_page_every_link_of_the_readme_leads_somewhere(repository: str | None) -> None:
    index_readme = runpy.run_path(str(ROOT / "setup.py"))["index_readme"]
    text = README.read_text("utf-8")
    shown = index_readme(text, repository)
    links, there = re.findall(r"\]\(([^)]+)\)", text), re.findall(r"\]\(([^)]+)\)", shown)
    assert len(links) > 10
    if repository is None:
        assert there == []
        assert all(f"(`{link}`)" in shown for link in links if not link.endswith(".svg"))
    else:
        assert [re.sub(r"^.*/main/", "", link) for link in there] == links
        assert all(link.startswith(repository) for link in there)


def test_a_cell_of_the_readme_has_one_number_which_the_results_have_too() -> None:
    rows = re.findall(r"^\| (?!\|)(.+) \|$", README.read_text("utf-8"), re.MULTILINE)
    numbers = [cell for row in rows for cell in row.split(" | ")[1:]]
    assert len(numbers) == 25
    results = [path for path in LIVING if name_of(path).startswith("docs/results")]
    printed = "".join(path.read_text("utf-8") for path in results)
    for number in numbers:
        assert re.fullmatch(r"\d+\.\d", number)
        assert re.search(rf"\| {re.escape(number)} [|(]", printed), number


def test_the_picture_is_drawn_from_a_run_and_says_in_words_what_it_shows() -> None:
    picture = runpy.run_path(str(ROOT / "docs" / "make_picture.py"))["picture"]
    (evaluation,) = load_run(ROOT / "tests" / "golden" / "run").evaluations
    for drawn in (picture(evaluation), (ROOT / "docs" / "images" / "reliability.svg").read_text("utf-8")):
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
        assert re.search(r'aria-label="[^"]*Before: [\d.]+ % right, [^"]* After: [\d.]+ % right', drawn)


# -------------------------------------------------------------------------------------------------------------- the map

MAP_LINES = 21
FOUND = {
    "equations": "lens/rules.py",
    "loss": "sae/train.py",
    "ITI": "engine/edits.py",
    "families": "engine/architectures.py",
    "CSV": "data/questions.py",
    "table of methods": "methods/registry.py",
}
"""What a newcomer looks for, and the file where the map sends them."""


def map_lines() -> dict[str, str]:
    """What the README's map says of each entry of the package."""
    text = README.read_text("utf-8")
    block = re.search(r"^## The map\n.*?^```text\nsrc/coral_lens/\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert block, "README.md has no block ```text that begins with src/coral_lens/ under the heading 'The map'"
    lines = block[1].splitlines()
    assert len(lines) < MAP_LINES
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def test_the_map_shows_every_entry_of_the_package_and_no_other() -> None:
    entries = {f"{p.name}/" if p.is_dir() else p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"}
    assert sorted(map_lines()) == sorted(entries - {"py.typed"})


def test_the_map_names_only_files_that_exist() -> None:
    for folder, said in map_lines().items():
        for name in re.findall(r"\b[a-z_]+(?:\.py\b|/)", said):
            path = PACKAGE / folder / name
            assert path.exists(), path


@pytest.mark.parametrize(("word", "file"), FOUND.items())
def test_the_map_leads_a_newcomer_to_what_they_look_for(word: str, file: str) -> None:
    folder, name = file.split("/")
    said = map_lines()[f"{folder}/"]
    assert word in said
    assert name in said


def test_the_map_is_in_the_order_of_imports() -> None:
    packages = [name.rstrip("/") for name in map_lines() if name.endswith("/") and name.rstrip("/") not in LEAVES]
    assert packages == [name for name in ORDER if name in packages]


# ------------------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("name", ["api.md", "commands.md"])
def test_the_reference_is_what_docstrings_and_help_say(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["PAGES"][name]()
    assert (ROOT / "docs" / "reference" / name).read_text("utf-8") == made, "run `python docs/make_reference.py`"
