"""What words alone say of an option: TF-IDF of question and option, in a few hundred columns. No model has a part in it.

The vectors of the training texts are turned into their leading directions (latent semantic analysis). An option has its own
vector, and column by column its product with that of the question: whether they have words in common, and words of which kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from coral_lens.records import Question

MOST_WORDS = 20_000
MOST_DIRECTIONS = 256


def texts_of(question: Question) -> tuple[str, tuple[str, ...]]:
    """Return what is asked and the texts of the options, those that are listed where letters are scored."""
    wording = question.wording
    return f"{question.passage} {wording.stem}", wording.listed or question.options


@dataclass(frozen=True)
class TextVectors:
    """Turns texts into vectors, as it was fitted to."""

    words: Any
    """A TfidfVectorizer of scikit-learn."""
    directions: Any
    """A TruncatedSVD of scikit-learn."""

    def states(self, questions: Sequence[Question]) -> Float[np.ndarray, "row width"]:
        """Return the vector of every option, and its product with its question's."""
        texts = [texts_of(q) for q in questions]
        asked = np.repeat(self._vectors([one for one, _ in texts]), [len(options) for _, options in texts], axis=0)
        options = self._vectors([option for _, options in texts for option in options])
        return np.concatenate([options, asked * options], axis=1).astype(np.float32)

    def _vectors(self, texts: Sequence[str]) -> Float[np.ndarray, "text direction"]:
        return np.asarray(self.directions.transform(self.words.transform(texts)))


def fit_vectors(questions: Sequence[Question], *, seed: int) -> TextVectors:
    """Learn words and directions from the texts of training questions."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [text for q in questions for asked, options in [texts_of(q)] for text in (asked, *options)]
    # words of one letter count: an option may be one
    words = TfidfVectorizer(max_features=MOST_WORDS, sublinear_tf=True, token_pattern=r"\w+")
    counted = words.fit_transform(texts)
    n = max(1, min(MOST_DIRECTIONS, min(counted.shape) - 1))
    return TextVectors(words, TruncatedSVD(n, random_state=seed).fit(counted))
