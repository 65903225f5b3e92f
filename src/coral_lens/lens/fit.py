"""Fit a lens: extract states, learn a probe per layer on training questions, choose layer and strength on validation.

Test questions cannot be seen here: no function takes any.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from coral_lens.data.answers import ELSEWHERE
from coral_lens.data.leaks import question_keys
from coral_lens.data.licences import licence_of
from coral_lens.data.own_files import apart_by_file
from coral_lens.data.shots import n_shots
from coral_lens.data.splits import split_mask
from coral_lens.data.wording import asked_as
from coral_lens.engine.extract import score_questions
from coral_lens.engine.planned import Extraction, all_layers, refuse_layers
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.choose import SHOWN, Candidate, Work, choose_candidate, fit_recipe, single_lens, try_singles
from coral_lens.lens.correction import Correction
from coral_lens.lens.do_no_harm import DoNoHarm, fit_do_no_harm
from coral_lens.lens.domains import file_places
from coral_lens.lens.folder import load_lens
from coral_lens.lens.layer_view import view_of
from coral_lens.lens.learning_curve import brier_by_question, learning_curve
from coral_lens.lens.open_part import CandidateStates, OpenPart
from coral_lens.lens.probes.registry import AUTO, LENSES
from coral_lens.lens.readouts import available, places_of, reading_of, refuse_without_lists, training_layers
from coral_lens.lens.rules import (
    FLOOR,
    apply_temperature,
    base_probs,
    choose_base,
    residuals,
    scale_corrected,
    temperature_on,
    uniform_probs,
)
from coral_lens.lens.settings import FEW_QUESTIONS, FEWEST_QUESTIONS, BaseRule, FitSettings, ReadName
from coral_lens.lens.trace import Choice, GammaPoint, LayerTrial, Trace, Training
from coral_lens.lens.training_data import TrainingData, fold_masks
from coral_lens.lens.trust import LEAST, Trust
from coral_lens.lens.weighing import Weighing, fit_weighing
from coral_lens.metrics.scores import METRICS, Score, measure
from coral_lens.records import UNKNOWN, Question, Scored
from coral_lens.storage.files import digest, versions
from coral_lens.storage.progress import Bar, bar_of, silent

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

KEPT_OF_MODEL = ("name", "weights", "tokenizer", "logits", "config", "dtype")
"""What a lens keeps of the record of its model."""
AUTO_FOLDS = 5
"""Folds where a kind of lens is chosen, or where questions are few and the choice is left to us."""
CHECK_BOOT = 500
"""Resamples behind the intervals of the validation scores."""


def fit(
    model: Model,
    questions: Sequence[Question],
    settings: FitSettings | None = None,
    *,
    work_dir: str | Path | None = None,
    bar: Bar | bool = True,
) -> Lens:
    """Fit a lens on labelled questions.

    With `work_dir` the activations are kept there, and an interrupted or repeated fit reuses them. Progress is shown in a
    terminal and in a notebook; `bar=False` shows nothing. If the questions come from several files, each file counts as a
    task: put questions of one kind into one file, or name their task.
    """
    settings, bar = settings or FitSettings(), bar_of(bar)
    questions = apart_by_file(asked_as(questions, settings.style))
    check_questions(questions)
    refuse_without_lists(settings.read, model, questions, settings.style)
    refuse_layers(model, (*(settings.layers or ()), settings.exit_layer or 0))
    layers = settings.within_exit(settings.layers or all_layers(model))
    extraction = Extraction(
        layers=layers, style=settings.style, read=places_of(settings.read), neutral=settings.neutral
    )
    folder = Path(work_dir) if work_dir else None
    with ExitStack() as stack:
        with bar("extracting", len(questions), "questions") as advance:
            scoring = score_questions(model, questions, extraction, folder=folder, progress=advance)
            store = stack.enter_context(scoring)
        journal = folder / "search.jsonl" if folder else None
        return fit_store(store, settings, journal=journal, bar=bar, device=str(model.device))


def check_questions(questions: Sequence[Question]) -> None:
    """Refuse questions that nothing can be learned from."""
    unlabelled = [q.id for q in questions if q.answer == UNKNOWN]
    if unlabelled:
        raise CoralError(
            f"{len(unlabelled)} of {len(questions)} training questions have no answer, first {unlabelled[0]!r}; "
            f"fitting needs the right option of each. {ELSEWHERE}"
        )
    if len(questions) < FEWEST_QUESTIONS:
        raise CoralError(
            f"Fitting needs at least {FEWEST_QUESTIONS} labelled questions, better a thousand. Got {len(questions)}."
        )


def fit_store(
    store: Scored,
    settings: FitSettings,
    *,
    journal: Path | None = None,
    bar: Bar = silent,
    device: str = "cpu",
) -> Lens:
    """Fit a lens from a store of labelled questions, or from several joined.

    `journal` is a file in which a search for a network keeps what it has done; `bar` shows how far the fit is; `device` is
    where networks are trained.
    """
    check_questions(store.questions)
    settings = with_layers(settings, store)
    asked = settings.record()
    if settings.base == "auto":
        settings = replace(settings, base=choose_base_on(store, settings))
    if settings.read == "auto":
        settings = replace(settings, read=choose_read(store, settings, bar))
    data, base_temperature = training_data(store, settings)
    data = replace(data, device=device)
    if settings.exit:
        settings = with_layers(replace(settings, exit=None, exit_layer=choose_exit(data, settings, bar)), store)
    choices: list[tuple[Candidate, list[Candidate]]] = []
    tried: dict[str, list[Candidate]] = {}
    for kind in AUTO if settings.lens == "auto" else (settings.lens,):
        # an ensemble goes without ranks, so what was tried with them is not its own
        known = tried.get(single_lens(kind)) if "rank" not in settings.inputs else None
        choices.append(choose_candidate(data, kind, settings, Work(journal, bar), known))
        tried[single_lens(kind)] = choices[-1][1]
    chosen, singles = min(choices, key=lambda choice: choice[0].cost(settings.criterion))
    first = data.rounds[0]
    correction = chosen.correction or fit_recipe(data, chosen.recipe, np.ones(len(first), dtype=bool), first)
    compared = [candidate for candidate, _ in choices]
    lens = make_lens(store, data, correction, FitOutcome(settings, base_temperature, chosen, singles, compared))
    return replace(lens, training=replace(lens.training, settings=asked))


def with_layers(settings: FitSettings, store: Scored) -> FitSettings:
    """Return the settings with the layers to try named."""
    return replace(settings, layers=settings.within_exit(settings.layers or store.layers))


def choose_exit(data: TrainingData, settings: FitSettings, bar: Bar) -> int:
    """Return the lowest layer whose lens is within one standard error of the best layer's, but not the embeddings."""
    singles = try_singles(data, closed_form(settings), settings, bar)
    return max(1, min(as_good_layers(data, singles, settings.criterion)))


def choose_read(store: Scored, settings: FitSettings, bar: Bar) -> ReadName:
    """Return the read-out whose best layer is best on validation, of those that the store can give."""
    found = {}
    for name in available(store):
        data, _ = training_data(store, replace(settings, read=name))
        singles = try_singles(data, closed_form(settings), settings, bar)
        found[name] = min(candidate.layer_cost(settings) for candidate in singles)
    return min(found, key=lambda name: found[name])


def choose_base_on(store: Scored, settings: FitSettings) -> BaseRule:
    """Return the base rule that is best on validation, by the criterion of the fit."""
    criterion = settings.criterion
    sign = -1.0 if METRICS[criterion].higher_is_better else 1.0
    data, _ = training_data(store, replace(settings, base="token", read="answer"))
    return choose_base(data.table, data.rounds, lambda probs: sign * data.scores(probs, [criterion])[criterion])


def closed_form(settings: FitSettings) -> str:
    """Return the lens of closed form that stands for the one asked for where layers or read-outs are compared."""
    is_closed = settings.lens != "auto" and not LENSES[settings.lens].network
    return single_lens(settings.lens) if is_closed else "listwise"


def load_or_fit(store: Scored, settings: FitSettings, folder: Path, *, bar: Bar = silent, device: str = "cpu") -> Lens:
    """Return the lens in `folder` if it was fitted on the same store in the same way, else fit one and save it there.

    A search for a network keeps what it has done beside the folder.
    """
    if (folder / "lens.json").exists():
        with suppress(CoralError):
            saved = load_lens(folder)
            wanted = json.loads(json.dumps(with_layers(settings, store).record()))
            if (saved.training.store, saved.training.settings) == (digest(store.manifest), wanted):
                return saved
    lens = fit_store(store, settings, journal=folder.parent / "search.jsonl", bar=bar, device=device)
    lens.save(folder)
    return lens


def training_data(store: Scored, settings: FitSettings) -> tuple[TrainingData, float]:
    """Divide the questions into training and validation, and scale the base probabilities if that is asked for."""
    questions, table = store.questions, store.table
    folds = folds_of(settings, len(questions))
    if folds > 1:
        rounds = fold_masks(questions, folds, seed=settings.seed)
    else:
        rounds = (
            split_mask(questions, fraction=settings.validation, seed=settings.seed, stratified=settings.stratified),
        )
    train = ~rounds[0] if folds == 1 else np.ones(len(questions), dtype=bool)
    assert settings.base != "auto", "it was chosen before"
    base = settings.base if table.counts is None else fit_weighing(table, train)
    p, temperature = base_probs(table, base) if not settings.exits else uniform_probs(table.options), 1.0
    if settings.scale_base:
        temperature = temperature_on(p, table, train)
        p = apply_temperature(p, table.options, temperature=temperature)
    assert settings.read != "auto", "it was chosen before"
    layer = training_layers(store, settings.read, lettered=settings.style.kind == "letters")
    return TrainingData(questions, table, p, residuals(table, p), layer, rounds, base=base), temperature


def folds_of(settings: FitSettings, n_questions: int) -> int:
    """Return how many folds choose a lens of so many questions; 1 is one split."""
    if settings.folds > 1:
        return settings.folds
    few = settings.folds == 0 and n_questions < FEW_QUESTIONS
    return AUTO_FOLDS if few or settings.lens == "auto" else 1


# ------------------------------------------------------------------------------------------------------------ the lens


@dataclass(frozen=True)
class FitOutcome:
    """The outcome of a fit: its settings, the candidates that were tried, and the one that was chosen."""

    settings: FitSettings
    base_temperature: float
    chosen: Candidate
    singles: Sequence[Candidate]
    """The lenses of single layers."""
    compared: Sequence[Candidate]
    """The best of each kind of lens."""

    @property
    def best(self) -> GammaPoint:
        """The chosen strength, with its validation scores."""
        return self.chosen.best(self.settings.criterion)


def make_lens(store: Scored, data: TrainingData, correction: Correction, fit: FitOutcome) -> Lens:
    """Return the lens: the chosen correction with its controls and its record."""
    settings, chosen, gamma = fit.settings, fit.chosen, fit.best.gamma
    assert settings.read != "auto", "it was chosen before"
    assert settings.base != "auto", "it was chosen before"
    reading = reading_of(store, settings.read, correction.layers, lettered=settings.style.kind == "letters")
    temper = settings.tempers(chosen.recipe.kind)
    harmless = fit_do_no_harm(data, chosen, gamma, temper=temper, seed=settings.seed)
    floored = np.maximum(chosen.probs(gamma), FLOOR)
    open_part = open_part_of(store, data, correction)
    # one that exits early has no answers of the model to fall back on; candidates are the model's own answers
    checked = not settings.exits and open_part is None
    lens = Lens(
        kind=chosen.recipe.kind,
        correction=replace(correction, scale=1.0, reading=reading),
        gamma=gamma * correction.scale,
        base=settings.base,
        base_temperature=fit.base_temperature,
        steered_temperature=temperature_on(floored, data.table, data.is_validation)
        if settings.then_temperature
        else 1.0,
        style=settings.style,
        shift=harmless.shift,
        tempering=None,
        trust=trust_of(harmless, data, settings, checked=checked),
        exits=settings.exits,
        control_temperature=temperature_on(base_probs(data.table, data.base), data.table, data.is_validation),
        model={k: v for k, v in store.manifest["model"].items() if k in KEPT_OF_MODEL},
        training=training_of(store, data, fit),
        seen=np.unique(question_keys(store.questions)),
        trace=replace(
            trace_of(data, fit),
            simulated=harmless.simulated,
            answers=dict(harmless.answers) if checked else {},
        ),
        # the probes of single layers as they were fitted to choose among them; with folds there are none to keep
        view=None
        if open_part or settings.read != "answer"
        else view_of([c.correction for c in fit.singles if c.correction is not None]),
        open=open_part,
    )
    return replace(lens, trace=replace(lens.trace, validation=validation_scores(lens, data, fit)))


def trust_of(harmless: DoNoHarm, data: TrainingData, settings: FitSettings, *, checked: bool) -> Trust | None:
    """Return how far the lens is believed, and where it answers: everywhere unless that was checked."""
    if (trust := harmless.trust) is None:
        return None
    trust = replace(trust, places=file_places(data.questions, ~data.rounds[0]))
    trust = replace(trust, least=LEAST) if settings.exits else trust
    return trust if checked else replace(trust, answers={})


def open_part_of(store: Scored, data: TrainingData, correction: Correction) -> OpenPart | None:
    """Return what a lens for open questions has beside all others; None where the questions came with options."""
    if not isinstance(store, CandidateStates):
        return None
    assert isinstance(data.base, Weighing), "candidates are weighed"
    return OpenPart(store.sampling, data.base, store.reference(correction.layers))


# ---------------------------------------------------------------------------------------------------------- the record


def trace_of(data: TrainingData, fit: FitOutcome) -> Trace:
    """Return how the choice was made; the scores of the finished lens are still missing."""
    settings, chosen, criterion = fit.settings, fit.chosen, fit.settings.criterion
    curve = learning_curve(data, chosen, fit.best.gamma, seed=settings.seed) if settings.learning_curve else None
    return Trace(
        criterion=criterion,
        rule=LENSES[chosen.recipe.kind].rule,
        chosen=Choice(chosen.recipe.layers, chosen.r2, fit.best.gamma, chosen.recipe.settings),
        layers=tuple(
            LayerTrial(c.recipe.layers[0], c.r2, c.recipe.settings[0], c.best(criterion), c.at(1.0))
            for c in fit.singles
        ),
        gammas=chosen.gammas,
        kinds={c.recipe.kind: c.best(criterion) for c in fit.compared},
        as_good=as_good_layers(of_singles(data, chosen), fit.singles, criterion),
        validation={},
        learning_curve=curve,
        own_layers=LENSES[chosen.recipe.kind].network,
    )


def of_singles(data: TrainingData, chosen: Candidate) -> TrainingData:
    """Return the data that the candidates of single layers were scored on: those of a network on the first round alone."""
    return replace(data, rounds=data.rounds[:1]) if LENSES[chosen.recipe.kind].network else data


def as_good_layers(data: TrainingData, singles: Sequence[Candidate], criterion: str) -> tuple[int, ...]:
    """Return the layers whose Brier score is within one standard error of the best one's, question by question."""
    per_question = {
        c.recipe.layers[0]: brier_by_question(data, c.probs(c.best(criterion).gamma), data.is_validation)
        for c in singles
    }
    best = min(per_question, key=lambda layer: per_question[layer].mean())
    behind = {layer: v - per_question[best] for layer, v in per_question.items()}
    return tuple(layer for layer, d in behind.items() if d.mean() <= d.std() / np.sqrt(len(d)))


def validation_scores(lens: Lens, data: TrainingData, fit: FitOutcome) -> dict[str, dict[str, Score]]:
    """Return the shown scores of the lens and its controls on the validation questions, each with its 95 % interval."""
    options, raw = data.options, base_probs(data.table, data.base)
    plain = scale_corrected(fit.chosen.probs(fit.best.gamma), options, temperature=lens.steered_temperature)
    shifts = lens.shift(data.layer(lens.layers[0]), options)
    cooled = apply_temperature(raw, options, temperature=lens.control_temperature)
    methods = {"base": raw, "temperature": cooled, lens.plain_method: plain}
    if lens.trust:
        fallback = data.p if lens.exits or lens.open else cooled
        believed = lens.trust.believed(data.questions, shifts, np.ones(len(options), dtype=bool))
        methods[lens.method] = believed.blend(fallback, plain, options)
    return {method: with_intervals(data, probs) for method, probs in methods.items()}


def with_intervals(data: TrainingData, probs: Float[np.ndarray, " row"]) -> dict[str, Score]:
    """Return the shown scores on the validation questions, each with its 95 % interval."""
    scores = measure(data.predictions(probs, data.is_validation), n_boot=CHECK_BOOT).scores
    return {metric: scores[metric] for metric in SHOWN}


def training_of(store: Scored, data: TrainingData, fit: FitOutcome) -> Training:
    """Return what the lens was fitted on and how."""
    questions = store.questions
    sources = [f"{q.task}:{q.split}" if q.split else q.task for q in questions]
    return Training(
        tasks=dict(Counter(sources)),
        terms={source: licence_of(q.task) for source, q in zip(sources, questions, strict=True)},
        # a network chosen by folds is that of the first round; only a lens of closed form is fitted on everything
        n_train=len(questions) if fit.chosen.correction is None else int((~data.rounds[0]).sum()),
        n_validation=int(data.is_validation.sum()),
        settings=fit.settings.record(),
        store=digest(store.manifest),
        questions=store.manifest["questions"],
        versions=versions(),
        shots=max(map(n_shots, questions)),
    )
