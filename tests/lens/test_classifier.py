"""Texts into classes: the numbers are a lens's own, scikit-learn's tools take it for one of theirs, and mistakes are named."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator
from support.models import make_model

from coral_lens import CoralClassifier, FitSettings, load_questions
from coral_lens.data.assets import embedded_data
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = FitSettings(layers=(1,), lens="ridge")
LABELS = {"refund": "wants money back", "praise": "is glad", "other": ""}


def mails(n: int = 48) -> tuple[list[str], list[str]]:
    """Texts that say their class in a word."""
    words = {"refund": "money", "praise": "thanks", "other": "hello"}
    names = [list(words)[i % 3] for i in range(n)]
    return [f"{words[name]} number {i}, {words[name]}" for i, name in enumerate(names)], names


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model("llama")


@pytest.fixture(scope="module")
def fitted(model: Model) -> CoralClassifier:
    return CoralClassifier(model, LABELS, settings=SMALL, random_state=0).fit(*mails())


def test_probabilities_are_those_of_the_lens_for_the_same_questions(fitted: CoralClassifier, model: Model) -> None:
    texts = ["money please", "thanks a lot"]
    found = fitted.predict_proba(texts)
    assert fitted.classes_.tolist() == ["other", "praise", "refund"]
    rows = [
        {
            "id": str(i),
            "state": text,
            "question": fitted.instructions,
            "options": fitted.classes_.tolist(),
            "descriptions": [LABELS[name] or None for name in fitted.classes_],
        }
        for i, text in enumerate(texts)
    ]
    expected = [answer.probs for answer in fitted.lens_.predict(model, load_questions(rows))]
    assert isinstance(fitted.lens_, Lens)
    assert found.tolist() == [list(p) for p in expected]
    assert found.sum(axis=1) == pytest.approx([1, 1])
    assert fitted.predict(texts).tolist() == fitted.classes_[found.argmax(axis=1)].tolist()


def test_the_score_is_the_accuracy(fitted: CoralClassifier) -> None:
    texts, names = mails(12)
    assert fitted.score(texts, names) == np.mean(fitted.predict(texts) == np.array(names))


def test_classes_may_be_numbers_with_names(model: Model) -> None:
    texts, names = mails(30)
    y = np.array([int(name == "refund") for name in names])
    named = CoralClassifier(model, {0: "no", 1: ("yes", "wants money")}, settings=SMALL, random_state=0).fit(texts, y)
    assert named.classes_.tolist() == [0, 1]
    assert set(named.predict(texts)) <= {0, 1}
    assert set(named._options) == {("no", ""), ("yes", "wants money")}


def test_a_class_without_training_texts_may_be_named(model: Model) -> None:
    texts, names = mails(30)
    both = CoralClassifier(model, ["refund", "praise", "other", "threat"], settings=SMALL, random_state=0).fit(
        texts, names
    )
    assert both.predict_proba(texts[:2]).shape == (2, 4)


def test_a_named_class_that_is_longer_than_those_of_the_texts_keeps_its_name(model: Model) -> None:
    texts, names = mails(30)
    known = {**LABELS, "change of address": "has moved"}
    longer = CoralClassifier(model, known, settings=SMALL, random_state=0).fit(texts, names)
    assert longer.classes_.tolist() == sorted(known)
    assert ("change of address", "has moved") in longer._options


@pytest.mark.parametrize("labels", [{"0": "no", "1": "yes"}, [0, 1, 0.5], ["no", "yes"]])
def test_labels_that_are_of_another_type_than_the_classes_are_refused(model: Model, labels: Any) -> None:
    texts, names = mails(30)
    y = [int(name == "refund") for name in names]
    with pytest.raises(
        CoralError, match=r"labels name the classes .* but y has classes such as 1; name them as y does"
    ):
        CoralClassifier(model, labels, settings=SMALL).fit(texts, y)
    with pytest.raises(CoralError, match="such as '1'; name them as y does"):
        CoralClassifier(model, {0: "no", 1: "yes"}, settings=SMALL).fit(texts, [str(c) for c in y])


@pytest.mark.parametrize("container", [list, tuple, np.array, pd.Series], ids=lambda c: c.__name__)
def test_texts_come_in_every_container(fitted: CoralClassifier, container: Any) -> None:
    texts = mails(4)[0]
    assert fitted.predict(container(texts)).tolist() == fitted.predict(texts).tolist()


def test_a_text_is_classified_alike_alone_and_among_others(fitted: CoralClassifier) -> None:
    texts = mails(9)[0]
    together = fitted.predict_proba(texts)
    assert np.concatenate([fitted.predict_proba([t]) for t in texts]) == pytest.approx(together, abs=1e-5)


# ----------------------------------------------------------------------------------------------- scikit-learn's tools


def test_clones_share_the_model_and_cross_validation_runs(model: Model) -> None:
    made = CoralClassifier(model, LABELS, settings=SMALL, random_state=0)
    assert clone(made).model is model
    assert is_classifier(made)
    scores = cross_val_score(made, *mails(60), cv=2)
    assert scores.shape == (2,)
    assert ((scores >= 0) & (scores <= 1)).all()


WITHOUT_NUMBERS = (
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_sparse_tag",
    "check_estimator_tags_renamed",
    "check_estimators_unfitted",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_valid_tag_types",
)
"""The checks of scikit-learn that fit an estimator on no numbers; all others do, and scikit-learn leaves them out for texts."""


@pytest.mark.parametrize("name", WITHOUT_NUMBERS)
def test_scikit_learns_checks_pass_as_far_as_texts_allow(name: str) -> None:
    # older versions of scikit-learn know fewer
    check = getattr(estimator_checks, name, None)
    assert check or name == "check_estimator_sparse_tag"
    if check:
        check("CoralClassifier", CoralClassifier())


def test_scikit_learn_finds_no_other_check_for_texts(model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(CoralClassifier(model, settings=SMALL), on_skip=None, on_fail=None)
    assert {result["status"] for result in results} == {"passed"}


# ------------------------------------------------------------------------------------------------------------ mistakes


def test_it_must_be_fitted_first(model: Model) -> None:
    with pytest.raises(NotFittedError):
        CoralClassifier(model).predict(["a"])


@pytest.mark.parametrize(
    ("texts", "y", "complaint"),
    [
        ("one text", ["a"], "not one text"),
        ([], [], "0 texts"),
        (["a", 3], ["x", "y"], "Got int at place 1"),
        (["a", "b"], ["x", "x"], "Got one class, 'x'"),
        (["a", "b"], ["x"], "inconsistent numbers of samples"),
        (["a", "b"], [0.5, 1.7], "continuous"),
    ],
)
def test_what_cannot_be_fitted_is_named(model: Model, texts: Any, y: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CoralClassifier(model, settings=SMALL).fit(texts, y)


def test_labels_that_say_nothing_are_refused(model: Model) -> None:
    texts, names = mails(12)
    with pytest.raises(CoralError, match="label of class 'refund' must be a text"):
        CoralClassifier(model, {"refund": 3}, settings=SMALL).fit(texts, names)
    with pytest.raises(CoralError, match="Two classes have the same name"):
        CoralClassifier(model, {0: "same", 1: "same"}, settings=SMALL).fit(texts, [i % 2 for i in range(12)])


# ---------------------------------------------------------------------------------------------------------- real texts


def test_the_real_model_tells_good_reviews_from_bad_ones(smollm2: Model) -> None:
    """SST-2 of the embedded data: 48 texts to learn from, 48 others to be right on more often than chance."""
    texts, y = sst2(96)
    made = CoralClassifier(
        smollm2,
        {0: ("bad", "the reviewer did not like it"), 1: ("good", "the reviewer liked it")},
        instructions="Is this a good or a bad review?",
        settings=FitSettings(layers=(20,), lens="ridge"),
        random_state=0,
    ).fit(texts[:48], y[:48])
    assert made.score(texts[48:], y[48:]) > 0.65


def sst2(n: int) -> tuple[list[str], list[int]]:
    from datasets import load_from_disk

    rows = load_from_disk(str(embedded_data() / "glue" / "sst2" / "validation")).select(range(n))
    return rows["sentence"][:], rows["label"][:]
