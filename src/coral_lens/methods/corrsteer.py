"""CorrSteer (Cho et al., 2025): add the directions of autoencoder features whose activation goes with right answers.

The original correlates features with the correctness of generated answers. Here a sample is the option that the unsteered
model prefers, with the mean activation over its tokens; it is correct if it is the answer. The features of the highest
positive correlation are added at every position, each by its mean activation in the correct samples, times alpha. How many
and how strongly is chosen on validation questions; alpha 0, if it is among them, is the unsteered model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from coral_lens.engine.edits import AddDirection
from coral_lens.engine.hooks import Site
from coral_lens.engine.planned import Edited, Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import Criterion
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, options_of
from coral_lens.records import Predictions, predictions_of
from coral_lens.sae.autoencoder import Autoencoder, load_autoencoder
from coral_lens.sae.codes import CodeStore, Encoding, collect_codes, sae_digest
from coral_lens.sae.folder import LEAST_ACTIVE
from coral_lens.sae.select import StreamingPearson, correlate, top_correlated
from coral_lens.sae.sweep import Sweep, best_of, run_sweep, scores_by
from coral_lens.storage.files import digest, file_name, write_json
from coral_lens.storage.settings import Count, Counts, NotEmpty, Settings

SAMPLES_AT_ONCE = 64
"""Samples that are taken in together."""


@dataclass(frozen=True)
class CorrSteerSettings(Settings):
    """What CorrSteer tries; the validation questions choose."""

    sae: str
    """Folder of an autoencoder, such as the 16x of `coral sae train`."""
    features: Counts = (1, 10, 50)
    """Numbers of features that are tried; the original takes one a layer."""
    alphas: Annotated[tuple[float, ...], NotEmpty()] = (0.0, 0.25, 0.5, 1.0, 2.0)
    """Strengths that are tried; the original's is 1."""
    questions: Count = 200
    """Validation questions that features and alpha are chosen on, at most."""
    criterion: Criterion = "ece"
    """Validation metric that chooses them."""


@dataclass(frozen=True)
class Preferred:
    """The option that the unsteered model prefers, and whether it is the answer."""

    option: int
    is_answer: bool


def iter_preferred(codes: CodeStore, preferred: dict[str, Preferred]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the codes of preferred options, and whether they are the answer; `preferred` is by the id of a question."""
    samples: list[tuple[np.ndarray, float]] = []
    for coded in codes:
        choice = preferred[codes.ids[coded.question]]
        samples.append((coded.dense(codes.n_features)[choice.option], float(choice.is_answer)))
        if len(samples) == SAMPLES_AT_ONCE:
            yield np.stack([c for c, _ in samples]), np.array([y for _, y in samples])
            samples = []
    if samples:
        yield np.stack([c for c, _ in samples]), np.array([y for _, y in samples])


@dataclass
class MeanOfCorrect:
    """Passes samples on and keeps the mean code of the correct ones: both from one pass."""

    total: Float[np.ndarray, " feature"]
    n: int = 0

    def watch(self, samples: Iterator[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for codes, y in samples:
            self.total += codes[y == 1].sum(axis=0, dtype=np.float64)
            self.n += int((y == 1).sum())
            yield codes, y


def correlate_correctness(
    codes: CodeStore, preferred: dict[str, Preferred]
) -> tuple[StreamingPearson, Float[np.ndarray, " feature"]]:
    """Return the correlations of features with correctness, and their mean activation in correct samples."""
    n_right = sum(choice.is_answer for choice in preferred.values())
    if min(n_right, len(preferred) - n_right) < LEAST_ACTIVE:
        raise CoralError(
            f"CorrSteer needs {LEAST_ACTIVE} right and {LEAST_ACTIVE} wrong answers of the unsteered model. Got {n_right} "
            f"right of {len(preferred)} training questions; give more."
        )
    correct = MeanOfCorrect(np.zeros(codes.n_features))
    pearson = correlate(correct.watch(iter_preferred(codes, preferred)), codes.n_features)
    return pearson, correct.total / correct.n


def direction_of(
    sae: Autoencoder, pearson: StreamingPearson, means: Float[np.ndarray, " feature"], n: int
) -> Float[Tensor, " width"]:
    """Return the sum over the n best features of mean activation times direction, in the units of the states."""
    best = top_correlated(pearson, n)
    if not len(best):
        raise CoralError("No feature of the autoencoder goes with right answers; CorrSteer has nothing to add.")
    return (torch.from_numpy(means[best]) @ sae.w_dec[torch.from_numpy(best)].double()).float()


def preferred_options(context: FitContext, mask: Bool[np.ndarray, " question"]) -> dict[str, Preferred]:
    """Return what the unsteered model prefers in each marked question, by the question's id."""
    data = context.data
    top, answers = data.table.options.top(data.p).tolist(), data.table.answers.tolist()
    return {
        data.questions[i].id: Preferred(top[i], is_answer=top[i] == answers[i]) for i in np.flatnonzero(mask).tolist()
    }


def choose_direction(context: FitContext, settings: CorrSteerSettings) -> tuple[Site, Tensor, float]:
    """Correlate on training questions, choose the number of features and alpha on validation questions."""
    model, prompted, sae = context.model(), context.train.prompted(), load_autoencoder(Path(settings.sae))
    sae.check(model)
    train = ~context.data.is_validation
    questions = [prompted[i] for i in np.flatnonzero(train).tolist()]
    key = digest([sae_digest(sae), context.train.states.manifest, int(train.sum())])[:8]
    with context.bar("encoding", len(questions), "questions") as advance:
        folder = context.folder / f"codes-{key}"
        codes = collect_codes(model, questions, folder, Encoding(sae, context.common.style), progress=advance)
    pearson, means = correlate_correctness(codes, preferred_options(context, train))
    site = Site("residual", sae.layer)
    directions = {n: direction_of(sae, pearson, means, n) for n in settings.features}
    still = (
        [(min(directions), 0.0)] if 0.0 in settings.alphas else []
    )  # one pass: nothing is added, however many features
    tried = [*still, *((n, a) for n in directions for a in settings.alphas if a)]
    edits = [AddDirection({site: directions[n]}, a, "all") for n, a in tried]
    sweep = Sweep(sae.layer, edits, [[key, *pair] for pair in tried], context.common.style)
    validation = [prompted[i] for i in context.validation(settings.questions).tolist()]
    with context.bar("trying strengths", len(validation), "questions") as advance:
        folder = context.folder / f"tuning-{digest(list(sweep.about))[:8]}"
        scores = run_sweep(model, validation, folder, sweep, progress=advance)
    values = scores_by(scores, context.common.base, [settings.criterion])
    best = best_of([v[settings.criterion] for v in values], settings.criterion)
    record: list[dict[str, Any]] = [{"features": n, "alpha": a, **v} for (n, a), v in zip(tried, values, strict=True)]
    write_json(
        context.folder / "corrsteer.json", {"criterion": settings.criterion, "chosen": record[best], "tried": record}
    )
    context.note("chosen", record[best])
    return site, directions[tried[best][0]], tried[best][1]


def fit_corrsteer(context: FitContext, settings: CorrSteerSettings) -> Predict:
    """Choose a direction; test questions are then scored under it, in a pass of their own."""
    site, direction, alpha = choose_direction(context, settings)
    about = {"method": "corrsteer", "alpha": alpha, "layer": site.layer, "direction": digest(direction.tolist())}
    edited = Edited((AddDirection({site: direction}, alpha, "all"),), about)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        neutral = context.common.base == "pmi"
        extraction = Extraction((), context.common.style, edited=edited, neutral=neutral)
        table = context.extract(context.model(), test.prompted(), file_name(test.name), extraction=extraction).table
        return {"": predictions_of("corrsteer", test.states, base_probs(table, context.common.base))}

    return predict


def read_corrsteer(entry: Any) -> CorrSteerSettings:
    """Read the options; the folder of the autoencoder must be there before anything runs."""
    if "sae" not in entry.options:
        raise CoralError(f"Method {entry.row!r} needs sae = FOLDER, an autoencoder made by `coral sae train`.")
    settings = options_of(CorrSteerSettings)(entry)
    load_autoencoder(Path(settings.sae))
    return settings


def depends(settings: CorrSteerSettings) -> list[str]:
    """Return a digest of the autoencoder, which may be trained again in the same folder."""
    return [sae_digest(load_autoencoder(Path(settings.sae)))]


CORRSTEER = Method(read_corrsteer, fit_corrsteer, from_scores=False, depends=depends)
