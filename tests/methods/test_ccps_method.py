"""CCPS chooses on validation questions, divides confidences by their sum, and ends with the same bytes again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from support.questions import toy_questions

from coral_lens.engine.extract import extract
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.rules import correct_rows
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.ccps import method as ccps
from coral_lens.methods.ccps.contrastive import Examples, NetworkSettings
from coral_lens.methods.ccps.method import (
    FEATURE_SETS,
    CcpsSettings,
    Design,
    FeatureSet,
    Trainer,
    columns_of,
    fit_ccps,
    n_steps,
    read_features,
    split_options,
    trained_on,
)
from coral_lens.methods.ccps.perturbation import RADII, option_features
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import FitContext, QuestionSet
from coral_lens.methods.registry import read_method
from coral_lens.records import Question
from coral_lens.storage.files import read_record
from coral_lens.study.config import Study
from coral_lens.study.run import prepare_study

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN, TEST = tuple(toy_questions(40, seed=1)), tuple(toy_questions(6, seed=2))
QUICK = CcpsSettings(radii=(0.1, 1.0, 5.0), steps=12)


def question_set(model: Model, questions: tuple[Question, ...], folder: Path) -> QuestionSet:
    states = extract(model, questions, folder / "states", extraction=Extraction(layers=(1,)))
    return QuestionSet(folder.name, states, lambda: questions)


def context_of(model: Model, folder: Path, questions: tuple[Question, ...] = TRAIN) -> FitContext:
    return FitContext(lambda: model, question_set(model, questions, folder / "train"), FitSettings(), folder / "method")


def test_feature_sets_hold_what_they_say() -> None:
    names = np.array(option_features(RADII))
    everything = names[columns_of(FeatureSet("all", "all"), RADII)]
    # 4 of the state, flip, Jacobian, PEI, and three divergences at eight radii; four statistics of each
    assert len(everything) == 4 * (4 + 2 + 1 + 3 * 8)
    small = set(names[columns_of(FeatureSet("all", "small"), RADII)])
    assert {"kl.0 mean", "kl.3 std", "pei.small max", "entropy min"} <= small
    assert not {"kl.4 mean", "pei.all mean"} & small
    steady = names[columns_of(FeatureSet("steady", "all"), RADII)]
    assert {name.split()[0] for name in steady} == {
        "logprob",
        "entropy",
        "margin",
        "norm",
        "flip",
        "jacobian",
        "pei.all",
    }


def test_the_whole_method_chooses_by_auroc_over_validation_options(tiny: Model, tmp_path: Path) -> None:
    context, test = context_of(tiny, tmp_path), question_set(tiny, TEST, tmp_path / "test")
    steps: list[int] = []

    class Counting:
        def __init__(self, label: str, *_: object) -> None:
            self.label = label

        def __enter__(self) -> object:
            return lambda n: steps.append(n) if self.label == "training" else None

        def __exit__(self, *_: object) -> None: ...

    found = fit_ccps(replace(context, bar=Counting), QUICK)(test)[""]  # type: ignore[arg-type]
    record = json.loads((context.folder / "ccps.json").read_text("utf-8"))
    tried = record["tried"]
    # four sets of features with the usual sizes, then nine sizes with the best set, one of which is known
    assert len(tried) == len(FEATURE_SETS) + 8
    assert len(steps) == (4 + 2 + 12) * QUICK.steps
    assert len(steps) == n_steps(QUICK)
    best = max(tried, key=lambda t: t["auroc"])
    assert {k: v for k, v in best.items() if k != "auroc"} == record["chosen"]
    assert read_record(context.folder / "notes.json") == {"chosen": record["chosen"]}
    features = read_features(context, "train", TRAIN, QUICK)
    held_out = np.repeat(context.data.is_validation, np.diff(context.data.table.offsets))
    fitted = ccps.load_or_fit_ccps(context, QUICK)
    y = correct_rows(context.data.table)
    assert roc_auc_score(y[held_out], fitted(features[held_out])) == pytest.approx(best["auroc"])
    # standardised with the training options alone
    np.testing.assert_allclose(
        fitted.standardiser.mean, features[~held_out][:, fitted.columns].mean(axis=0), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(np.add.reduceat(found.probs, found.offsets[:-1]), 1.0)


def test_the_same_seed_ends_with_the_same_bytes_and_what_is_done_is_found_again(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, kept = replace(QUICK, search=False), []
    test = question_set(tiny, TEST, tmp_path / "test")
    for name in ("one", "two"):
        context = context_of(tiny, tmp_path / name)
        probs = fit_ccps(context, settings)(test)[""].probs
        kept.append([(context.folder / f"ccps.{end}").read_bytes() for end in ("json", "safetensors")])
    assert kept[0] == kept[1]
    monkeypatch.setattr(ccps, "choose_design", lambda *_: pytest.fail("it was fitted before"))
    assert np.array_equal(fit_ccps(context, settings)(test)[""].probs, probs)
    assert json.loads(kept[0][0])["chosen"] == {
        "features": "all",
        "radii": "all",
        "embedding": 8,
        "classifier": [48, 24, 12],
    }


def test_adapting_is_a_row_of_its_own_and_only_where_a_test_allows_it(tiny: Model, tmp_path: Path) -> None:
    context, settings = context_of(tiny, tmp_path), replace(QUICK, search=False, adapt=True)
    test = question_set(tiny, TEST, tmp_path / "test")
    plain = fit_ccps(context, settings)(test)
    assert list(plain) == [""]
    both = fit_ccps(context, settings)(replace(test, adapt=lambda: tuple(toy_questions(12, seed=5))))
    assert list(both) == ["", " adapted"]
    assert np.array_equal(both[""].probs, plain[""].probs)
    assert not np.allclose(both[" adapted"].probs, plain[""].probs)
    allowed = replace(test, adapt=lambda: tuple(toy_questions(12, seed=5)))
    assert list(fit_ccps(context, replace(settings, adapt=False))(allowed)) == [""]
    with pytest.raises(CoralError, match=r"adapts on at least 10 questions. Got 3"):
        fit_ccps(context, settings)(replace(test, adapt=lambda: tuple(toy_questions(3, seed=5))))


def test_what_is_planted_in_the_divergences_is_chosen() -> None:
    rng = np.random.default_rng(0)
    names = option_features(RADII)
    y = (np.arange(600) % 4 == 0).astype(np.float64)
    features = rng.normal(size=(600, len(names)))
    features[:, names.index("kl.7 mean")] += 3 * y
    split = ccps.SplitOptions(Examples(features[:400], y[:400]), Examples(features[400:], y[400:]))
    trainer = Trainer(split, RADII, seed=0, on_step=lambda _: None)
    network = NetworkSettings(steps=60, learning_rate=3e-3)
    chosen = trainer.best([Design(features, network) for features in FEATURE_SETS])
    assert chosen.features.types == "all"
    assert chosen.features.radii != "small", "the radius of 20 is not among the small ones"


def test_what_is_constant_in_training_has_no_say_in_a_test() -> None:
    """Options of one token have no spread over tokens; those of a test may have."""
    rng = np.random.default_rng(0)
    names = np.array(option_features(RADII))
    still = np.array([name.endswith(" std") for name in names])
    y = (np.arange(80) % 4 == 0).astype(np.float64)
    train = np.where(still, 0.0, rng.normal(size=(80, len(names))))
    split = ccps.SplitOptions(Examples(train, y), Examples(train, y))
    fitted = Trainer(split, RADII, seed=0, on_step=lambda _: None).fit(
        Design(FeatureSet("all", "all"), NetworkSettings(steps=3))
    )
    assert set(fitted.columns) == set(np.flatnonzero(~still)) & set(columns_of(FeatureSet("all", "all"), RADII))
    test = rng.normal(size=(9, len(names)))
    assert np.array_equal(fitted(test), fitted(np.where(still, 1e4, test)))


def test_too_few_options_are_refused(tiny: Model, tmp_path: Path) -> None:
    context = context_of(tiny, tmp_path, TRAIN[:10])
    with pytest.raises(CoralError, match=r"CCPS needs at least 10 right and 10 wrong options .* Got 8 right"):
        split_options(context, np.ones(10, dtype=bool), np.zeros((len(context.data.table.logprobs), 3)))


def test_it_may_be_trained_on_one_task_of_the_mixture_alone(
    tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = tuple(replace(q, task="one" if i % 4 else "other") for i, q in enumerate(TRAIN))
    context = context_of(tiny, tmp_path, mixture)
    seen: list[ccps.SplitOptions] = []
    trainer = ccps.Trainer
    monkeypatch.setattr(ccps, "Trainer", lambda split, *a, **k: (seen.append(split), trainer(split, *a, **k))[1])
    fit_ccps(context, replace(QUICK, search=False, train_on=("one",)))
    (split,) = seen
    options, one = context.data.table.options, np.array([q.task == "one" for q in mixture])
    for part, mask in ((split.train, ~context.data.is_validation), (split.held_out, context.data.is_validation)):
        assert part.y.tolist() == correct_rows(context.data.table)[options.rows(one & mask)].tolist()
    with pytest.raises(CoralError, match=r"trained on ones, and the mixture has questions of one, other only.*'one'"):
        fit_ccps(context, replace(QUICK, train_on=("ones",)))


def test_a_task_that_the_mixture_has_not_is_refused_before_a_model_is_loaded() -> None:
    """Questions that are only tested do not count."""
    study = Study.model_validate(
        {
            "name": "s",
            "models": ("smollm2",),
            "mixture": ({"name": "m", "sources": ({"task": "arc_easy", "split": "validation", "n": 40, "shots": 0},)},),
            "test": ({"task": "arc_challenge", "split": "validation", "n": 10, "shots": 0},),
            "method": ({"kind": "ccps", "train_on": ("arc_challenge",)},),
        }
    )
    with pytest.raises(CoralError, match="trained on arc_challenge, and the mixture has questions of arc_easy only"):
        prepare_study(study, None)


def test_a_group_stands_for_the_tasks_that_its_questions_are_named_after() -> None:
    mixture = [replace(q, task=t) for q, t in zip(TRAIN, ("mmlu_anatomy", "mmlu_virology", "arc_easy"), strict=False)]
    assert trained_on(mixture, replace(QUICK, train_on=("mmlu",))).tolist() == [True, True, False]
    assert trained_on(mixture, replace(QUICK, train_on=("mmlu_virology",))).tolist() == [False, True, False]
    assert trained_on(mixture, QUICK).all()
    with pytest.raises(CoralError, match="trained on commonsense_qa, and the mixture"):
        trained_on(mixture, replace(QUICK, train_on=("commonsense_qa",)))


def test_another_division_of_the_questions_makes_another_choice(tiny: Model, tmp_path: Path) -> None:
    context, chosen = context_of(tiny, tmp_path), []
    for stratified in (True, False, True):
        one = replace(context, common=replace(context.common, stratified=stratified))
        fit_ccps(one, replace(QUICK, search=False))
        chosen.append((context.folder / "ccps.json").read_bytes())
    assert chosen[0] == chosen[2] != chosen[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": (1.0,)}, r"no option 'radius'. Did you mean 'radii'"),
        ({"radii": (1.0, 0.5)}, r"must be above 0 and rise. Got \[1.0, 0.5\]"),
        ({"push": "sideways"}, r"Unknown push 'sideways'; use one of down, up"),
        ({"steps": 0}, r"Method 'ccps': steps must be at least 1. Got 0 instead"),
        ({"activation": "gelu"}, r"Unknown activation 'gelu'; use one of elu, relu"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(CoralError, match=message):
        read_method(MethodEntry(kind="ccps", **options))
