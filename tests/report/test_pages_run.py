"""The report says what the metrics say, leaves out no loss, and is safe to open. No model is needed."""

import base64
import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import binomtest

from coral_lens.metrics.comparisons import Difference, holm, mcnemar, paired_difference
from coral_lens.metrics.scores import measure
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question
from coral_lens.report import pages
from coral_lens.report.confidence import wilson
from coral_lens.report.figures.choice import curve_picture, flatness, gamma_curve, layer_curve
from coral_lens.report.figures.run import metric_picture, reliability_picture
from coral_lens.report.findings import Gathered
from coral_lens.report.headline import details, glances, headline
from coral_lens.report.pages.examples import answer_changes, choose_examples, is_plain, shortened
from coral_lens.report.pages.run import render_report, write_report
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables import exports, formats
from coral_lens.report.tables.run import COLUMNS, Comparison, ResultsTable, confirmed, results_table
from coral_lens.report.terminal import in_full, in_short

NASTY = "<script>alert('x')</script><img src=x onerror=alert(1)>"


def with_interval(scores: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Validation scores as a lens keeps them."""
    return {name: {"value": value, "low": value - 0.05, "high": value + 0.05} for name, value in scores.items()}


LENS: dict[str, Any] = {
    "kind": "ridge",
    "rule": "residual",
    "layers": [2],
    "inputs": [],
    "gamma": 1.0,
    "base": "token",
    "probe": "ridge",
    "tempering": None,
    "temperature": 1.5,
    "model": {"name": "tiny", "weights": "a" * 64, "tokenizer": "b" * 64, "dtype": "torch.float32"},
    "training": {"n_train": 80, "n_validation": 20, "tasks": {"seen:train": 100}, "settings": {"seed": 0}},
    "trace": {
        "criterion": "brier",
        "rule": "residual",
        "chosen": {"layers": [2], "r2": 0.1, "gamma": 1.0, "settings": [{"penalty": 30.0}]},
        "layers": [
            {"layer": layer, "r2": 0.1, "best": {"gamma": 1.0, "accuracy": 0.5, "ece": 0.1, "brier": b, "nll": 1.0}}
            for layer, b in enumerate((0.9, 0.61, 0.6, 0.605, 0.7))
        ],
        "gammas": [
            {"gamma": g, "accuracy": 0.4 + g / 10, "ece": 0.2, "brier": 0.9 - 0.3 * g, "nll": 1.0}
            for g in (0.0, 0.5, 1.0)
        ],
        "validation": {
            "base": with_interval({"accuracy": 0.4, "ece": 0.2, "brier": 0.9, "nll": 1.0}),
            "temperature": with_interval({"accuracy": 0.4, "ece": 0.1, "brier": 0.7, "nll": 1.0}),
        },
    },
}


def task(
    name: str, probs: Mapping[str, Sequence[Sequence[float]]], answers: Sequence[int], *, trained_on: bool = False
) -> Evaluation:
    """An evaluation from one list of option probabilities per method and question."""
    rows = next(iter(probs.values()))
    questions = tuple(
        Question(
            id=f"{name}/{i}",
            group=str(i),
            text=f"What is {i}? {NASTY}",
            options=tuple(f"option {j} {NASTY}" for j in range(len(row))),
            answer=int(answers[i]),
            task=name,
            split="test",
        )
        for i, row in enumerate(rows)
    )
    ids, offsets = tuple(q.id for q in questions), Options.of_sizes([len(row) for row in rows]).edges
    predictions = {
        method: Predictions(method, "tiny", name, "test", ids, np.asarray(answers), offsets, np.concatenate(p))
        for method, p in probs.items()
    }
    return Evaluation(name, questions, predictions, trained_on)


def random_task(
    name: str, n: int, *, skill: Mapping[str, float], trained_on: bool = False, seed: int = 0
) -> Evaluation:
    """A task of two to four options per question; `skill` is how strongly each method leans to the answer."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, size=n)
    answers = np.array([rng.integers(s) for s in sizes])
    noise = [rng.normal(size=s) for s in sizes]
    probs = {}
    for method, lean in skill.items():
        logits = [
            z + rng.normal(size=len(z)) / 2 + lean * (np.arange(len(z)) == a)
            for z, a in zip(noise, answers, strict=True)
        ]
        probs[method] = [np.exp(z) / np.exp(z).sum() for z in logits]
    return task(name, probs, answers, trained_on=trained_on)


GAIN = {"base": 0.0, "temperature": 0.0, "coral": 3.0}
LOSS = {"base": 3.0, "temperature": 3.0, "coral": 0.0}


@pytest.fixture(scope="module")
def run() -> Run:
    tasks = (random_task("unseen", 200, skill=LOSS), random_task("seen", 150, skill=GAIN, trained_on=True, seed=1))
    return Run(f"A run {NASTY}", tasks, LENS, {"command": f"coral eval {NASTY}", "dropped repeats": 0})


@pytest.fixture(scope="module")
def table(run: Run) -> ResultsTable:
    return results_table(run, n_boot=60)


@pytest.fixture(scope="module")
def page(run: Run, table: ResultsTable) -> str:
    return render_report(run, table=table)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_tables_show_the_numbers_of_the_metrics(run: Run, table: ResultsTable, page: str) -> None:
    markdown = formats.results_markdown(table)
    for evaluation in run.evaluations:
        for predictions in evaluation.predictions.values():
            scores = measure(predictions, n_boot=60).scores
            for name in COLUMNS:
                value, low, high = (f"{100 * x:.1f}" for x in (scores[name].value, scores[name].low, scores[name].high))
                assert re.search(rf"(\*\*)?{value}(\*\*)? \[{low} to {high}\]", markdown)
                assert re.search(rf">{value}</span><small>{low} to {high}</small>", page)


def test_held_out_tasks_come_before_transfer_tasks(table: ResultsTable) -> None:
    assert [(t.name, formats.kind_of(t)) for t in table.tasks] == [("seen", "held-out"), ("unseen", "transfer")]


def test_p_values_are_corrected_within_each_table(run: Run, table: ResultsTable) -> None:
    for task_table in table.tasks:
        p = next(e for e in run.evaluations if e.name == task_table.name).predictions
        raw = []
        for control in ("base", "temperature"):
            raw.append(mcnemar(p["coral"], p[control]))
            raw += [
                paired_difference(p["coral"], p[control], m, n_boot=table.n_paired).p_value for m in ("brier", "nll")
            ]
        found = [p for c in task_table.comparisons for p in c.p_values.values()]
        assert found == pytest.approx(holm(raw))
        assert table.n_tests == len(raw) == 6


def test_questions_that_share_an_article_are_tested_article_by_article() -> None:
    """McNemar's test would take them for independent."""
    apart = random_task("t", 60, skill={"base": 0.0, "coral": 2.0})
    groups = tuple(f"article {i // 6}" for i in range(60))
    shared = replace(apart, predictions={m: replace(p, groups=groups) for m, p in apart.predictions.items()})
    for evaluation, test in ((apart, "mcnemar"), (shared, "bootstrap")):
        table = results_table(Run("r", (evaluation,), LENS), n_boot=20)
        ours, base = evaluation.predictions["coral"], evaluation.predictions["base"]
        raw = {
            "mcnemar": mcnemar(ours, base),
            "bootstrap": paired_difference(ours, base, "accuracy", n_boot=table.n_paired).p_value,
        }
        others = [paired_difference(ours, base, m, n_boot=table.n_paired).p_value for m in ("brier", "nll")]
        assert raw["mcnemar"] != pytest.approx(raw["bootstrap"])
        assert list(table.tasks[0].comparisons[0].p_values.values()) == pytest.approx(holm([raw[test], *others]))


def test_corrected_p_values_can_still_be_small_with_many_tasks() -> None:
    tasks = tuple(random_task(f"t{i}", 30, skill={"base": 0.0, "coral": 6.0}, seed=i) for i in range(12))
    table = results_table(Run("many", tasks, LENS), n_boot=20)
    assert 2 / (table.n_paired + 1) * table.n_tests < 0.05
    assert all(t.comparisons[0].verdict("brier") == 1 for t in table.tasks)


def test_ece_ranks_only_with_a_thousand_questions() -> None:
    skill = {"base": 0.0, "coral": 3.0}
    few, many = (
        results_table(Run("r", (random_task("t", n, skill=skill),), LENS), n_boot=30).tasks[0] for n in (999, 1000)
    )
    assert set(few.comparisons[0].p_values) == {"accuracy", "brier", "nll"}
    assert not few.best["ece"]
    assert not few.best["cwece"]
    assert formats.column_label(few, "ece") == "ECE ↓ †"
    assert set(many.comparisons[0].p_values) == set(COLUMNS)
    assert formats.column_label(many, "ece") == "ECE ↓"


def test_only_a_clear_leader_is_bold(table: ResultsTable) -> None:
    seen, unseen = table.tasks
    assert seen.best["accuracy"] == seen.best["brier"] == {"coral"}
    assert "coral" not in unseen.best["accuracy"] | unseen.best["brier"]
    same = random_task("same", 50, skill={"base": 1.0})
    twins = Evaluation("same", same.questions, {m: same.predictions["base"].renamed(m) for m in ("base", "coral")})
    assert not any(results_table(Run("r", (twins,), LENS), n_boot=30).tasks[0].best.values())


def test_equals_share_the_lead() -> None:
    both = random_task("t", 200, skill={"base": 4.0, "coral": 0.0})
    base = both.predictions["base"]
    evaluation = Evaluation("t", both.questions, {**both.predictions, "temperature": base.renamed("temperature")})
    assert results_table(Run("r", (evaluation,), LENS), n_boot=30).tasks[0].best["accuracy"] == {"base", "temperature"}


def test_a_corrected_test_that_disagrees_takes_the_lead_away() -> None:
    clear = Difference(0.1, 0.01, 0.2, 0.03)
    comparison = Comparison("coral", "base", {"accuracy": clear}, {"accuracy": 0.3})
    assert not confirmed("accuracy", frozenset({"coral"}), [comparison])
    assert confirmed(
        "accuracy", frozenset({"coral"}), [Comparison("coral", "base", {"accuracy": clear}, {"accuracy": 0.01})]
    )


def test_answers_of_probability_zero_are_counted_beside_nll() -> None:
    probs = {"base": [[0.5, 0.5]] * 3, "coral": [[1.0, 0.0], [1.0, 0.0], [0.4, 0.6]]}
    table = results_table(Run("r", (task("t", probs, [0, 1, 1]),), LENS), n_boot=20)
    assert formats.method_row(table.tasks[0], "coral").cells["nll"].note == "1 zero"
    assert formats.method_row(table.tasks[0], "base").cells["nll"].note == ""
    assert "1 of 3 questions the paper's correction (CORAL) gave the correct option probability 0" in " ".join(
        details(table)
    )


def test_the_rule_below_the_picture_at_the_head_is_as_wide_as_the_rows_above_it() -> None:
    """The rule is the upper border of the caption: its text has a measure, and its box must have none."""
    css = (Path(pages.__file__).parent / "page.css").read_text()
    (caption,) = re.findall(r"^\.glance figcaption \{(.*)\}", css, re.MULTILINE)
    assert "border-top" in caption
    assert "max-width: none" in caption


def test_a_control_that_ruled_out_the_truth_is_called_a_control() -> None:
    probs = {"base": [[0.5, 0.5]] * 3, "coral": [[1.0, 0.0]] * 3, "listwise": [[0.5, 0.5]] * 3}
    said = " ".join(details(results_table(Run("r", (task("t", probs, [0, 1, 1]),), LENS), n_boot=20)))
    assert (
        "On 2 of 3 questions the paper's correction (CORAL), here a control beside “listwise”, gave the correct" in said
    )


def test_percent_has_a_true_minus_and_no_negative_zero() -> None:
    assert formats.percent(-0.1234) == "−12.3"
    assert formats.percent(-0.0001) == "0.0"
    assert formats.percent(0.5, sign=True) == "+50.0"
    assert formats.percent(float("nan")) == "n/a"


def test_the_terminal_table_fits_an_ordinary_terminal(table: ResultsTable) -> None:
    console = Console(width=84, record=True, file=io.StringIO())
    console.print(in_full(table))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 84
    assert "…" not in text
    assert "CORAL" in text


def test_the_terminal_says_first_whether_it_helped_in_80_columns(table: ResultsTable) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(in_short(table))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    flat = " ".join(text.split())
    assert flat.startswith(" ".join(" ".join(headline(table)).split()))
    assert re.search(r"seen \(held-out\) +150 +\d+\.\d→\d+\.\d ▲ .* better", text)
    assert re.search(r"unseen \(transfer\) +200 +\d+\.\d→\d+\.\d ▼ .* worse", text)


# --- files ------------------------------------------------------------------------------------------------------------


def test_all_files_are_written_and_the_same_run_gives_the_same_page(
    run: Run, table: ResultsTable, page: str, tmp_path: Path
) -> None:
    path = write_report(run, tmp_path / "new" / "folder", table=table)
    assert path == tmp_path / "new" / "folder" / "report.html"
    assert path.read_text(encoding="utf-8") == page
    assert {p.name for p in path.parent.iterdir()} == {"report.html", "results.md", "results.csv", "results.json"}


def test_json_and_csv_hold_fractions_and_no_nan(table: ResultsTable) -> None:
    record = json.loads(json.dumps(exports.results_record(table), allow_nan=False))
    seen = table.tasks[0]
    brier = seen.metrics["coral"].scores["brier"].value
    assert record["tasks"][0]["methods"]["coral"]["scores"]["brier"]["value"] == brier
    lines = list(csv.DictReader(exports.results_csv(table).splitlines()))
    (line,) = [
        x for x in lines if (x["task"], x["method"], x["against"], x["metric"]) == ("seen", "coral", "", "brier")
    ]
    assert float(line["value"]) == brier
    assert not any("nan" in value.lower() for x in lines for value in x.values())


# --- the page ---------------------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Collects tags, ids and addresses, and refuses a tag that closes another one than the last opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "no handlers"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_no_id_is_used_twice(page: str) -> None:
    found = Checker(page)
    assert not found.open
    assert len(found.ids) == len(set(found.ids))


def test_nothing_in_a_question_or_a_name_becomes_markup(page: str) -> None:
    tags = Checker(page).tags
    assert tags.count("script") == 2  # the data of the browser of questions, and its program
    assert "img" not in tags
    assert "&lt;script&gt;" in page


def test_the_page_loads_nothing_from_outside(page: str) -> None:
    found = Checker(page)
    assert all(address.startswith("#") for address in found.addresses)
    assert {address.removeprefix("#") for address in found.addresses} <= set(found.ids)
    assert set(re.findall(r"url\(#?([^)]+)\)", page)) <= set(found.ids)
    assert "@import" not in page
    assert "link" not in found.tags


def test_every_figure_and_table_is_found_from_the_contents(run: Run, table: ResultsTable, page: str) -> None:
    found = Checker(page)
    listed = [a.removeprefix("#") for a in found.addresses if re.match(r"#(figure|table)-", a)]
    assert listed == [i for i in found.ids if re.match(r"(figure|table)-\d+$", i)]
    assert found.tags.count("figure") == 1 + len([x for x in listed if x.startswith("figure")])  # one at the head
    assert found.tags.count("table") == len([x for x in listed if x.startswith("table")]) == len(table.tasks)
    sections = [a for a in found.addresses if a in {"#results", "#calibration", "#questions", "#choice", "#provenance"}]
    assert len(set(sections)) == 5


def hostile_finding() -> Gathered:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    rows = ((NASTY, "0.123456"), ("b", "2"))
    return Gathered(
        "layers", "", f"Layers {NASTY}", f"A caption {NASTY}", f'alt " {NASTY}', svg, ("what", "r2"), rows, 900
    )


def test_findings_are_gathered_with_their_numbers_and_nothing_in_them_becomes_markup(
    run: Run, table: ResultsTable
) -> None:
    page = render_report(run, table=table, findings=[hostile_finding()])
    found = Checker(page)
    assert found.tags.count("script") == 2
    assert found.tags.count("img") == 1
    image = next(a for a in found.addresses if a.startswith("data:image/svg+xml;base64,"))
    assert base64.b64decode(image.split(",")[1]) == hostile_finding().svg  # as an image it runs no script
    assert "Where correctness lives" in page
    assert "<td>0.1235</td>" in page
    assert "Numbers (900 rows)" in page
    assert re.search(r'<a href="#figure-\d+"><span class="number">Figure \d+</span> Layers &lt;script', page)


def test_no_script_runs_in_the_page_and_nothing_is_fetched(page: str) -> None:
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    assert "img-src data:" in policy
    assert "http" not in policy


def test_many_methods_leave_the_page_readable() -> None:
    skill = {"base": 0.0, "temperature": 0.1, "coral": 1.0, **{f"method {i}": 0.5 for i in range(9)}}
    run = Run("many", (random_task("t", 40, skill=skill),), {"model": {"name": "tiny"}})
    page = render_report(run, table=results_table(run, n_boot=10))
    assert page.count("<figure") == 1 + 3 + 1


def test_losses_are_in_the_headline_and_among_the_examples(run: Run, table: ResultsTable, page: str) -> None:
    helped, trusted, worse = headline(table)
    assert re.match(
        r"[^:]+: on 2 tasks with 350 questions, the model is right on \d+\.\d % with “CORAL” and on \d", helped
    )
    assert "brackets are 95 % intervals" in helped
    assert "the Brier score (the error of all its probabilities" in trusted
    assert re.search(r"What got worse: Accuracy on unseen, \d+\.\d.→.\d+\.\d \(clearly worse\); Brier on unseen", worse)
    assert all(sentence.replace("'", "&#39;") in page for sentence in (helped, trusted, worse))
    unseen = answer_changes(run.evaluations[0], before="base", after="coral")
    assert unseen is not None
    assert unseen.n_worse > unseen.n_better
    assert f"{unseen.n_worse} became wrong" in page
    assert page.count('class="example worse"') == page.count('class="example better"') == 1
    assert page.count("clearly worse") >= 2


def test_a_large_loss_of_an_ece_is_seen_though_questions_are_too_few_to_test_it() -> None:
    """Sure by 50 % and right in half of the cases before; sure by 95 % and no more right after."""
    answers = [0, 1] * 40
    probs = {"base": [[0.51, 0.49]] * 80, "coral": [[0.95, 0.05]] * 80}
    table = results_table(Run("r", (task("t", probs, answers, trained_on=True),), LENS), n_boot=50)
    (at_a_glance,) = glances(table)
    accuracy, brier, ece = at_a_glance.changes
    assert (accuracy.verdict.words, accuracy.verdict.mark) == ("not clear", "")
    assert (brier.verdict.words, brier.verdict.mark) == ("clearly worse", "▼")
    assert (ece.verdict.words, ece.verdict.mark) == ("seems worse, but there are too few questions to test it", "▽")
    assert at_a_glance.word == "worse"
    said = headline(table)[2]
    assert "ECE on t, 1.0\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}45.0 (on 80 questions, too few to test an ECE" in said


def test_the_first_words_never_call_better_probabilities_more_right_answers() -> None:
    """Both are right on the first half of the questions; only how sure they are differs."""
    answers = [0] * 40 + [1] * 40
    sure, unsure = [[0.9, 0.1]] * 80, [[0.6, 0.4]] * 80
    better, worse = (
        headline(results_table(Run("r", (task("arc_easy:test", {"base": a, "coral": b}, answers),), LENS), n_boot=50))
        for a, b in ((sure, unsure), (unsure, sure))
    )
    assert better[0].startswith(
        "It gives better probabilities, but not clearly more right answers: on 80 questions of ARC-Easy"
    )
    assert better[2] == "Nothing got clearly worse on any task; small losses may hide in the intervals."
    assert worse[0].startswith("It made the probabilities worse")
    assert "Brier on ARC-Easy" in worse[2]


def test_folds_hold_everything_but_the_head(page: str) -> None:
    assert page.count('<details class="fold">') == 6
    assert "<details open" not in page
    assert page.index('class="glance"') < page.index('class="fold"')


def test_reliability_is_shown_once(run: Run, table: ResultsTable) -> None:
    finding = replace(hostile_finding(), name="confidence-reliability-seen", section="confidence", title="Twice")
    assert "Twice" not in render_report(run, table=table, findings=[finding])


def test_changes_worked_by_hand() -> None:
    base = [[0.9, 0.1], [0.9, 0.1], [0.2, 0.8], [0.3, 0.3, 0.4], [0.6, 0.4]]
    coral = [[0.8, 0.2], [0.3, 0.7], [0.7, 0.3], [0.1, 0.5, 0.4], [0.1, 0.9]]
    evaluation = task("t", {"base": base, "coral": coral}, [0, 1, 1, 0, 1])
    changes = answer_changes(evaluation, before="base", after="coral")
    assert changes is not None
    assert (changes.still_right, changes.n_better, changes.n_worse, changes.still_wrong) == (1, 2, 1, 1)
    assert answer_changes(evaluation, before="base", after="iti") is None
    better, worse = choose_examples([evaluation], before="base", after="coral")
    assert better is not None
    assert worse is not None
    assert better.id == "t/1"  # a gain of 0.6; that of t/4 is 0.5
    assert (worse.id, worse.before, worse.after) == ("t/2", 1, 0)
    assert choose_examples([evaluation], before="base", after="iti") == (None, None)


def test_what_is_shown_unasked_is_short_and_plain() -> None:
    def asked(text: str, *options: str) -> Question:
        return Question("q", "q", text, options or ("a house", "a tree"), 0)

    assert is_plain(asked("Question: Where do clouds float?\nAnswer:"))
    assert is_plain(asked("Which analysis of the stable gravel is made by explorers in Essex?"))
    assert not is_plain(asked("Where do clouds float? " * 20))
    assert not is_plain(asked("Why was he KILLED?"))
    assert not is_plain(asked("Where do clouds float?", "air", "a murderer"))
    unfit = task("t", {"base": [[0.9, 0.1]] * 2, "coral": [[0.1, 0.9], [0.2, 0.8]]}, [1, 1])
    unfit = replace(unfit, questions=(replace(unfit.questions[0], text="Who stole it?"), unfit.questions[1]))
    better, _ = choose_examples([unfit], before="base", after="coral")
    assert better is not None
    assert better.id == "t/1"  # t/0 gained more


def test_long_questions_are_cut_in_the_middle() -> None:
    text = shortened("Question: " + "a" * 400 + "b" * 400 + "?\nAnswer:")
    assert text.startswith("aaa")
    assert text.endswith("b?")
    assert "[…]" in text
    assert len(text) < 720


@pytest.mark.parametrize("lens", [LENS, {**LENS, "trace": {}}, {**LENS, "trace": {**LENS["trace"], "layers": []}}])
def test_a_run_with_one_method_or_without_a_trace_still_has_a_page(lens: dict[str, Any]) -> None:
    run = Run("one", (random_task("t", 30, skill={"base": 1.0}),), lens)
    page = render_report(run, table=results_table(run, n_boot=20))
    assert "base has" in page
    assert 'id="questions"' not in page
    assert page.count("<svg") == 4 + len([c for c in (layer_curve(lens), gamma_curve(lens)) if c])


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_valid_and_come_out_the_same(run: Run, table: ResultsTable) -> None:
    seen = table.tasks[0]
    predictions = run.evaluations[1].predictions["coral"]
    curves = [c for c in (layer_curve(LENS), gamma_curve(LENS)) if c]
    pictures = [
        metric_picture(table, "ece", name="ece"),
        reliability_picture(predictions, seen.metrics["coral"], name="reliability"),
        *(curve_picture(c, name=c.axis) for c in curves),
    ]
    for picture in pictures:
        svg = picture.svg()
        assert ElementTree.fromstring(svg).attrib["aria-label"] == picture.alt
        assert svg == picture.svg()
        assert len(svg) < 30_000
        assert "<text" in svg  # letters are text, not outlines
    assert pictures[0].png(dpi=50).startswith(b"\x89PNG")


def test_a_diagram_without_thin_bins_keeps_its_shape() -> None:
    """An empty line for the hollow dots once made the layout collapse: the axes must fill most of the figure."""
    from matplotlib.figure import Figure

    predictions = task("t", {"base": [[0.65, 0.35]] * 40}, [0] * 20 + [1] * 20).predictions["base"]
    picture = reliability_picture(predictions, measure(predictions, n_boot=20), name="x")
    figure = Figure(figsize=(4.6, picture.height), layout="constrained")
    picture.paint(figure)
    figure.draw_without_rendering()
    assert sum(axes.get_position().height for axes in figure.axes) > 0.6


def test_wilson_agrees_with_scipy() -> None:
    right, count = np.array([0.0, 3.0, 10.0, 40.0]), np.array([3, 3, 25, 41])
    low, high = wilson(right, count)
    for i in range(len(count)):
        expected = binomtest(int(right[i]), int(count[i])).proportion_ci(method="wilson")
        assert (low[i], high[i]) == pytest.approx((expected.low, expected.high), abs=1e-7)


def test_how_flat_the_choice_is() -> None:
    layers, gammas = layer_curve(LENS), gamma_curve(LENS)
    assert layers is not None
    assert gammas is not None
    assert layers.near_spans == ["1 to 3"]
    assert "3 come within 1 point of the best validation score (1 to 3)" in flatness(layers)
    assert "the largest that was tried" in flatness(gammas)
    assert gammas.controls["base"]["brier"] == gammas.scores["brier"][0] == 0.9
    assert gammas.controls["temperature"]["brier"] == 0.7


def test_the_chosen_gamma_is_where_the_curve_says_even_if_the_lens_keeps_it_in_units_of_its_scale() -> None:
    curve = gamma_curve({**LENS, "gamma": 2.7})
    assert curve is not None
    assert curve.chosen == 1.0
    assert "the largest that was tried" in flatness(curve)


def test_gamma_zero_is_the_base_under_the_papers_rule_only() -> None:
    trace = {**LENS["trace"], "gammas": [{**g, "brier": 0.65} for g in LENS["trace"]["gammas"]]}
    paper, listwise = (gamma_curve({**LENS, "trace": {**trace, "rule": rule}}) for rule in ("residual", "listwise"))
    assert paper is not None
    assert listwise is not None
    assert paper.controls["base"]["brier"] == 0.65
    assert listwise.controls["base"]["brier"] == 0.9
