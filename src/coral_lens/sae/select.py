"""Choose features: by their correlation with the residual, or by what they should do to a ridge probe (appendix A.1).

One pass over the codes, in memory that does not grow with the number of samples. A sample is an option of a question; its
residual is r = y - p. Labels of training questions are all that is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from coral_lens.data.leaks import question_keys
from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.extract import extract
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.fit import check_questions
from coral_lens.lens.probes.ridge import PENALTIES, fit_ridge_folds
from coral_lens.lens.probes.standardise import fit_standardiser
from coral_lens.lens.rules import base_probs, residuals
from coral_lens.records import Question, Scored
from coral_lens.sae.autoencoder import Autoencoder, load_autoencoder
from coral_lens.sae.codes import CodeStore, Encoding, collect_codes, sae_digest
from coral_lens.sae.folder import LEAST_ACTIVE, LEAST_FREQUENCY, FeatureSelection, FeatureStudy, refuse_other_folder
from coral_lens.sae.settings import Selecting
from coral_lens.storage.files import versions, write_record
from coral_lens.storage.progress import Bar, silent

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


ACTIVE = 1e-4
"""A feature is active above this."""
FOLDS = 5


class StreamingPearson:
    """The correlation of every feature with one target, from chunks of samples.

    Means and co-moments are merged chunk by chunk (Chan, Golub and LeVeque): sums of raw squares would lose the digits of a
    feature whose mean is large beside its deviation.
    """

    def __init__(self, n_features: int) -> None:
        self.n = 0
        self.mean, self.squares, self.cross = (np.zeros(n_features) for _ in range(3))
        self.n_active = np.zeros(n_features, dtype=np.int64)
        self.target_mean = self.target_squares = 0.0

    def add(self, codes: Float[np.ndarray, "sample feature"], target: Float[np.ndarray, " sample"]) -> None:
        """Take in some samples."""
        n = len(codes)
        if not n:
            return
        mean, target_mean = codes.mean(axis=0, dtype=np.float64), float(target.mean())
        centred, target = codes - mean, target - target_mean
        weight = self.n * n / (self.n + n)
        step, target_step = mean - self.mean, target_mean - self.target_mean
        self.squares += (centred**2).sum(axis=0) + weight * step**2
        self.cross += target @ centred + weight * step * target_step
        self.target_squares += float((target**2).sum()) + weight * target_step**2
        self.n += n
        self.mean += step * n / self.n
        self.target_mean += target_step * n / self.n
        self.n_active += (np.abs(codes) > ACTIVE).sum(axis=0)

    @property
    def r(self) -> Float[np.ndarray, " feature"]:
        """The correlations; 0 where a feature or the target is constant."""
        below = np.sqrt(self.squares * self.target_squares)
        return np.divide(self.cross, below, out=np.zeros_like(self.cross), where=below > 0)

    @property
    def passes(self) -> np.ndarray:
        """Which features are active often enough to be looked at."""
        return (self.n_active >= LEAST_ACTIVE) & (self.n_active > LEAST_FREQUENCY * self.n)


def correlate(samples: Iterable[tuple[np.ndarray, np.ndarray]], n_features: int) -> StreamingPearson:
    """Take in chunks of codes with their targets; refuse too few samples, and features that are all dead."""
    pearson = StreamingPearson(n_features)
    for codes, target in samples:
        pearson.add(codes, target)
    if pearson.n < LEAST_ACTIVE:
        raise CoralError(
            f"{pearson.n} samples are too few for a correlation; give at least {LEAST_ACTIVE}, better thousands."
        )
    if not pearson.n_active.any():
        raise CoralError(
            f"All {n_features} features of the autoencoder are dead on these questions; train with a smaller --penalty or on "
            "more tokens."
        )
    if not pearson.passes.any():
        raise CoralError(
            f"No feature is active in {LEAST_ACTIVE} of the {pearson.n} samples; give more questions or another autoencoder."
        )
    return pearson


def top_correlated(pearson: StreamingPearson, k: int) -> Int[np.ndarray, " chosen"]:
    """Return the features of the highest positive correlation, best first: at most k, of those active often enough."""
    r = np.where(pearson.passes, pearson.r, -np.inf)
    order = np.argsort(-r, kind="stable")[:k]
    return order[r[order] > 0]


# ------------------------------------------------------------------------------------------------------------ impact


def ridge_direction(scored: Scored, layer: int, r: Float[np.ndarray, " row"]) -> Float[np.ndarray, " width"]:
    """Return w of the ridge probe in the units of the states; its penalty is the best by folds of whole questions."""
    if layer not in scored.layers:
        raise CoralError(f"The store holds layers {list(scored.layers)}, not {layer}; extract with --layers {layer}.")
    states = scored.layer(layer)
    standardiser = fit_standardiser(states)
    folds = scored.table.options.question % FOLDS
    predicted, probes = fit_ridge_folds(standardiser(states), r, folds, PENALTIES)
    best = int(np.argmin(((predicted - r) ** 2).mean(axis=1)))
    return np.asarray(probes[best].weight / standardiser.scale, dtype=np.float64)


def impact(
    sae: Autoencoder, w: Float[np.ndarray, " width"], mean_activation: Float[np.ndarray, " feature"]
) -> Float[np.ndarray, " feature"]:
    """Return s_j times the mean activation, s_j = (d_j * sigma) . w: rows of W_dec are d_j * sigma already."""
    return sae.w_dec.double().numpy() @ w * mean_activation


def top_impact(pearson: StreamingPearson, scores: Float[np.ndarray, " feature"], k: int) -> Int[np.ndarray, " chosen"]:
    """Return the features of the largest absolute impact, of those active often enough."""
    size = np.where(pearson.passes, np.abs(scores), -np.inf)
    order = np.argsort(-size, kind="stable")[:k]
    return order[size[order] > 0]


def choose_features(pearson: StreamingPearson, scores: Float[np.ndarray, " feature"], *, k: int) -> FeatureSelection:
    """Choose k features by each criterion."""
    chosen = {"correlation": top_correlated(pearson, k).tolist(), "impact": top_impact(pearson, scores, k).tolist()}
    return FeatureSelection(pearson.n, pearson.r, pearson.n_active, pearson.mean, scores, chosen)


QUESTIONS_AT_ONCE = 50
"""Questions whose codes are taken in together."""


# -------------------------------------------------------------------------------------------------------- selection


def select_features(
    model: Model, questions: Sequence[Question], folder: Path, selecting: Selecting, *, bar: Bar = silent
) -> FeatureStudy:
    """Correlate the features of an autoencoder with the residuals of labelled questions, and choose the best."""
    refuse_other_folder(folder)
    sae = load_autoencoder(selecting.sae, layer=selecting.layer)
    sae.check(model)
    check_questions(questions)
    extraction = Extraction(layers=(sae.layer,), style=selecting.style)
    with bar("scoring", len(questions), "questions") as advance:
        scored = extract(model, questions, folder / "states", extraction=extraction, progress=advance)
    with bar("encoding", len(questions), "questions") as advance:
        codes = collect_codes(model, questions, folder / "codes", Encoding(sae, selecting.style), progress=advance)
    table = scored.table
    r = residuals(table, base_probs(table, selecting.base))
    pearson = correlate(iter_option_samples(codes, scored, r), sae.n_features)
    scores = impact(sae, ridge_direction(scored, sae.layer, r), pearson.mean)
    chosen = choose_features(pearson, scores, k=selecting.k)
    record = {
        "sae": str(selecting.sae.resolve()),
        "sae_digest": sae_digest(sae),
        "layer": sae.layer,
        "base": selecting.base,
        "style": selecting.style.record(),
        "shots": {"num_fewshot": selecting.num_fewshot, "fixed_shots": selecting.fixed_shots},
        "model": model.name,
        "weights": model.fingerprint["weights"],
        "config": model.identity["config"],
        "questions": [q.id for q in scored.questions],
        "keys": question_keys(scored.questions).tolist(),
        "selection": chosen.record(),
        "versions": versions(),
    }
    write_record(folder / "selection.json", record)
    return FeatureStudy(folder)


def iter_option_samples(
    codes: CodeStore, scored: ActivationStore, r: Float[np.ndarray, " row"]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the codes of the options of some questions with their residuals."""
    number = {q.id: i for i, q in enumerate(scored.questions)}
    options, ids = scored.table.options, codes.ids
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    for coded in codes:
        at = number.get(ids[coded.question])
        if at is not None:
            samples.append((coded.dense(codes.n_features), r[options.of(at)]))
        if len(samples) == QUESTIONS_AT_ONCE:
            yield np.concatenate([c for c, _ in samples]), np.concatenate([t for _, t in samples])
            samples = []
    if samples:
        yield np.concatenate([c for c, _ in samples]), np.concatenate([t for _, t in samples])
