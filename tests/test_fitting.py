"""Fitting finds a planted signal, leaves the model alone where there is none, and learns nothing from validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import toy_questions

from coral_lens import fitting, probes
from coral_lens.errors import CoralError
from coral_lens.fitting import GAMMAS, FitSettings, check_questions, fit, fit_store
from coral_lens.lens import Lens
from coral_lens.metrics import score
from coral_lens.models import Model
from coral_lens.probes import MlpSettings, fit_standardiser
from coral_lens.records import UNKNOWN, OptionTable, Predictions, Question, Style, offsets_of
from coral_lens.splits import rows_of, split_mask
from coral_lens.store import ActivationStore

WIDTH, LAYERS, SIGNAL = 10, (0, 1, 2, 3), 2


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Planted(ActivationStore):
    """A store in memory: base scores are noise, and one layer knows the answers as well as `strength` says."""

    def __init__(self, n: int, *, strength: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(2, 6, n)
        offsets = offsets_of(sizes.tolist())
        rows = int(offsets[-1])
        answers = rng.integers(0, sizes)
        self.folder = Path("in memory")
        self.questions = [
            Question(str(i), str(i), f"Planted {seed}/{i}?", tuple("abcde"[:size]), int(answer))
            for i, (size, answer) in enumerate(zip(sizes, answers, strict=True))
        ]
        ones = np.ones(rows, dtype=np.int64)
        self.table = OptionTable(rng.normal(size=rows), ones, ones, ones, offsets, answers)
        y = np.zeros(rows)
        y[offsets[:-1] + answers] = 1.0
        self.states = {layer: rng.normal(size=(rows, WIDTH)).astype(np.float32) for layer in LAYERS}
        self.states[SIGNAL][:, 4] += (strength * y).astype(np.float32)
        model = {"name": "planted", "weights": "w" * 64, "tokenizer": "t" * 64, "dtype": "torch.float32"}
        self.manifest: dict[str, Any] = {"model": model, "layers": list(LAYERS), "questions": "q" * 64, "seed": seed}

    def layer(self, layer: int) -> np.ndarray:
        return self.states[layer]


@pytest.fixture(scope="module")
def planted() -> Lens:
    return fit_store(Planted(300, strength=2.0), FitSettings())


def scores(lens: Lens, store: Planted, metric: str) -> dict[str, float]:
    return {
        method: score(
            Predictions(method, "m", "t", "", tuple(q.id for q in store.questions), store.table.answers,
                        store.table.offsets, probs),
            metric,
        )
        for method, probs in lens.apply(store).items()
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- finding the signal


def test_the_layer_with_the_signal_is_chosen_and_the_probe_points_at_it(planted: Lens) -> None:
    assert planted.layer == SIGNAL
    assert planted.gamma > 0
    assert isinstance(planted.probe, probes.LinearProbe)
    assert np.abs(planted.probe.weight).argmax() == 4
    r2 = {row["layer"]: row["r2"] for row in planted.trace["layers"]}
    assert r2[SIGNAL] > 0.25 > 0.05 > max(v for layer, v in r2.items() if layer != SIGNAL)


def test_fresh_questions_are_answered_better_and_with_better_probabilities(planted: Lens) -> None:
    fresh = Planted(400, strength=2.0, seed=1)
    accuracy, brier = scores(planted, fresh, "accuracy"), scores(planted, fresh, "brier")
    assert accuracy["coral"] > accuracy["base"] + 0.2
    assert accuracy["temperature"] == accuracy["base"]
    assert brier["coral"] < brier["temperature"] <= brier["base"]


@pytest.mark.parametrize("seed", range(4))
def test_where_there_is_no_signal_the_lens_is_never_worse_on_validation_and_does_little(seed: int) -> None:
    store = Planted(150, strength=0.0, seed=seed)
    lens = fit_store(store, FitSettings(seed=seed))
    validation = lens.trace["validation"]
    assert validation["coral"]["brier"] <= validation["base"]["brier"]
    fresh = scores(lens, Planted(400, strength=0.0, seed=seed + 100), "brier")
    assert fresh["coral"] < fresh["base"] + 0.05


def test_gamma_zero_is_chosen_where_every_correction_harms() -> None:
    """The signal turns around between training and validation."""
    store = Planted(300, strength=2.0)
    mask = split_mask(store.questions, fraction=0.2, seed=0)
    store.states[SIGNAL][rows_of(store.table.offsets, mask), 4] *= -1
    lens = fit_store(store, FitSettings(layers=(SIGNAL,)))
    assert lens.gamma == 0.0
    p = lens.apply(store)
    assert p["coral"].tobytes() == p["base"].tobytes()


def test_the_trace_holds_what_every_layer_and_gamma_scored(planted: Lens) -> None:
    trace = planted.trace
    assert [row["layer"] for row in trace["layers"]] == list(LAYERS)
    assert [point["gamma"] for point in trace["gammas"]] == list(GAMMAS)
    assert GAMMAS[0] == 0.0
    assert GAMMAS[-1] == 3.0
    best = min(trace["gammas"], key=lambda point: point["brier"])
    assert best["gamma"] == planted.gamma
    assert trace["validation"]["coral"] == {k: best[k] for k in ("accuracy", "ece", "brier", "nll")}
    assert trace["validation"]["base"] == {k: trace["gammas"][0][k] for k in ("accuracy", "ece", "brier", "nll")}
    assert trace["chosen"]["layer"] == SIGNAL
    assert trace["chosen"]["penalty"] in probes.PENALTIES


def test_the_lens_records_what_it_was_fitted_on(planted: Lens) -> None:
    training = planted.training
    assert (training["n_train"], training["n_validation"]) == (240, 60)
    assert training["tasks"] == {"questions": 300}
    assert training["settings"]["layers"] == LAYERS
    assert planted.model == {"name": "planted", "weights": "w" * 64, "tokenizer": "t" * 64, "dtype": "torch.float32"}
    assert len(planted.seen) == 300


# --------------------------------------------------------------------------------------------------- no leak, no chance


def changed_validation(store: Planted, mask: np.ndarray) -> Planted:
    """The same training questions; validation questions with other states, scores and answers."""
    other = Planted(len(store.questions), strength=2.0)
    rows = rows_of(store.table.offsets, mask)
    rng = np.random.default_rng(99)
    for states in other.states.values():
        states[rows] = 50 + 7 * rng.normal(size=states[rows].shape)
    logprobs = np.where(rows, rng.normal(size=len(rows)), store.table.logprobs)
    answers = np.where(mask, 0, store.table.answers)
    other.table = replace(store.table, logprobs=logprobs, answers=answers)
    other.questions = [replace(q, answer=int(a)) for q, a in zip(store.questions, answers, strict=True)]
    return other


def test_validation_questions_change_neither_the_standardiser_nor_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "fit_ridge_path", lambda z, r: probes.fit_ridge_path(z, r, [30.0]))
    store = Planted(300, strength=2.0)
    mask = split_mask(store.questions, fraction=0.2, seed=0)
    settings = FitSettings(layers=(SIGNAL,))
    first, second = fit_store(store, settings), fit_store(changed_validation(store, mask), settings)
    assert first.standardiser.mean.tobytes() == second.standardiser.mean.tobytes()
    assert first.standardiser.scale.tobytes() == second.standardiser.scale.tobytes()
    assert isinstance(first.probe, probes.LinearProbe)
    assert isinstance(second.probe, probes.LinearProbe)
    assert first.probe.weight.tobytes() == second.probe.weight.tobytes()
    assert first.probe.bias == second.probe.bias
    assert first.trace["validation"] != second.trace["validation"]
    train = store.states[SIGNAL][rows_of(store.table.offsets, ~mask)]
    assert first.standardiser.mean.tobytes() == fit_standardiser(train).mean.tobytes()


def test_training_questions_do_not_change_the_temperature() -> None:
    store, other = Planted(300, strength=2.0), Planted(300, strength=2.0)
    mask = split_mask(store.questions, fraction=0.2, seed=0)
    rows = rows_of(store.table.offsets, mask)
    other.table = replace(other.table, logprobs=np.where(rows, other.table.logprobs, -1.0))
    settings = FitSettings(layers=(SIGNAL,))
    assert fit_store(store, settings).temperature == fit_store(other, settings).temperature


@pytest.mark.parametrize("probe", ["ridge", "mlp"])
def test_the_same_seed_gives_the_same_lens_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: str
) -> None:
    monkeypatch.setattr(fitting, "MLP_GRID", (MlpSettings(hidden=(8,), max_epochs=3),))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit_store(Planted(100, strength=2.0), FitSettings(probe=probe, seed=seed)).save(tmp_path / name)
    a, b, c = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert a["lens.safetensors"] != c["lens.safetensors"]


# ------------------------------------------------------------------------------------------------------------- choices


def test_the_mlp_tries_its_grid_on_the_best_layers_and_keeps_the_best_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden": (16, 8), "max_epochs": 12, "learning_rate": 1e-2}
    grid = (MlpSettings(weight_decay=1.0, **small), MlpSettings(weight_decay=0.1, output_penalty=50.0, **small))  # type: ignore[arg-type]
    monkeypatch.setattr(fitting, "MLP_GRID", grid)
    monkeypatch.setattr(fitting, "MLP_LAYERS", 2)
    store = Planted(300, strength=2.0)
    lens = fit_store(store, FitSettings(probe="mlp"))
    assert isinstance(lens.probe, probes.NetworkProbe)
    assert lens.layer == SIGNAL
    assert len(lens.trace["layers"]) == 2
    assert SIGNAL in {row["layer"] for row in lens.trace["layers"]}
    assert lens.trace["chosen"]["weight_decay"] == 1.0
    assert lens.trace["chosen"]["output_penalty"] == 0.0
    fresh = scores(lens, Planted(300, strength=2.0, seed=7), "accuracy")
    assert fresh["coral"] > fresh["base"] + 0.15


def test_the_grid_is_the_papers_network() -> None:
    assert {point.hidden for point in fitting.MLP_GRID} == {(1024, 512, 256, 128)}
    assert {point.dropout for point in fitting.MLP_GRID} == {0.2}
    assert len({point.weight_decay for point in fitting.MLP_GRID}) > 1
    assert len({point.output_penalty for point in fitting.MLP_GRID}) > 1


def test_a_metric_where_more_is_better_is_maximised() -> None:
    lens = fit_store(Planted(300, strength=2.0), FitSettings(criterion="accuracy"))
    assert lens.layer == SIGNAL
    best = max(point["accuracy"] for point in lens.trace["gammas"])
    assert lens.trace["validation"]["coral"]["accuracy"] == best
    # of equally good gammas the smallest, which changes the model least
    assert lens.gamma == min(p["gamma"] for p in lens.trace["gammas"] if p["accuracy"] == best)


def test_a_metric_beyond_those_shown_can_choose_too() -> None:
    lens = fit_store(Planted(200, strength=2.0), FitSettings(criterion="aurc"))
    assert all("aurc" in point for point in lens.trace["gammas"])


def test_a_criterion_that_does_not_exist_on_the_validation_questions_is_refused() -> None:
    store = Planted(60, strength=0.0)
    certain = np.full(len(store.table.logprobs), -50.0)
    certain[store.table.offsets[:-1] + store.table.answers] = 0.0
    store.table = replace(store.table, logprobs=certain)
    with pytest.raises(CoralError, match="auroc does not exist"):
        fit_store(store, FitSettings(criterion="auroc"))


def test_only_the_layers_asked_for_are_tried() -> None:
    lens = fit_store(Planted(100, strength=2.0), FitSettings(layers=(0, 3)))
    assert [row["layer"] for row in lens.trace["layers"]] == [0, 3]
    assert lens.layer in (0, 3)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("probe", "rigde", "Did you mean 'ridge'"),
        ("base", "tokens", "Did you mean 'token'"),
        ("criterion", "briar", "Did you mean 'brier'"),
        ("validation", 0.0, "between 0 and 1"),
        ("validation", 1.0, "between 0 and 1"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(field: str, value: Any, said: str) -> None:
    settings = FitSettings()
    object.__setattr__(settings, field, value)  # the shapes checked in tests would refuse it before we do
    with pytest.raises(CoralError, match=said):
        settings.__post_init__()


def test_an_unlabelled_question_is_refused_by_its_id() -> None:
    questions = toy_questions(30)
    questions[17] = replace(questions[17], answer=UNKNOWN)
    with pytest.raises(CoralError, match=r"1 of 30 .* first '17'"):
        check_questions(questions)


def test_too_few_questions_are_refused_before_the_model_runs(tiny: Model, tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=r"at least 20 labelled questions.* Got 19"):
        fit(tiny, toy_questions(19), work_dir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_questions_of_one_group_cannot_be_fitted(tiny: Model) -> None:
    with pytest.raises(CoralError, match="cannot be divided"):
        fit(tiny, [replace(q, group="one") for q in toy_questions(20)], FitSettings(layers=(1,)))


# ---------------------------------------------------------------------------------------------------- with a real store


def test_a_fit_with_a_work_folder_reuses_the_states_and_gives_the_same_lens(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = toy_questions(30)
    settings = FitSettings(style=Style("letters"), base="sum")
    without = fit(tiny, questions, settings)
    first = fit(tiny, questions, settings, work_dir=tmp_path / "work")

    def refuses(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was run")

    for body in ("plain_body", "tree_body", "prefill"):
        monkeypatch.setattr(Model, body, refuses)
    second = fit(tiny, questions, settings, work_dir=str(tmp_path / "work"))
    saved = []
    for lens in (without, first, second):
        lens.save(tmp_path / "lens")
        saved.append({p.name: p.read_bytes() for p in (tmp_path / "lens").iterdir()})
    assert saved[0] == saved[1] == saved[2]
    assert first.style == Style("letters")
    assert first.base == "sum"
    assert first.model["weights"] == tiny.fingerprint["weights"]
