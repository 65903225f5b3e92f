"""Every value of the paper is what a user gets who asks for nothing else.

The facts are in tests/support/paper.toml, read from the paper by eye. They are compared with the defaults of commands, of a
study's methods and of Python, and where a default is no option, with what the code then does: no constant of ours is
imported to be compared with itself. CONTRIBUTING says how these tests are tried: by breaking each value on purpose.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from sklearn.linear_model import Ridge
from support.planted import PlantedStore, one_network
from support.questions import toy_questions
from torch import nn
from typer.main import get_command

from coral_lens.analysis import heads as heads_module
from coral_lens.analysis.dimensions import analyse_dimensions
from coral_lens.analysis.folds import divide_into_folds
from coral_lens.analysis.heads import analyse_heads, summarise
from coral_lens.analysis.layers import analyse_layers
from coral_lens.analysis.probes import planned_networks
from coral_lens.analysis.scores import scores_of
from coral_lens.analysis.settings import DimensionSettings, ProbePlan
from coral_lens.cli import app
from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.lens import choose
from coral_lens.lens.fit import fit_store, training_data
from coral_lens.lens.probes import mlp
from coral_lens.lens.probes.standardise import fit_standardiser
from coral_lens.lens.settings import FitSettings, NetworkSearch
from coral_lens.methods.ccps import method as ccps
from coral_lens.methods.ccps.contrastive import Confidence
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.iti import method as iti
from coral_lens.methods.registry import read_method
from coral_lens.methods.steerconf.prompts import verbal_prompt
from coral_lens.metrics.curves import reliability
from coral_lens.metrics.scores import measure, score
from coral_lens.records import OptionTable, Predictions, Question
from coral_lens.sae.effects import AblationScores, effects
from coral_lens.sae.select import correlate, ridge_direction
from coral_lens.sae.settings import AblationPlan, Selecting, SteerPlan, TrainingSettings
from coral_lens.storage.files import read_record
from coral_lens.study.config import Mixture, load_study
from coral_lens.study.plan import held_out_ids

FACTS = tomllib.loads((Path(__file__).parent / "support" / "paper.toml").read_text("utf-8"))


@pytest.fixture(autouse=True)
def quiet(one_thread: None) -> None:
    """Tiny matrices lose time to threads."""


def options(*command: str) -> dict[str, Any]:
    """The defaults that the command line gives."""
    found: Any = get_command(app)
    for name in command:
        found = found.commands[name]
    return {p.name: p.default for p in found.params if isinstance(p, click.Option) or hasattr(p, "default")}


def method(kind: str, **more: Any) -> Any:
    """The settings that a study gives a method which it only names."""
    return read_method(MethodEntry.model_validate({"kind": kind, **more}))


# ------------------------------------------------------------------------------------------------------------ the probe


class SearchedError(Exception):
    """Raised in place of a search, with what would have been searched."""


@pytest.fixture
def grid_of_fit(monkeypatch: pytest.MonkeyPatch) -> Callable[[FitSettings], tuple[list[Any], Any]]:
    """What a fit would search: the points of its grid, and how."""

    def stop(_: Any, layers: Any, grid: Any, **more: Any) -> None:
        raise SearchedError(list(layers), list(grid), more["budget"])

    monkeypatch.setattr(choose, "search_mlp", stop)

    def of(settings: FitSettings) -> tuple[list[Any], Any]:
        with pytest.raises(SearchedError) as searched:
            fit_store(PlantedStore(40), settings)
        layers, grid, budget = searched.value.args
        assert len(layers) == len(PlantedStore(40).layers), "a network at every layer"
        return grid, budget

    return of


def test_the_network_and_its_training(grid_of_fit: Callable[..., Any]) -> None:
    facts = FACTS["probe"]
    for settings in (FitSettings(lens="mlp"), method("mlp")):
        grid, _ = grid_of_fit(settings)
        assert {point.hidden for point in grid} == {tuple(facts["hidden"])}
        assert {point.dropout for point in grid} == {facts["dropout"]}
    given = options("fit")
    assert (given["dropout"], given["hidden"], given["depth"]) == (facts["dropout"], None, len(facts["hidden"]))


def test_the_network_that_is_trained_has_relus_dropout_and_a_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lens itself: three linear layers, because the test asks for two hidden ones; the rest is the default."""
    built: list[nn.Sequential] = []
    real = mlp.build_mlp
    monkeypatch.setattr(mlp, "build_mlp", lambda *a, **k: (built.append(real(*a, **k)), built[-1])[1])
    fit_store(PlantedStore(40), FitSettings(lens="mlp", layers=(1,), network=one_network()))
    kinds = [[type(module).__name__ for module in network] for network in built]
    assert {tuple(k) for k in kinds} == {("Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear", "Tanh")}
    assert {module.p for network in built[:1] for module in network if hasattr(module, "p")} == {
        FACTS["probe"]["dropout"]
    }


def test_the_grid_of_the_authors_and_the_whole_of_it(grid_of_fit: Callable[..., Any]) -> None:
    facts = FACTS["authors"]
    grid, budget = grid_of_fit(FitSettings(lens="mlp", network=NetworkSearch(grid="paper", search="grid")))
    assert len({*grid}) == facts["points"]
    assert sorted({point.weight_decay for point in grid}) == facts["weight_decay"]
    assert sorted({point.output_penalty for point in grid}) == facts["output_penalty"]
    assert max(point.learning_rate for point in grid) == facts["learning_rate"]
    assert {point.patience for point in grid} == {facts["patience"]}
    assert budget.rungs == ()
    usual, _ = grid_of_fit(FitSettings(lens="mlp"))
    assert {point.weight_decay for point in usual} == {0.1, 1.0, 10.0, 45.0}
    assert {point.output_penalty for point in usual} == {0.0, 0.1, 0.5}
    assert {point.learning_rate for point in usual} == {3e-4, 1e-3}


def test_the_strengths_that_are_tried_and_the_share_that_chooses() -> None:
    lens = fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(lens="ridge"))
    assert [point.gamma for point in lens.trace.gammas] == [0.0, *FACTS["probe"]["gammas"]]
    share = lens.training.n_validation / (lens.training.n_train + lens.training.n_validation)
    assert share == pytest.approx(FACTS["data"]["validation"], abs=0.01)
    assert options("fit")["criterion"] == FitSettings().criterion == "brier"


def test_settings_are_chosen_by_r2_and_layers_by_steering() -> None:
    lens = fit_store(PlantedStore(60, signal={1: 2.0}), FitSettings(lens="ridge"))
    chosen = min(lens.trace.layers, key=lambda trial: trial.best.scores["brier"])
    assert lens.layers == (chosen.layer,)
    assert options("fit")["layer_by"] == "criterion"


def test_the_best_three_to_five_layers_are_read_side_by_side() -> None:
    store = PlantedStore(60, signal={1: 2.0})
    store.states |= {layer: store.states[layer % 3] + 0.01 * layer for layer in (3, 4, 5)}
    store.manifest["layers"] = list(store.states)
    found = analyse_layers(store, divide_into_folds(store))
    assert [row.n_layers for row in found.top] == FACTS["probe"]["side_by_side"]


# --------------------------------------------------------------------------------------------------------------- data


def test_probe_1_is_trained_on_the_construct_set() -> None:
    study, facts = load_study("probe1"), FACTS["data"]
    (mixture,) = study.mixture
    drawn = {source.task.removesuffix("_question"): source.n for source in mixture.sources}
    assert drawn == facts["construct"]
    assert {source.split for source in mixture.sources} == {"train"}
    assert mixture.validation == facts["validation"]
    for name in ("probe1", "probe2", "transfer"):
        assert [model.partition("/")[2] for model in load_study(name).models] == facts["models"]


def test_probe_2_is_mmlu_in_60_20_and_20_per_cent() -> None:
    facts, (mixture,) = FACTS["data"]["mmlu"], load_study("probe2").mixture
    assert mixture.held_out == facts["test"]
    assert (1 - mixture.held_out) * (1 - mixture.validation_of_rest) == pytest.approx(facts["train"])
    assert (1 - mixture.held_out) * mixture.validation_of_rest == pytest.approx(facts["validation"])


def test_not_stratified_the_shares_are_those_of_all_questions_together() -> None:
    """57 subjects of 11 questions: a fifth is rounded up to three in each, and together it is 126 of 627."""
    questions = [
        Question(f"{s}-{i}", f"{s}-{i}", "?", ("a", "b"), 0, task=f"s{s}") for s in range(57) for i in range(11)
    ]
    source = {"task": "mmlu", "split": "test", "shots": 5}
    for stratified, tested in ((True, 57 * 3), (False, 126)):
        mixture = Mixture.model_validate(
            {"name": "mmlu", "sources": (source,), "held_out": 0.2, "stratified": stratified}
        )
        assert len(held_out_ids(mixture, lambda _: tuple(questions), seed=0)) == tested
    store = PlantedStore(11, tasks={f"s{s}": 1.0 for s in range(57)})
    for stratified, choosing in ((True, 57 * 3), (False, 126)):
        data, _ = training_data(store, FitSettings(stratified=stratified))
        assert data.is_validation.sum() == choosing
    assert load_study("probe2").mixture[0].stratified


def test_transfer_is_tested_on_the_papers_four_tasks_and_on_mathqa() -> None:
    tasks = [test.task for test in load_study("transfer").test]
    assert sorted(set(tasks) - {"mathqa"}) == FACTS["data"]["transfer"]


def test_calibration_errors_have_25_bins() -> None:
    """One confidence in the middle of each of 25 bins, right in every other one: no two of them may share a bin."""
    n = FACTS["metrics"]["bins"]
    sure = (np.arange(n) + 0.5) / n
    sure = sure[sure > 0.5]
    answers = np.arange(len(sure)) % 2
    probs = np.column_stack([sure, 1 - sure]).ravel()
    ids = tuple(map(str, range(len(sure))))
    found = Predictions("m", "", "t", "", ids, answers, np.arange(0, 2 * len(sure) + 1, 2), probs)
    apart = np.abs((answers == 0) - sure).mean()
    assert score(found, "ece") == pytest.approx(apart)
    assert score(found, "cwece") == pytest.approx(apart)
    # the default is written at several places: that of reports, of analyses and differences, and of diagrams
    assert measure(found, n_boot=10).scores["ece"].value == pytest.approx(apart)
    assert scores_of(found, ("ece",))["ece"].value == pytest.approx(apart)
    assert np.diff(reliability(found).low) == pytest.approx(1 / n)
    # and within a bin they do: three quarters of the way through, right and wrong meet
    pair = np.array([sure[0] - 0.2 / n, sure[0] + 0.2 / n])
    two = replace(found, ids=("0", "1"), answers=np.array([0, 1]), offsets=np.array([0, 2, 4]),
                  probs=np.column_stack([pair, 1 - pair]).ravel())  # fmt: skip
    assert score(two, "ece") == pytest.approx(abs(0.5 - pair.mean()))


# -------------------------------------------------------------------------------------------------------- autoencoders


def test_the_sizes_of_autoencoders_and_the_numbers_of_features() -> None:
    facts = FACTS["sae"]
    assert list(TrainingSettings().expansions) == list(options("sae", "train")["expansion"]) == facts["expansions"]
    assert Selecting(sae=Path("x")).k == options("sae", "select")["k"] == facts["features"]
    assert AblationPlan().features == options("sae", "ablate")["features"] == facts["features"]
    sizes = SteerPlan().top
    assert (min(sizes), max(sizes)) == (facts["steering_from"], facts["steering_to"])
    assert facts["steering_example"] in sizes
    assert list(sizes) == facts["steering_sizes"]
    assert (AblationPlan().by, AblationPlan().where) == ("correlation", "all")


def test_a_feature_is_looked_at_if_it_is_active_often_enough() -> None:
    """Columns: just active in ten of the samples; in nine; too small in all; in exactly 0.01 % and in one more."""
    facts = FACTS["sae"]
    just, n = facts["active"] * 1.001, 150_000
    limit = round(facts["least_frequency"] * n)
    assert limit > facts["least_active"]
    target = np.random.default_rng(0).normal(size=n)

    def passing(n_samples: int, columns: list[tuple[int, float]]) -> list[bool]:
        codes = np.zeros((n_samples, len(columns) + 1), np.float32)
        codes[:, -1] = 1.0  # so that one passes
        for j, (count, value) in enumerate(columns):
            codes[:count, j] = value
        return correlate([(codes, target[:n_samples])], codes.shape[1]).passes[:-1].tolist()

    least = facts["least_active"]
    few = [(least, just), (least - 1, just), (1000, facts["active"] * 0.999)]
    assert passing(1000, few) == [True, False, False]
    assert passing(n, [(limit, just), (limit + 1, just)]) == [False, True]


def test_an_ablation_is_measured_against_the_reconstruction() -> None:
    """The model as it is answers both questions right, its reconstruction one, and without the feature none is."""
    right, wrong = [0.0, -2.0], [-2.0, 0.0]
    ones = np.ones(4, dtype=np.int64)
    table = OptionTable(np.array([*right, *right]), ones, ones, ones, np.array([0, 2, 4]), np.array([0, 0]))
    scores = AblationScores(
        ("0", "1"), table, np.array([*right, *wrong]), np.array([[*wrong, *wrong], [*right, *right]]), np.array([7, 9])
    )
    found = effects(scores, {"correlation": [0, 1]}, "sum")
    assert found["features"]["7"]["accuracy"]["value"] == pytest.approx(-0.5)
    assert found["features"]["9"]["accuracy"]["value"] == pytest.approx(+0.5)
    assert found["runs"]["unpatched"]["accuracy"] == 1.0
    assert found["runs"]["reconstructed"]["accuracy"] == 0.5


def test_the_direction_of_the_ridge_probe_is_in_the_units_of_the_states() -> None:
    """Columns of very different sizes: what the direction gives of the raw states is what scikit-learn's probe predicts."""
    store = PlantedStore(80, signal={1: 2.0})
    store.states[1] *= np.array([1, 100, 0.01, 5, 1, 1, 30, 1], np.float32)
    r = np.random.default_rng(0).normal(size=len(store.table.logprobs)) + store.states[1][:, 3]
    direction = ridge_direction(store, 1, r)
    by = fit_standardiser(store.states[1])
    z = by(store.states[1]).astype(np.float64)
    predicted = store.states[1].astype(np.float64) @ direction
    errors = []
    for penalty in np.logspace(-6, 8, 57):
        plain = Ridge(alpha=penalty).fit(z, r).predict(z)
        errors.append(np.abs((predicted - predicted.mean()) - (plain - plain.mean())).max())
    assert min(errors) < 0.02 * np.ptp(predicted)


# ------------------------------------------------------------------------------------------------- heads and dimensions


class HeadsStore(PlantedStore):
    """A store whose blocks have heads, all of noise."""

    blocks = (1,)

    def heads(self, block: int) -> np.ndarray:
        rng = np.random.default_rng(block)
        return rng.normal(size=(len(self.table.logprobs), 2, 4)).astype(np.float32)


def test_the_network_and_the_folds_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []

    def noted(data: Any, settings: Any, **_: Any) -> Any:
        trained.append(settings)
        return SimpleNamespace(r_hat=np.zeros((len(data.z), len(data.test))))

    monkeypatch.setattr(heads_module, "fit_stack", noted)
    store = HeadsStore(60)
    analyse_heads(store, divide_into_folds(store))
    assert len(trained) == FACTS["heads"]["folds"]
    assert {settings.hidden for settings in trained} == {tuple(FACTS["heads"]["hidden"])}
    assert {settings.dropout > 0 for settings in trained} == {True}


def test_what_is_counted_of_heads() -> None:
    """100 heads: 60 at 0.02, 25 at 0.051, ten at 0.09 and five at 0.11."""
    facts, values = FACTS["heads"], np.array([0.02] * 60 + [0.051] * 25 + [0.09] * 10 + [0.11] * 5)
    found = summarise(HeadsStore(30), [(1, h) for h in range(100)], np.tile(values, (3, 1)))
    best = np.sort(values)[::-1]
    assert found.above == {f"{limit:g}": int((values > limit).sum()) for limit in facts["counted_above"]}
    assert found.top_share.value == pytest.approx(best[: facts["top"]].sum() / values.sum())
    enough = int(np.argmax(np.cumsum(best) >= facts["signal"] * values.sum() - 1e-12)) + 1
    assert found.needed.value == enough
    assert found.needed_share.value == enough / 100


def test_the_heads_of_the_papers_model_are_960_and_each_has_five_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = FACTS["heads"]
    monkeypatch.setattr(heads_module, "time_step", lambda *_: 1e-3)
    plan = heads_module.plan_heads(heads_module.shape_of("x".join(map(str, facts["shape"])), 8000))
    assert plan.networks == facts["total"] * facts["folds"]


def test_probes_of_no_to_three_hidden_layers_are_compared_with_the_usual_one() -> None:
    depths = ProbePlan().depths
    assert sorted(depths) == [0, *FACTS["probe"]["depths"], len(FACTS["probe"]["hidden"])]
    planned = {name: setting["hidden"] for name, setting in planned_networks(ProbePlan()) if name != "grid"}
    assert planned == {f"depth {d}": FACTS["probe"]["hidden"][:d] for d in depths}


def test_dimensions_go_up_to_100_in_groups_of_five_layers() -> None:
    facts = FACTS["dimensions"]
    assert options("analyse", "dimensions")["most"] == facts["components"]
    store = PlantedStore(80)
    rng = np.random.default_rng(0)
    store.states = {k: rng.normal(size=(len(store.table.logprobs), 120)).astype(np.float32) for k in range(11)}
    store.manifest["layers"] = list(store.states)
    found = analyse_dimensions(store, divide_into_folds(store))
    assert max(row.components for row in found.rows) == facts["components"]
    last = facts["group"] - 1
    assert [group.layers for group in found.groups] == [f"0 to {last}", f"{last + 1} to {2 * last + 1}", "10"]
    blocks = analyse_dimensions(store, divide_into_folds(store), DimensionSettings(most=2, embedding=False))
    assert [group.layers for group in blocks.groups] == ["0 to 4", "5 to 9"]


# ----------------------------------------------------------------------------------------------------------- baselines


@pytest.fixture
def context(tiny: Model, tmp_path: Path) -> FitContext:
    questions = tuple(toy_questions(40, seed=1))
    states = extract(tiny, questions, tmp_path / "states", extraction=Extraction(layers=(1,)))
    return FitContext(lambda: tiny, QuestionSet("train", states, lambda: questions), FitSettings(), tmp_path / "method")


def test_iti_tries_the_papers_heads_strengths_and_directions(
    context: FitContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, tried = FACTS["iti"], []

    def scored(_: Any, __: Any, settings: list[Any], asked: Any) -> np.ndarray:
        tried.extend(settings)
        assert asked.criterion == facts["criterion"]
        return np.arange(len(settings), dtype=np.float64)

    big = iti.HeadScan(np.zeros((10, 20)), {name: np.zeros((10, 20, 2)) for name in facts["directions"]})
    monkeypatch.setattr(iti, "score_interventions", scored)
    monkeypatch.setattr(iti, "read_heads", lambda _: None)
    monkeypatch.setattr(iti, "scan_heads", lambda *_: big)
    _, record = iti.choose_intervention(context, method("iti"))
    assert sorted({s.heads for s in tried}) == facts["heads"]
    assert facts["usual"] in {s.heads for s in tried}
    assert sorted({s.alpha for s in tried}) == facts["alphas"]
    assert sorted({s.direction for s in tried}) == facts["directions"]
    assert len(tried) == 3 * 6 * 2
    assert record["criterion"] == facts["criterion"]


def test_ccps_trains_the_papers_networks_on_the_papers_features(
    context: FitContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained: what would be is noted. AUROC chooses: the design of the highest is taken."""
    facts, settings = FACTS["ccps"], method("ccps")
    networks: list[Any] = []
    radii: list[Any] = []

    def features(_: Any, __: Any, questions: list[Any], asked: Any) -> np.ndarray:
        radii.append(asked.radii)
        rng = np.random.default_rng(0)
        return rng.normal(size=(sum(len(q.options) for q in questions), len(ccps.option_features(asked.radii))))

    monkeypatch.setattr(ccps, "read_features", features)
    nobody = Confidence(nn.Sequential(), nn.Sequential())
    monkeypatch.setattr(ccps, "fit_embedding", lambda _, network, **__: (networks.append(network), nobody.embedding)[1])
    monkeypatch.setattr(ccps, "fit_classifier", lambda _, __, network, **___: (networks.append(network), nobody)[1])
    monkeypatch.setattr(ccps, "save_tensors", lambda _: b"")
    monkeypatch.setattr(ccps.Ccps, "tensors", lambda _: {})
    auroc = iter(np.linspace(0.5, 0.9, 100))
    monkeypatch.setattr(ccps.SplitOptions, "auroc", lambda *_: float(next(auroc)))
    ccps.load_or_fit_ccps(context, settings)
    assert radii == [tuple(facts["radii"])]
    first = networks[0]
    for name in (
        "embedding",
        "activation",
        "dropout",
        "margin",
        "steps",
        "batch_size",
        "learning_rate",
        "weight_decay",
    ):
        assert getattr(first, name) == facts[name], name
    assert list(first.hidden) == facts["hidden"]
    assert list(first.classifier) == facts["classifier"]
    assert sorted({n.embedding for n in networks}) == facts["embeddings_tried"]
    assert sorted({n.classifier for n in networks}) == [tuple(c) for c in facts["classifiers_tried"]]
    record = read_record(context.folder / "ccps.json")
    assert {key: record["tried"][-1][key] for key in record["chosen"]} == record["chosen"], "the highest AUROC"
    (adaptation, *_) = load_study("transfer").adapted
    assert adaptation.n == facts["adapt_most"]


def test_ccps_may_be_trained_on_commonsense_qa_alone() -> None:
    (entry,) = [m for m in load_study("transfer").method if m.kind == "ccps"]
    assert read_method(entry).train_on == ("commonsense_qa",)
    assert method("ccps").train_on == ()


def test_the_prompts_of_steerconf_are_the_papers_to_the_letter() -> None:
    """Asked as a user's question is asked: without a chat template the prompt begins with the instruction."""
    facts, settings = FACTS["steerconf"], method("steerconf")
    question = Question("0", "0", "Which?", ("a", "b"), 0)
    base = facts["base"].replace("{answer_type}", "option letter")
    note, rest = base.split("is true.\n")
    assert sorted(settings.prompts) == sorted(facts["instructions"])
    for name, sentence in facts["instructions"].items():
        asked = verbal_prompt(question, name, thinking=True, wrap=None)
        middle = f" {sentence}" if sentence else ""
        assert asked.startswith(f"{note}is true.{middle}\n{rest}\n\nQuestion: Which?")
        short = verbal_prompt(question, name, thinking=False, wrap=None)
        assert short == asked.replace("analyze step by step, ", "").replace(
            "Explanation: [insert step-by-step analysis here]\n", ""
        )


def test_what_steerconf_tries() -> None:
    facts, settings = FACTS["steerconf"], method("steerconf")
    assert sorted(settings.temperatures) == facts["temperatures"]
    assert sorted(settings.samples) == facts["samples"]
    assert facts["usual_samples"] in settings.samples
    assert settings.temperatures[0] == facts["usual_temperature"], "that of the first stage"
    assert sorted(settings.thinking) == facts["thinking"]
    assert settings.criterion == facts["criterion"]
    assert set(settings.aggregations) == {"mean", "weighted", "consistency"}
    assert method("steerconf", aggregations=("mean", "weighted", "adjusted")).aggregations[2] == "adjusted"


def test_the_facts_are_all_looked_at() -> None:
    """A fact that no test reads would guard nothing."""
    text = Path(__file__).read_text("utf-8")
    unread = [f"{part}.{name}" for part, facts in FACTS.items() for name in facts if f'"{name}"' not in text]
    assert unread == []
