"""Texts into classes, with scikit-learn's interface: the classes are options, and a lens weighs what the model makes of them.

    classifier = CoralClassifier("smollm2", {"refund": "wants money back", "other": ""}, instructions="What is wanted?")
    classifier.fit(texts, y).predict_proba(new_texts)

Everything is a question with options: the text is what is read before it, the instructions are what is asked, and the classes,
with their descriptions, are what is chosen from. `lens_` is an ordinary lens, which can be saved, calibrated and measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d

from coral_lens.data.questions import read_questions
from coral_lens.data.settings import TableOptions, TaskOptions
from coral_lens.engine.loading import load_model
from coral_lens.errors import CoralError
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Question

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

ASKED = "Which label fits the text?"


class InputError(CoralError, ValueError):
    """A mistake in what an estimator is given: scikit-learn's own tools expect a ValueError."""


@lru_cache(maxsize=2)
def loaded(name: str) -> Model:
    """Return a model by its name, loaded once: cross-validation asks for it again and again."""
    return load_model(name)


class CoralClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classify texts by a frozen language model and a lens.

    Parameters
    ----------
    model : str, Path or Model, default="smollm2"
        Hub id, local folder, .gguf file, `smollm2`, or a model that is loaded already, which clones share.
    labels : sequence or mapping, default=None
        The classes, or what is known of each: its description if classes are texts; else its name, or name and description.
        Classes that are not named are called as they are. A class that no training text has may be named too.
    instructions : str, default="Which label fits the text?"
        What is asked about each text.
    settings : FitSettings, default=None
        How the lens is fitted, and in which style the model is asked.
    random_state : int or None, default=None
        Seed of the split into training and validation texts; None is that of the settings.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    lens_ : Lens
    model_ : Model

    """

    # a constructor takes anything and `fit` complains: scikit-learn's rule, which its checks test
    def __init__(
        self,
        model: Any = "smollm2",
        labels: Any = None,
        *,
        instructions: Any = ASKED,
        settings: Any = None,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.labels = labels
        self.instructions = instructions
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> CoralClassifier:  # noqa: N803
        """Fit to texts X and their classes y. Texts that are the same are never divided between training and validation."""
        texts = checked_texts(X)
        check_consistent_length(texts, y)
        targets = column_or_1d(y, warn=True)
        check_classification_targets(targets)
        self.classes_ = np.unique(np.concatenate([targets, named_classes(self.labels, targets)]))
        if len(self.classes_) < 2:
            raise InputError(
                f"Classifying takes two classes or more. Got one class, {self.classes_.tolist()[0]!r}; name others in labels."
            )
        self._options = [option_of(value, self.labels) for value in self.classes_.tolist()]
        self.model_ = loaded(str(self.model)) if not hasattr(self.model, "identity") else self.model
        questions = self._questions(texts, np.searchsorted(self.classes_, targets).tolist())
        self.lens_ = fit(self.model_, questions, self._settings(), bar=False)
        return self

    def predict_proba(self, X: Any) -> Float[np.ndarray, "text class_"]:  # noqa: N803
        """Return the probability of each class for each text, in the order of `classes_`."""
        check_is_fitted(self, "lens_")
        texts = checked_texts(X)
        answers = {
            answer.id: answer.probs for answer in self.lens_.at_home().predict(self.model_, self._questions(texts))
        }
        missing = [i for i in range(len(texts)) if str(i) not in answers]
        if missing:
            raise InputError(
                f"Text number {missing[0]} cannot be classified: the model cannot read its classes after it."
            )
        return np.array([answers[str(i)] for i in range(len(texts))])

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the likeliest class of each text."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(axis=1)]

    def _questions(self, texts: Sequence[str], answers: Sequence[int] | None = None) -> list[Question]:
        """Return the texts as questions; those of the same text belong together."""
        rows: list[dict[str, Any]] = [{"id": str(i), "state": text} for i, text in enumerate(texts)]
        if answers is not None:
            rows = [{**row, "answer_index": answer} for row, answer in zip(rows, answers, strict=True)]
        names = [name for name, _ in self._options]
        if len(set(names)) < len(names):
            raise InputError(
                f"Two classes have the same name: {', '.join(map(repr, names))}; name them apart in labels."
            )
        said = TableOptions(classes=dict(self._options), instructions=str(self.instructions))
        return read_questions(rows, TaskOptions(table=said))

    def _settings(self) -> FitSettings:
        settings = self.settings or FitSettings()
        return settings if self.random_state is None else replace(settings, seed=int(self.random_state))

    def __sklearn_clone__(self) -> CoralClassifier:
        # a model has gigabytes, which scikit-learn would copy
        return type(self)(**self.get_params(deep=False))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, True, False
        return tags


def checked_texts(X: Any) -> list[str]:  # noqa: N803
    """Return texts, or refuse what are none."""
    if isinstance(X, str | bytes):
        raise InputError("Give a list of texts, not one text.")
    if hasattr(X, "tocsr"):
        raise InputError("Sparse input is not supported; give a list of texts.")
    values = X.tolist() if hasattr(X, "tolist") else list(X)
    if not values:
        raise InputError("Found 0 texts; at least one is needed.")
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise InputError(f"Texts are expected. Got {type(value).__name__} at place {i} instead.")
    return values


def named_classes(labels: Any, targets: np.ndarray) -> np.ndarray:
    """Return the classes that labels name, in the type of y; refuse those that are of another, such as texts where y has numbers.

    Trap: texts in the very type of y would be cut to its longest class.
    """
    known = [] if labels is None else list(labels)
    try:
        named = np.array(known, dtype="U" if targets.dtype.kind == "U" else targets.dtype)
    except (TypeError, ValueError, OverflowError):
        named = np.zeros(0)
    if named.tolist() != known:
        first = targets.tolist()[0]
        raise InputError(
            f"labels name the classes {known!r}, but y has classes such as {first!r}; name them as y does."
        )
    return named


def option_of(value: Any, labels: Any) -> tuple[str, str]:
    """Return the name of a class and its description."""
    said = labels.get(value) if isinstance(labels, Mapping) else None
    if isinstance(said, tuple | list) and len(said) == 2 and all(isinstance(part, str) for part in said):
        return str(said[0]), str(said[1])
    if said is not None and not isinstance(said, str):
        raise InputError(
            f"The label of class {value!r} must be a text, or a name and a description. Got {said!r} instead."
        )
    if isinstance(value, str):
        return value, said or ""
    return said or str(value), ""
