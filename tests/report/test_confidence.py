"""What confidence is worth, in numbers worked by hand, and in figures whose files hold them."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from coral_lens.errors import CoralError
from coral_lens.metrics.curves import risk_coverage
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question
from coral_lens.report import confidence
from coral_lens.report.figures.confidence import confidence_findings, short_names
from coral_lens.report.figures.style import KNOWN, RC, looks_of
from coral_lens.report.findings import gather_findings, write_findings
from coral_lens.report.runs import Evaluation, Run

LENS = {"model": {"name": "tiny"}}
NASTY = "<script>alert(1)</script>"


def predicted(probs: list[list[float]], answers: list[int], *, method: str = "base", name: str = "t") -> Predictions:
    ids = tuple(f"{name}/{i}" for i in range(len(probs)))
    offsets = Options.of_sizes([len(p) for p in probs]).edges
    return Predictions(method, "tiny", name, "test", ids, np.array(answers), offsets, np.concatenate(probs))


def letters(
    name: str, by_method: dict[str, list[list[float]]], answers: list[int], *, tasks: list[str] | None = None
) -> Evaluation:
    """A test set whose options are letters."""
    probs = next(iter(by_method.values()))
    questions = tuple(
        Question(f"{name}/{i}", f"{name}/{i}", "Which?", tuple("ABCDE"[: len(p)]), a, task=tasks[i] if tasks else name)
        for i, (p, a) in enumerate(zip(probs, answers, strict=True))
    )
    return Evaluation(name, questions, {m: predicted(p, answers, method=m, name=name) for m, p in by_method.items()})


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_adaptive_bins_hold_equally_many_and_equal_width_bins_do_not() -> None:
    sure = [0.55, 0.56, 0.57, 0.95]
    bins = confidence.both_bins(predicted([[c, 1 - c] for c in sure], [0, 1, 0, 0]), n_bins=2)
    assert bins["adaptive"].count.tolist() == [2, 2]
    assert bins["adaptive"].accuracy.tolist() == [0.5, 1.0]
    assert bins["adaptive"].confidence.tolist() == pytest.approx([0.555, 0.76])
    assert bins["equal width"].count.tolist() == [4]
    assert bins["equal width"].accuracy.tolist() == [0.75]


def test_risk_at_a_coverage_worked_by_hand() -> None:
    """Twenty questions, the surest five right, the others wrong: a quarter answered has no error, all have 15 of 20."""
    sure = [0.99 - 0.02 * i for i in range(20)]
    risk = confidence.risk_with_interval(predicted([[c, 1 - c] for c in sure], [0] * 5 + [1] * 15), n_boot=50)
    assert risk.coverage[4] == 0.25
    assert risk.risk[:5].tolist() == [0.0] * 5
    assert risk.risk[5] == pytest.approx(1 / 6)
    assert risk.risk[-1] == pytest.approx(15 / 20)
    assert risk.threshold[4] == pytest.approx(0.91)
    assert (risk.low <= risk.risk).all()
    assert (risk.risk <= risk.high).all()


def test_risk_is_that_of_the_exact_curve_and_ties_count_in_proportion() -> None:
    rng = np.random.default_rng(0)
    sure = rng.choice([0.6, 0.7, 0.9], size=40)
    predictions = predicted([[c, 1 - c] for c in sure], rng.integers(2, size=40).tolist())
    risk = confidence.risk_with_interval(predictions, n_boot=20)
    assert risk.risk == pytest.approx(
        risk_coverage(predictions).risk[1::2]
    )  # a twentieth of 40 is every second question


def test_overconfidence_and_gain_worked_by_hand() -> None:
    base = predicted([[0.9, 0.1]] * 4, [0, 1, 1, 1])
    after = predicted([[0.3, 0.7]] * 4, [0, 1, 1, 1], method="coral")
    found = confidence.confidence_summary(after, base=base, n_boot=200)
    assert found.accuracy.value == 0.75
    assert found.confidence.value == pytest.approx(0.7)
    assert found.overconfidence.value == pytest.approx(0.7 - 0.75)
    assert found.gain is not None
    assert found.gain.value == 0.5  # one lost, three won, of four
    assert found.gain.low < 0.5 < found.gain.high
    assert confidence.confidence_summary(base, base=base).gain is None


def test_a_bias_towards_the_first_position_is_found() -> None:
    """The answers are spread evenly over four places; the method says A on three of four questions."""
    answers = [0, 1, 2, 3] * 10
    always = [[0.7, 0.1, 0.1, 0.1] if a != 3 else [0.1, 0.1, 0.1, 0.7] for a in answers]
    places = confidence.position_bias(predicted(always, answers), n_boot=200)
    assert [p.position for p in places] == ["A", "B", "C", "D"]
    assert [p.right.value for p in places] == [0.25] * 4
    assert [p.chosen.value for p in places] == [0.75, 0.0, 0.0, 0.25]
    assert [p.excess.value for p in places] == [0.5, -0.25, -0.25, 0.0]
    assert places[0].excess.low > 0
    assert (places[3].excess.low, places[3].excess.high) == (0.0, 0.0)  # it is right whenever it says D


def test_a_position_counts_only_the_questions_that_have_it() -> None:
    places = confidence.position_bias(predicted([[0.6, 0.4], [0.2, 0.3, 0.5]], [0, 2]), n_boot=20)
    assert [p.n_questions for p in places] == [2, 2, 1]
    assert places[2].chosen.value == places[2].right.value == 1.0


def test_only_tasks_answered_by_letters_have_positions() -> None:
    listed = letters("t", {"base": [[0.6, 0.4]]}, [0])
    texts = Evaluation("t", (Question("a", "a", "?", ("red", "blue"), 0),), {"base": predicted([[0.6, 0.4]], [0])})
    assert confidence.is_lettered(listed)
    assert not confidence.is_lettered(texts)
    assert confidence.is_lettered(texts, {"kind": "letters"})


def test_histogram_counts_right_and_wrong() -> None:
    bins = list(confidence.histogram(predicted([[0.52, 0.48], [0.54, 0.46], [1.0, 0.0]], [0, 1, 0]), n_bins=10))
    assert [(low, right, wrong) for low, _, right, wrong in bins if right or wrong] == [(0.5, 1, 1), (0.9, 1, 0)]


# --- families and subjects --------------------------------------------------------------------------------------------


def subjects_run() -> Run:
    logged = [letters(f"mmlu_{s}", {"base": [[0.6, 0.4], [0.7, 0.3]]}, [0, 1]) for s in ("law", "virology", "anatomy")]
    return Run("logs", (*logged, letters("arc_easy", {"base": [[0.8, 0.2]]}, [0])), LENS)


def test_subjects_that_were_logged_one_by_one_are_taken_together() -> None:
    found = confidence.pooled(subjects_run())
    assert [(e.name, len(e.questions)) for e in found] == [("mmlu (3 tasks)", 6), ("arc_easy", 1)]
    assert found[0].predictions["base"].answers.tolist() == [0, 1] * 3
    assert found[0].predictions["base"].probs.tolist() == [0.6, 0.4, 0.7, 0.3] * 3


def test_subjects_of_one_test_set_are_told_apart() -> None:
    tasks = ["mmlu_law", "mmlu_law", "mmlu_anatomy"]
    run = Run("r", (letters("mmlu", {"base": [[0.6, 0.4]] * 3}, [0, 1, 1], tasks=tasks),), LENS)
    found = confidence.subject_summaries(run, n_boot=20)
    assert [(s.test, s.task, s.n_questions, s.accuracy.value) for s in found] == [
        ("mmlu", "mmlu_law", 2, 0.5),
        ("mmlu", "mmlu_anatomy", 1, 0.0),
    ]
    assert list(short_names(found).values()) == ["law", "anatomy"]
    assert list(short_names(confidence.subject_summaries(subjects_run(), n_boot=5)).values()) == [
        "law",
        "virology",
        "anatomy",
        "ARC-Easy",
    ]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    methods = ["base", "temperature", "coral", NASTY]
    rng = np.random.default_rng(0)
    by_method = {m: rng.dirichlet(np.ones(4), size=40).tolist() for m in methods}
    run = Run("r", (letters(f"letters {NASTY}", by_method, rng.integers(4, size=40).tolist()),), LENS)
    folder = tmp_path_factory.mktemp("run")
    write_findings(confidence_findings(run, n_boot=20), folder / "analysis" / "confidence")
    return folder


def test_every_finding_has_its_table_and_its_figure_in_four_files(folder: Path) -> None:
    found = gather_findings(folder)
    kinds = [g.name.split("-")[1] for g in found]
    assert kinds == ["histogram", "positions", "reliability", "risk"]
    for one in found:
        stem = folder / "analysis" / "confidence" / one.name.removeprefix("confidence-")
        lines = list(csv.DictReader(Path(f"{stem}.csv").read_text().splitlines()))
        record = json.loads(Path(f"{stem}.json").read_text())
        assert [list(map(str, row.values())) for row in record["rows"]] == [list(x.values()) for x in lines]
        assert {x["method"] for x in lines} == {"base", "temperature", "coral", NASTY}
        assert ElementTree.fromstring(one.svg).attrib["aria-label"] == record["alt"] == one.alt
        assert Path(f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert NASTY.encode() not in one.svg


def test_findings_of_others_need_a_figure_or_a_table_only(tmp_path: Path) -> None:
    analysis = tmp_path / "analysis"
    analysis.mkdir()
    (analysis / "layers.svg").write_text("<svg/>")
    (analysis / "data_curve.csv").write_text("n,accuracy\n10,0.5\n")
    (analysis / "data_curve.json").write_text("[]")
    curve, layers = gather_findings(tmp_path)
    assert (layers.title, layers.svg, layers.rows) == ("Layers", b"<svg/>", ())
    assert (curve.title, curve.columns, curve.rows) == ("Data curve", ("n", "accuracy"), (("10", "0.5"),))
    assert gather_findings(tmp_path / "elsewhere") == []
    (analysis / "layers.json").write_text("{")
    with pytest.raises(CoralError, match=r"layers\.json is not valid JSON"):
        gather_findings(tmp_path)


def test_a_method_that_the_run_lacks_is_named() -> None:
    with pytest.raises(CoralError, match=r"no method 'bse'.*base"):
        list(confidence_findings(subjects_run(), methods=["bse"]))


# --- looks ------------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_twenty_methods_differ_without_colour_and_are_seen_on_white() -> None:
    looks = looks_of([*KNOWN, *(f"method {i}" for i in range(20 - len(KNOWN)))])
    assert len({(look.marker, look.hollow) for look in looks.values()}) == 20
    assert len({(look.marker, look.hollow, look.line, look.hatch) for look in looks.values()}) == 20
    assert all(1.05 / (luminance(look.colour) + 0.05) >= 3 for look in looks.values())
    assert RC["figure.facecolor"] == "white"
