"""Probes and data: a lens carries to a task that is the same, and not to one that is turned round; more questions help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.planted import PlantedStore

from coral_lens.analysis import data as data_module
from coral_lens.analysis import probes as probes_module
from coral_lens.analysis.data import CurveAnalysis, TransferAnalysis, analyse_curves, analyse_transfer
from coral_lens.analysis.files import write_analysis
from coral_lens.analysis.held_out import Seen, parts_of_task, tasks_of
from coral_lens.analysis.probes import DECAYS, DROPOUTS, PENALTIES, ProbeAnalysis, analyse_probes
from coral_lens.analysis.settings import ProbePlan
from coral_lens.cli.printing import against_one, print_learning_curves, print_probes, print_transfer
from coral_lens.engine.activations import JoinedStore, first_questions
from coral_lens.errors import CoralError
from coral_lens.lens.fit import fit_store
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.comparisons import Difference
from coral_lens.report.figures import analysis as analysis_figures
from coral_lens.report.figures.analysis import write_analysis_pictures

RIDGE = FitSettings(lens="ridge", temper=False)

pytestmark = pytest.mark.usefixtures("one_thread")


def stored(n: int, tasks: dict[str, float], *, apart: float = 0.0, seed: int = 0) -> PlantedStore:
    """A planted store that knows its prompt style, as those on the disk do."""
    store = PlantedStore(n, signal={1: 2.0}, tasks=tasks, apart=apart, seed=seed)
    store.manifest["style"] = "text"
    return store


@pytest.fixture(scope="module")
def transfer() -> TransferAnalysis:
    """`here` and `there` are the same in all but name; in `turned` what says yes elsewhere says no."""
    return analyse_transfer([stored(150, {"here": 1.0, "there": 1.0, "turned": -1.0})], RIDGE)


def of(found: TransferAnalysis, train: str, test: str) -> tuple[float, float, float]:
    row = next(row for row in found.rows if (row.train, row.test) == (train, test))
    return row.gain["accuracy"].low, row.gain["accuracy"].high, row.shift


def test_a_lens_carries_to_the_same_task_under_another_name_and_harms_where_the_signal_is_turned(
    transfer: TransferAnalysis,
) -> None:
    for train, test in (("here", "here"), ("here", "there"), ("there", "here"), ("turned", "turned")):
        assert of(transfer, train, test)[0] > 0
    for train, test in (("here", "turned"), ("turned", "there")):
        assert of(transfer, train, test)[1] < 0


def test_identical_tasks_show_no_shift_and_tasks_apart_do(transfer: TransferAnalysis) -> None:
    for train, test in (("here", "there"), ("there", "here")):
        # over what the task's own held-out questions show: few questions say what is typical, and that is noisy
        assert of(transfer, train, test)[2] / of(transfer, train, train)[2] == pytest.approx(1.0, abs=0.2)
    apart = analyse_transfer([stored(80, {"a": 1.0, "b": 1.0}, apart=3.0)], RIDGE)
    assert all((row.shift > 1.5) == (row.train != row.test) for row in apart.rows)


def test_tested_questions_are_never_fitted_on() -> None:
    stores = [stored(60, {"a": 1.0, "b": 1.0}), stored(60, {"c": 1.0}, seed=1)]
    assert tasks_of(stores) == ["a", "b", "c"]
    for task in (None, "a", "c"):
        fitted, tested = (parts_of_task(stores, task, held_out=held_out) for held_out in (False, True))
        ours, theirs = ({(q.text, q.task) for q in s.questions} for s in (fitted, tested))
        assert not ours & theirs
        assert task is None or {t for _, t in ours | theirs} == {task}
        assert 0.25 < len(theirs) / len(ours | theirs) < 0.35
    drawn = parts_of_task(stores, None, held_out=False, limit=30, seed=1)
    assert len(drawn.questions) == 30
    assert [q.text for q in drawn.questions] != [
        q.text for q in parts_of_task(stores, None, held_out=False, limit=30, seed=2).questions
    ]
    with pytest.raises(CoralError, match="No question of d is left to test on"):
        parts_of_task(stores, "d", held_out=True)


# ------------------------------------------------------------------------------------------------------ what is a task


def own_files(n: int, folder: str, *, seed: int) -> PlantedStore:
    """A store of own questions, which are all called `questions`."""
    store = stored(n, {"questions": 1.0}, seed=seed)
    store.folder, store.name = Path(folder), folder
    return store


def test_each_store_of_own_files_is_a_task_of_its_own() -> None:
    law, med = own_files(40, "states/law", seed=0), own_files(40, "states/med", seed=1)
    assert tasks_of([law]) == ["questions"]
    assert tasks_of([law, med]) == ["questions (law)", "questions (med)"]
    assert tasks_of([law, own_files(40, "new/law", seed=1)]) == ["questions (states/law)", "questions (new/law)"]
    tested = parts_of_task([law, med], "questions (med)", held_out=True)
    assert {q.text.split("/")[0] for q in tested.questions} == {"Planted 1"}
    found = analyse_transfer([law, med], RIDGE)
    assert [(row.train, row.test) for row in found.rows] == [
        (a, b) for a in tasks_of([law, med]) for b in tasks_of([law, med])
    ]
    with pytest.raises(CoralError, match=r"Two stores are both questions \(states/law\); give every --store once"):
        tasks_of([law, law])


def test_the_subjects_of_a_group_are_one_task_and_a_pair_of_tasks_is_not() -> None:
    store = stored(10, {"mmlu_law": 1.0, "mmlu_art": 1.0, "arc_easy": 1.0, "mmlu_math": 1.0, "arc_challenge": 1.0})
    assert tasks_of([store]) == ["mmlu", "arc_easy", "arc_challenge"]
    fitted, tested = (parts_of_task([store], "mmlu", held_out=held_out).questions for held_out in (False, True))
    assert (len(fitted), len(tested)) == (21, 9)
    assert {q.task for q in tested} == {"mmlu_law", "mmlu_art", "mmlu_math"}


def test_a_task_that_is_too_small_is_refused_before_any_lens_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "fit_store", None)
    with pytest.raises(CoralError, match="small has 7 questions to fit on, and a lens needs 20 at least"):
        analyse_curves([stored(60, {"large": 1.0}), stored(10, {"small": 1.0}, seed=1)], RIDGE)


def test_every_one_of_many_tasks_is_drawn(curves: CurveAnalysis, probes: ProbeAnalysis, tmp_path: Path) -> None:
    names = [f"task {i}" for i in range(12)]
    many = replace(
        curves,
        rows=tuple(replace(row, task=name) for name in names for row in curves.rows),
        base=dict.fromkeys(names, curves.base["here"]),
    )
    (picture,) = analysis_figures.curve_pictures(write_analysis("data-curves", many, tmp_path))
    figure = Figure()
    picture.paint(figure)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == names
    assert len({(look.colour, look.marker) for look in analysis_figures.with_looks(names).values()}) == 12


# ---------------------------------------------------------------------------------------------------- what was fitted on


def in_another_form(store: PlantedStore, task: str) -> PlantedStore:
    """The same questions with other ids, so that other ones are held out."""
    n = len(store.questions)
    other = stored(n, {"here": 1.0})
    other.questions = [replace(q, id=f"x{n - i}", group=f"x{n - i}", task=task) for i, q in enumerate(store.questions)]
    other.manifest["seed"] = "another form"
    return other


def test_questions_that_were_fitted_on_are_never_tested_under_another_name(quick_plan: ProbePlan) -> None:
    here = stored(100, {"here": 1.0})
    stores = [here, in_another_form(here, "copy"), stored(60, {"other": 1.0}, seed=1)]
    known = {q.text for q in parts_of_task(stores, "here", held_out=False).questions}
    copied = parts_of_task(stores, "copy", held_out=True)
    fresh = [q.text for q in copied.questions if q.text not in known]
    assert 0 < len(fresh) < len(copied.questions) == 30
    assert [
        q.text for q in Seen(parts_of_task(stores, "here", held_out=False).questions).unseen(copied).questions
    ] == fresh
    wanted = {"here": 30, "copy": len(fresh), "other": 18}
    rows = analyse_probes(stores, "here", RIDGE, plan=quick_plan).rows
    assert {row.test: row.n_test for row in rows if row.probe == "ridge"} == wanted
    matrix = analyse_transfer(stores, RIDGE).rows
    assert {row.test: row.n_test for row in matrix if row.train == "here"} == wanted


def test_a_row_of_a_dataset_is_recognised_whether_it_is_asked_by_letter_or_as_cloze() -> None:
    cloze, letters = (stored(20, {task: 1.0}) for task in ("commonsense_qa_cloze", "commonsense_qa"))
    for store in (cloze, letters):
        store.questions = [
            replace(q, id=f"{q.task}/train/{q.id}", group=f"{q.task}/train/{q.id}", split="train", text=f"{q.task} {i}")
            for i, q in enumerate(store.questions)
        ]
    joined = JoinedStore([first_questions(letters, None)])
    found = Seen(cloze.questions[5:]).unseen(joined)
    assert [q.id for q in found.questions] == [q.id for q in letters.questions[:5]]
    with pytest.raises(CoralError, match="All 20 questions to test of commonsense_qa are among those"):
        Seen(cloze.questions).unseen(joined)
    elsewhere = [replace(q, split="validation", id=q.id.replace("train", "validation")) for q in cloze.questions]
    assert Seen(elsewhere).unseen(joined) is joined
    turned = [replace(q, answer=(q.answer + 1) % len(q.options)) for q in cloze.questions]
    with pytest.raises(CoralError, match="called the same row of one dataset, and their options differ"):
        Seen(turned).unseen(joined)


def test_questions_about_an_article_that_was_fitted_on_are_never_tested() -> None:
    race, again = stored(20, {"race": 1.0}), stored(20, {"questions": 1.0}, seed=1)
    for store in (race, again):
        store.questions = [replace(q, group=f"article-{i // 2}") for i, q in enumerate(store.questions)]
    found = Seen(race.questions[4:]).unseen(JoinedStore([first_questions(again, None)]))
    assert [q.group for q in found.questions] == ["article-0", "article-0", "article-1", "article-1"]


def test_kept_questions_are_those_that_are_marked() -> None:
    whole = parts_of_task([stored(60, {"a": 1.0}), stored(60, {"c": 1.0}, seed=1)], None, held_out=True)
    some = whole.take(np.arange(len(whole.questions)) % 2 == 0)
    assert [q.id for q in some.questions] == [q.id for q in whole.questions[::2]]
    assert Seen(stored(60, {"a": 1.0}, seed=2).questions).unseen(whole) is whole


@pytest.fixture(scope="module")
def curves() -> CurveAnalysis:
    return analyse_curves([stored(300, {"here": 1.0})], RIDGE, draws=2)


def test_more_questions_help(curves: CurveAnalysis) -> None:
    sizes = sorted({row.n_train for row in curves.rows})
    assert sizes == [21, 42, 84, 147, 210]
    brier = [np.mean([r.scores["brier"].value for r in curves.rows if r.n_train == n]) for n in sizes]
    assert brier[-1] < brier[0]
    assert [sum(row.n_train == n for row in curves.rows) for n in sizes] == [2, 2, 2, 2, 1]
    assert brier[-1] < curves.base["here"]["brier"].low


def test_a_killed_analysis_of_data_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores, journal = [stored(60, {"here": 1.0, "there": 1.0})], tmp_path / "data.jsonl"

    def analysed(journal: Path | None) -> tuple[CurveAnalysis, TransferAnalysis]:
        return (
            analyse_curves(stores, RIDGE, draws=1, journal=journal),
            analyse_transfer(stores, RIDGE, journal=journal),
        )

    undisturbed = analysed(None)
    n = len(undisturbed[0].rows) + 2
    left = [n - 1]

    def fit(*arguments: Any, device: str) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return fit_store(*arguments, device=device)

    monkeypatch.setattr(data_module, "fit_store", fit)
    with pytest.raises(KeyboardInterrupt):
        analysed(journal)
    assert len(journal.read_bytes().splitlines()) == n - 1
    left[0] = 1
    assert analysed(journal) == undisturbed
    assert left == [0], "one lens was left to fit"


def test_one_task_has_no_transfer_matrix() -> None:
    with pytest.raises(CoralError, match="needs stores of two tasks or more"):
        analyse_transfer([stored(40, {"here": 1.0})], RIDGE)


@pytest.fixture(scope="module")
def probes() -> ProbeAnalysis:
    stores = [stored(150, {"here": 1.0, "turned": -1.0})]
    plan = ProbePlan(depths=(0, 1), seeds=1, grid_depth=0, epochs=2)
    return analyse_probes(stores, "here", RIDGE, plan=plan)


@pytest.fixture
def quick_plan(monkeypatch: pytest.MonkeyPatch) -> ProbePlan:
    """Three networks of no depth and one epoch."""
    monkeypatch.setattr(probes_module, "DECAYS", (1.0,))
    monkeypatch.setattr(probes_module, "PENALTIES", (0.0,))
    return ProbePlan(depths=(0,), seeds=1, grid_depth=0, epochs=1)


def test_only_the_layers_that_were_asked_for_are_tried(quick_plan: ProbePlan) -> None:
    """Layer 1 knows the answers; of the others one must be taken, also where the layer is chosen anew."""
    stores = [stored(60, {"here": 1.0, "turned": -1.0})]
    found = analyse_probes(stores, "here", replace(RIDGE, layers=(0, 2)), plan=quick_plan)
    assert found.layer in (0, 2)
    assert {row.layer for row in found.rows} <= {0, 2}


def names_of(found: ProbeAnalysis, test: str) -> Sequence[str]:
    return [row.probe for row in found.rows if row.test == test]


def test_every_probe_is_tested_in_distribution_and_in_transfer(probes: ProbeAnalysis) -> None:
    n_grid = len(DECAYS) * len(PENALTIES) * len(DROPOUTS)
    assert names_of(probes, "here") == ["ridge", "listwise", "depth 0", "depth 1", *["grid"] * n_grid]
    assert probes.layer == 1
    assert {row.transfer for row in probes.rows if row.test == "turned"} == {True}
    ridge = next(row for row in probes.rows if row.probe == "ridge" and row.test == "here")
    assert ridge.gain["brier"].value == 0.0
    assert ridge.scores["accuracy"].low > probes.base["here"]["accuracy"].value
    assert {row.weight_decay for row in probes.rows if row.probe == "grid"} == set(DECAYS)


def test_a_killed_comparison_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [stored(60, {"here": 1.0, "turned": -1.0})]
    plan = ProbePlan(depths=(0,), seeds=1, grid_depth=0, epochs=1)
    monkeypatch.setattr(probes_module, "DECAYS", (0.0, 1.0))
    monkeypatch.setattr(probes_module, "PENALTIES", (0.0,))
    first = analyse_probes(stores, "here", RIDGE, plan=plan, journal=tmp_path / "j")
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * len(DROPOUTS)
    damaged = lines[2].replace(b'"accuracy"', b'"accurate"')
    (tmp_path / "j").write_bytes(b"".join([*lines[:2], damaged, lines[3][:-20]]))
    trained: list[int] = []
    real = probes_module.predict_rounds
    monkeypatch.setattr(probes_module, "predict_rounds", lambda *a: (trained.append(1), real(*a))[1])
    assert analyse_probes(stores, "here", RIDGE, plan=plan, journal=tmp_path / "j") == first
    assert len(trained) == 3, "the damaged line, the torn one and the one that is missing"


def test_re_choosing_on_the_target_does_no_harm_where_the_signal_is_turned(probes: ProbeAnalysis) -> None:
    """A turned signal cannot be used with a positive strength: gamma 0 is chosen, or a layer that knows nothing."""
    row = next(row for row in probes.rows if "re-chosen on the target" in row.probe)
    assert row.test == "turned"
    assert row.gamma == 0.0 or row.layer != 1
    assert row.gain["brier"].high < 0
    plain = next(row for row in probes.rows if row.probe == "ridge" and row.test == "turned")
    assert plain.scores["brier"].value > probes.base["turned"]["brier"].value


def test_gamma_0_is_the_base_and_ever_stronger_steering_harms_where_the_signal_is_turned(probes: ProbeAnalysis) -> None:
    curve = [row for row in probes.gammas if row.test == "turned"]
    assert curve[0].scores == probes.base["turned"]
    brier = [row.scores["brier"].value for row in curve]
    assert brier == sorted(brier)


def test_every_strength_is_compared_with_1_on_the_same_questions(probes: ProbeAnalysis) -> None:
    for test in ("here", "turned"):
        at = {row.gamma: row for row in probes.gammas if row.test == test}
        for row in at.values():
            over = row.over_one["brier"]
            assert over.value == pytest.approx(row.scores["brier"].value - at[1.0].scores["brier"].value)
            assert over.low <= over.value <= over.high
        assert at[1.0].over_one["brier"].high == 0.0
        # paired: the difference is surer than the two scores are
        wide = at[0.0].scores["brier"].high - at[0.0].scores["brier"].low
        assert at[0.75].over_one["brier"].high - at[0.75].over_one["brier"].low < wide
    assert at[0.0].over_one["brier"].high < 0


def test_it_is_said_whether_another_strength_than_1_is_clearly_better(probes: ProbeAnalysis) -> None:
    best = min((row for row in probes.gammas if row.test == "turned"), key=lambda row: row.scores["brier"].value)
    assert against_one(best).startswith("less gamma = 1: -")
    assert against_one(best).endswith(", clear, though picked on these questions")
    unsure = replace(best, over_one={"brier": Difference(-0.01, -0.03, 0.01, 0.3)})
    assert against_one(unsure) == "less gamma = 1: -1.0 [-3.0 to 1.0], not clear, though picked on these questions"
    assert against_one(replace(best, gamma=1.0)) == "nothing is better than 1"


def printed(capsys: pytest.CaptureFixture[str], printer: Callable[[Any], None], analysis: Any) -> str:
    printer(analysis)
    return capsys.readouterr().out


def test_they_are_drawn_and_printed(
    transfer: TransferAnalysis,
    curves: CurveAnalysis,
    probes: ProbeAnalysis,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, record in (("data", transfer), ("data-curves", curves), ("probes", probes)):
        assert write_analysis_pictures(write_analysis(name, record, tmp_path), tmp_path) == [name]
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert "turned" in printed(capsys, print_transfer, transfer)
    assert len(printed(capsys, print_learning_curves, curves).splitlines()) == 6
    assert "gamma 0 is best; less gamma = 1: -" in printed(capsys, print_probes, probes)


def test_bars_of_the_figure_are_intervals_over_questions(probes: ProbeAnalysis, tmp_path: Path) -> None:
    (picture,) = analysis_figures.probe_pictures(write_analysis("probes", probes, tmp_path))
    figure = Figure()
    picture.paint(figure)
    score = next(row.scores["brier"] for row in probes.rows if (row.probe, row.test) == ("ridge", "here"))
    (bars,) = figure.axes[0].containers[0].lines[2]
    assert bars.get_segments()[0][:, 1] == pytest.approx([100 * score.low, 100 * score.high])
    assert analysis_figures.averaged([{"value": 2, "low": 1, "high": 4}, {"value": 4, "low": 2, "high": 5}]) == {
        "value": 3, "low": 1.5, "high": 4.5
    }  # fmt: skip
