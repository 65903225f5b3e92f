"""Inference-time intervention: outputs of the heads that know right from wrong are shifted while options are scored.

As in the paper's appendix B.1 and B.5: a logistic probe for each head at the last token of each option, the M heads whose
probes do best on validation questions, a direction for each, and a strength alpha by validation ECE. The shift is added at
the last context token and the answer tokens: at an option's last token alone it could not change that option's score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from coral_lens.engine.activations import ActivationStore
from coral_lens.engine.edits import AddDirection, head_directions
from coral_lens.engine.planned import Edited, Extraction, Readings
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import HeadInputs, heads_name
from coral_lens.engine.self_check import packing_of
from coral_lens.engine.trees import shared_context
from coral_lens.engine.variants import Variants, score_variants
from coral_lens.errors import CoralError
from coral_lens.lens.rules import base_probs, correct_rows
from coral_lens.lens.settings import Criterion
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, options_of
from coral_lens.methods.iti.head_probes import accuracies, class_weights, fit_probes, mean_difference, spreads, unit
from coral_lens.metrics.scores import metric_named
from coral_lens.records import Predictions, predictions_of
from coral_lens.storage.files import digest, digest_bytes, file_name, kept_record, write_atomic, write_record
from coral_lens.storage.settings import Count, Counts, NotEmpty, Settings

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


ALPHAS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""The paper's strengths, of a shift of length 1 in every head."""
SIGMA_ALPHAS = (1.0, 2.5, 5.0, 7.5, 10.0, 15.0)
"""Strengths of the original, in standard deviations of the states along the direction; 15 is its default."""
FEWEST_OPTIONS = 10
"""Fewer right or wrong options than this are refused."""

Direction = Literal["mean", "probe"]


@dataclass(frozen=True)
class ItiSettings(Settings):
    """What ITI tries; the validation questions choose."""

    heads: Counts = (24, 48, 96)
    """Numbers of heads that are shifted; all heads, where a model has fewer."""
    directions: Annotated[tuple[Direction, ...], NotEmpty()] = ("mean", "probe")
    """`mean`: the mean over right options less that over wrong ones. `probe`: the probe's weights. Both of length 1."""
    alphas: tuple[float, ...] = ()
    """Strengths; empty for the paper's 0.5 to 3.0, or with `sigma` 1 to 15."""
    sigma: bool = False
    """Whether each head's shift is also multiplied by the standard deviation of its states along the direction, as in the
    original method; the paper leaves it out."""
    balanced: bool = True
    """Whether right and wrong options weigh the same in the probes and in their accuracy. One option in n is right, so with
    equal rows most probes call everything wrong, which is (n - 1) / n accurate, and nothing is left to rank heads by."""
    criterion: Criterion = "ece"
    """Validation metric that chooses heads, direction and alpha."""
    questions: Count = 200
    """Validation questions that they are chosen on, at most."""

    @property
    def strengths(self) -> tuple[float, ...]:
        return self.alphas or (SIGMA_ALPHAS if self.sigma else ALPHAS)


# -------------------------------------------------------------------------------------------------------------- heads


def read_heads(context: FitContext) -> ActivationStore:
    """Score the training questions and keep what every head puts out at each option's last token."""
    model = context.model()
    refuse_fused(model)
    blocks = tuple(range(1, model.n_layers + 1))
    width = sum(p.get_parameter("weight").numel() for p in model.projections) // model.width
    readings = Readings((HeadInputs(blocks, model.n_heads),), {"heads": "last token"}, row_bytes=2 * width)
    return context.extract(
        model, context.train.prompted(), "heads", extraction=Extraction((), context.common.style, readings=readings)
    )


def refuse_fused(model: Model) -> None:
    """Refuse a model whose heads cannot be told apart."""
    if not model.projections:
        raise CoralError(
            f"{model.name!r} has no attention output projection whose input holds the outputs of its heads one by one, "
            "so ITI cannot be used with it; leave it out for this model."
        )
    width = model.projections[0].get_parameter("weight").numel() // model.width
    if width % model.n_heads:
        raise CoralError(
            f"The attention output projection of {model.name!r} reads {width} columns, which {model.n_heads} heads cannot "
            "share equally, so ITI cannot be used with it; leave it out for this model."
        )


@dataclass(frozen=True)
class HeadScan:
    """What was learned of every head; block i is layer i + 1."""

    accuracy: Float[np.ndarray, "block head"]
    """The accuracy of its probe on the validation questions."""
    directions: dict[str, Float[np.ndarray, "block head head_dim"]]
    """By kind; each of length 1, or of length sigma."""

    def best(self, n: int) -> list[tuple[int, int]]:
        """Return (layer, head) of the n heads with the most accurate probes, the first of equals first."""
        # rounded, because sums of weights differ in their last digits where accuracies are the same
        order = np.argsort(-self.accuracy.round(9), axis=None, kind="stable")[:n]
        blocks, heads = np.unravel_index(order, self.accuracy.shape)
        return [(int(b) + 1, int(h)) for b, h in zip(blocks, heads, strict=True)]


def scan_heads(context: FitContext, store: ActivationStore, settings: ItiSettings) -> HeadScan:
    """Fit a probe on every head with the training questions, judge it on the validation questions, and take directions."""
    data = context.data
    y, held_out = correct_rows(data.table), data.table.options.rows(data.is_validation)
    refuse_few_options(y[~held_out])
    weights, held_out_weights = (class_weights(y[rows], balanced=settings.balanced) for rows in (~held_out, held_out))
    accuracy: list[np.ndarray] = []
    directions: dict[str, list[np.ndarray]] = {name: [] for name in settings.directions}
    n_blocks = store.manifest["model"]["layers"]
    with context.bar("probing heads", n_blocks, "blocks") as advance:
        for layer in range(1, n_blocks + 1):
            states = store.reading(heads_name(layer)).astype(np.float32)
            train = states[~held_out]
            probes = fit_probes(train, y[~held_out], weights)
            accuracy.append(accuracies(probes, states[held_out], y[held_out], held_out_weights))
            raw = {"mean": mean_difference(train, y[~held_out]), "probe": probes.weights}
            for name, by_block in directions.items():
                direction = unit(raw[name])
                by_block.append(direction * spreads(train, direction)[:, None] if settings.sigma else direction)
            advance(1)
    return HeadScan(np.stack(accuracy), {name: np.stack(by_block) for name, by_block in directions.items()})


def refuse_few_options(y: Float[np.ndarray, " row"]) -> None:
    """Refuse labels of options from which nothing can be learned."""
    right, wrong = int(y.sum()), int((1 - y).sum())
    if min(right, wrong) < FEWEST_OPTIONS:
        raise CoralError(
            f"ITI's probes need at least {FEWEST_OPTIONS} right and {FEWEST_OPTIONS} wrong options among the training questions. "
            f"Got {right} right and {wrong} wrong; give more questions."
        )


# ------------------------------------------------------------------------------------------------------------- choice


@dataclass(frozen=True)
class InterventionSetting:
    """One setting that is tried: how many heads are shifted, along which kind of direction, and how strongly."""

    heads: int
    direction: str
    alpha: float


@dataclass(frozen=True)
class Intervention:
    """What is added to the outputs of heads: alpha times a direction for each, zero for heads that are left alone."""

    directions: Float[np.ndarray, "block head head_dim"]
    alpha: float

    @property
    def about(self) -> dict[str, Any]:
        """What scores under it depend on, as JSON."""
        return {"method": "iti", "alpha": self.alpha, "directions": digest_bytes(self.directions.tobytes())}

    @property
    def edit(self) -> AddDirection:
        """The edit of the model, at the last context token and the answer tokens."""
        shifted = np.argwhere(np.abs(self.directions).sum(axis=2) > 0)
        by_head = {(int(b) + 1, int(h)): torch.from_numpy(self.directions[b, h]) for b, h in shifted}
        return AddDirection(head_directions(by_head, n_heads=self.directions.shape[1]), self.alpha)


def intervention_of(scan: HeadScan, setting: InterventionSetting) -> Intervention:
    """Return the intervention of a setting: the heads with the best probes, each with its direction."""
    directions = np.zeros_like(scan.directions[setting.direction], dtype=np.float32)
    for layer, head in scan.best(setting.heads):
        directions[layer - 1, head] = scan.directions[setting.direction][layer - 1, head]
    return Intervention(directions, setting.alpha)


def intervention_settings(scan: HeadScan, settings: ItiSettings) -> list[InterventionSetting]:
    """Return every setting that is tried."""
    numbers = dict.fromkeys(min(n, scan.accuracy.size) for n in settings.heads)
    return [InterventionSetting(n, d, a) for n in numbers for d in settings.directions for a in settings.strengths]


def score_interventions(
    context: FitContext, scan: HeadScan, tried: Sequence[InterventionSetting], settings: ItiSettings
) -> Float[np.ndarray, " setting"]:
    """Return the validation score of each setting; the contexts of the questions run through the model once for all."""
    model, data, numbers = context.model(), context.data, context.validation(settings.questions)
    questions = context.train.prompted()
    prompts = prepare([questions[i] for i in numbers], context.common.style, model).prompts
    interventions = [intervention_of(scan, setting) for setting in tried]
    about = {
        "prompts": digest([[p.contexts, p.options] for p in prompts]),
        "edits": [intervention.about for intervention in interventions],
    }
    edits = [[intervention.edit] for intervention in interventions]
    variants = Variants(edits, {"weights": model.fingerprint["weights"], **about})
    folder = context.folder / f"tuning-{digest(variants.about)[:8]}"
    with context.bar("trying interventions", len(prompts) * len(edits), "questions") as advance:
        by_variant = score_variants(model, prompts, variants, folder, packing=packing_of(model), progress=advance)
    mask = np.isin(np.arange(len(data.questions)), numbers)
    rows, scores = data.table.options.rows(mask), []
    for logprobs in by_variant:
        of_all = data.table.logprobs.copy()
        of_all[rows] = logprobs
        probs = base_probs(replace(data.table, logprobs=of_all), context.common.base)
        scores.append(data.scores(probs, [settings.criterion], mask)[settings.criterion])
    return np.array(scores)


def choose_intervention(context: FitContext, settings: ItiSettings) -> tuple[Intervention, dict[str, Any]]:
    """Return the intervention with the best validation score, the first of equals, and the record of the choice."""
    scan = scan_heads(context, read_heads(context), settings)
    tried = intervention_settings(scan, settings)
    scores = score_interventions(context, scan, tried, settings)
    best = int(np.argmax(scores) if metric_named(settings.criterion).higher_is_better else np.argmin(scores))
    chosen = tried[best]
    record = {
        "criterion": settings.criterion,
        "validation_questions": len(context.validation(settings.questions)),
        "chosen": vars(chosen) | {settings.criterion: float(scores[best])},
        "tried": [vars(t) | {settings.criterion: float(s)} for t, s in zip(tried, scores, strict=True)],
        "heads": [
            {"layer": layer, "head": head, "accuracy": float(scan.accuracy[layer - 1, head])}
            for layer, head in scan.best(chosen.heads)
        ],
    }
    return intervention_of(scan, chosen), record


def load_or_choose(context: FitContext, settings: ItiSettings) -> Intervention:
    """Return the intervention in the method's folder if it was chosen on the same questions, else choose and keep one."""
    path, tensors = context.folder / "iti.json", context.folder / "iti.safetensors"
    key = digest([context.train.states.manifest, context.common.base, *context.division])
    kept, data = kept_record(path), tensors.read_bytes() if tensors.exists() else b""
    # earlier versions kept no digest of the shift
    if kept and data and kept.get("key") == key and kept.get("tensors", digest_bytes(data)) == digest_bytes(data):
        context.note("chosen", kept["chosen"])
        return Intervention(load_tensors(data)["directions"].numpy(), kept["chosen"]["alpha"])
    intervention, record = choose_intervention(context, settings)
    data = save_tensors({"directions": torch.from_numpy(intervention.directions)})
    write_atomic(tensors, data)
    write_record(path, {"key": key, **record, "tensors": digest_bytes(data)})
    context.note("chosen", record["chosen"])
    return intervention


def fit_iti(context: FitContext, settings: ItiSettings) -> Predict:
    """Choose heads, direction and strength; test questions are then scored under them, in a pass of their own."""
    intervention = load_or_choose(context, settings)
    edited = Edited((intervention.edit,), intervention.about)

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        model, questions = context.model(), test.prompted()
        apart = any(shared_context(p) is None for p in prepare(questions, context.common.style, model).prompts)
        # in a tree the context of one option could hold the last context token of another, which is shifted
        extraction = Extraction(
            (),
            context.common.style,
            packing="plain" if apart else None,
            edited=edited,
            neutral=context.common.base == "pmi",
        )
        table = context.extract(model, questions, file_name(test.name), extraction=extraction).table
        return {"": predictions_of("iti", test.states, base_probs(table, context.common.base))}

    return predict


ITI = Method(options_of(ItiSettings), fit_iti, from_scores=False)
