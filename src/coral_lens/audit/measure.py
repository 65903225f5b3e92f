"""The audit itself: every system as it is, then what maps, sets and a threshold are worth on questions not used to fit them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
from jaxtyping import Bool

from coral_lens.audit.maps import SystemMaps, fit_maps
from coral_lens.audit.settings import AuditSettings
from coral_lens.audit.swaps import Flips, flips_between, flips_within
from coral_lens.audit.systems import AuditedSet
from coral_lens.errors import CoralError
from coral_lens.metrics.conformal import abstains, prediction_sets
from coral_lens.metrics.facts import Facts, facts_of
from coral_lens.metrics.scores import MORE, Metrics, Score, measure
from coral_lens.records import Predictions
from coral_lens.report.confidence import N_BOOT, ConfidenceSummary, confidence_summary, mean_score, wilson_score
from coral_lens.report.runs import Evaluation, Run
from coral_lens.report.tables.run import COLUMNS, Pairs, ResultsTable, Scope, results_table
from coral_lens.storage.progress import Bar, silent

FEWEST = 40
"""Questions below which nothing is fitted: a quarter of them would have to carry a map."""
FEWEST_IN_GROUP = 10
"""Questions of a subgroup that is shown by itself."""
TOP_METRICS = ("accuracy", "ece", "smooth_ece", "ece_debiased", "brier_top1", "nll_top1", "auroc", "aurc")
"""What can be measured where only the confidence in the answer is known."""
N_SIMULATED = 200


@dataclass(frozen=True)
class Threshold:
    """What a threshold is worth on questions that it was not fitted on."""

    system: str
    maps: SystemMaps
    answered: Score
    """Share of the questions above it."""
    right: Score | None
    """Share of these that are answered right; None where nothing is answered."""


@dataclass(frozen=True)
class Sets:
    """What prediction sets are worth on questions that they were not fitted on."""

    system: str
    maps: SystemMaps
    covered: Score
    """Share of the sets that hold the right option."""
    size: float
    """Mean number of options in a set."""
    n_options: float
    """Mean number of options of a question."""


@dataclass(frozen=True)
class Audit:
    """Everything that an audit found."""

    audited: AuditedSet
    settings: AuditSettings
    metrics: dict[str, Metrics]
    """Of each system as it is, on all questions."""
    floors: dict[str, dict[str, float]]
    """By system: what a perfectly calibrated one with these confidences would show, by metric."""
    compared: ResultsTable | None
    """Systems against the first, question by question; None where there is one only."""
    maps: dict[str, SystemMaps]
    """By system; empty where there are too few questions."""
    calibrated: ResultsTable | None
    """Each system before and after each map, on the questions that nothing was fitted on."""
    n_measured: int
    """So many questions."""
    sets: tuple[Sets, ...] = ()
    thresholds: tuple[Threshold, ...] = ()
    groups: tuple[ConfidenceSummary, ...] = ()
    """Every system on every subgroup; `test` is the column and `task` its value."""
    flips: tuple[Flips, ...] = ()


def audit(
    audited: AuditedSet,
    settings: AuditSettings | None = None,
    *,
    fit_on: AuditedSet | None = None,
    swapped: AuditedSet | None = None,
    bar: Bar = silent,
) -> Audit:
    """Audit systems. Maps are fitted on another set if one is given, else on a part of this one, and measured on the rest."""
    settings = settings or AuditSettings()
    systems = audited.systems
    for column in settings.by:
        audited.column(column)  # a name that no column has is refused before the work
    with bar("audit", 5, "steps") as done:
        metrics = {n: measure(p, seed=settings.seed, more=("smooth_ece",)) for n, p in systems.items()}
        done(1)
        floors = {name: floors_of(p, seed=settings.seed) for name, p in systems.items()}
        done(1)
        maps, measured = fitted_maps(audited, settings, fit_on)
        done(1)
        rows = after_maps(measured, maps) if maps else None
        calibrated = table_of(rows, with_itself, seed=settings.seed) if rows else None
        done(1)
        compared = table_of(audited, with_first, seed=settings.seed) if len(systems) > 1 else None
        done(1)
    return Audit(
        audited=audited,
        settings=settings,
        metrics=metrics,
        floors=floors,
        compared=compared,
        maps=maps,
        calibrated=calibrated,
        n_measured=len(measured.questions) if maps else 0,
        sets=tuple(sets_of(n, m, measured.systems[n]) for n, m in maps.items() if m.sets),
        thresholds=tuple(threshold_of(n, m, measured.systems[n]) for n, m in maps.items() if m.abstention),
        groups=tuple(s for column in settings.by for s in summaries(audited, column)),
        flips=tuple(flips_between(audited, swapped) if swapped else flips_within(audited)),
    )


# ------------------------------------------------------------------------------------------------------------ dividing


def divide(audited: AuditedSet, share: float, *, seed: int) -> Bool[np.ndarray, " question"]:
    """Return a mask of about this share of the questions; those of one group stay together."""
    groups: dict[str, list[int]] = {}
    for i, question in enumerate(audited.questions):
        groups.setdefault(question.group, []).append(i)
    mask, members = np.zeros(len(audited.questions), dtype=bool), list(groups.values())
    order = np.random.default_rng(seed).permutation(len(members))
    before = np.cumsum([0, *(len(members[g]) for g in order)])[:-1]
    for g in order[before < share * len(mask)]:
        mask[members[g]] = True
    return mask


def fitted_maps(
    audited: AuditedSet, settings: AuditSettings, fit_on: AuditedSet | None
) -> tuple[dict[str, SystemMaps], AuditedSet]:
    """Return what was fitted for each system, and the questions that had no part in it."""
    if fit_on is None and len(audited.questions) < FEWEST:
        if settings.stated_risk is not None:
            raise CoralError(
                f"A threshold needs at least {FEWEST} labelled questions, a part of which measures it; {audited.name} has "
                f"{len(audited.questions)}."
            )
        return {}, audited
    source, measured = kept_apart(audited, settings) if fit_on is None else (same_systems(fit_on, audited), audited)
    first = divide(source, 0.5, seed=settings.seed + 1)
    fitting, promising = source.take(first), source.take(~first)
    if settings.map == "none" or audited.top_only:  # promises then stand on nothing that was fitted
        fitting, promising = source, source
    if not len(fitting.questions) or not len(promising.questions) or not len(measured.questions):
        raise CoralError(f"The groups of {audited.name} are too few to fit on some and to measure on others.")
    return {
        name: fit_maps(fitting.systems[name], promising.systems[name], settings, top_only=audited.top_only)
        for name in audited.systems
    }, measured


def kept_apart(audited: AuditedSet, settings: AuditSettings) -> tuple[AuditedSet, AuditedSet]:
    """Return the questions to fit on and those to measure on."""
    mask = divide(audited, settings.fit_share, seed=settings.seed)
    return audited.take(mask), audited.take(~mask)


def same_systems(fit_on: AuditedSet, audited: AuditedSet) -> AuditedSet:
    """Return a set to fit on under the names of the audited systems; refuse one that holds what is measured."""
    missing = [name for name in audited.systems if name not in fit_on.systems]
    if missing and (len(fit_on.systems) != 1 or len(audited.systems) != 1):
        raise CoralError(
            f"{fit_on.name} says nothing of the system {missing[0]!r}; it has {', '.join(fit_on.systems)}."
        )
    source = (
        replace(fit_on, systems=dict(zip(audited.systems, fit_on.systems.values(), strict=True))) if missing else fit_on
    )
    shared = rows_of_set(source) & rows_of_set(audited)
    if shared:
        raise CoralError(
            f"{len(shared)} rows of {fit_on.name} are in {audited.name} too: what is fitted on them cannot be measured on them; "
            "leave them out of one, or leave --fit-on out, which divides the file."
        )
    return source


def rows_of_set(audited: AuditedSet) -> set[tuple[object, ...]]:
    """Return what tells rows apart: the id, the text, and what the first system says."""
    said = next(iter(audited.systems.values()))
    return {(q.id, q.text, *said.probs[said.options.of(i)].tolist()) for i, q in enumerate(audited.questions)}


# ----------------------------------------------------------------------------------------------------------- measuring


def floors_of(predictions: Predictions, *, seed: int) -> dict[str, float]:
    """Return what a calibrated system with these confidences shows on average, for each ECE: right as often as it says."""
    facts, rng = facts_of(predictions), np.random.default_rng(seed)
    once = np.ones((1, len(predictions)))
    drawn: list[Facts] = []
    for _ in range(N_SIMULATED):
        hit = (rng.random(len(facts.confidence)) < facts.confidence).astype(np.float64)
        drawn.append(replace(facts, hit=hit, right=hit))
    return {"smooth_ece": float(np.mean([MORE["smooth_ece"].compute(f, once)[0] for f in drawn]))}


def with_first(methods: Iterable[str]) -> list[tuple[str, str]]:
    """Compare every system with the first."""
    first, *others = list(methods)
    return [(other, first) for other in others]


def with_itself(methods: Iterable[str]) -> list[tuple[str, str]]:
    """Compare every mapped system with itself as it was."""
    methods = list(methods)
    return [(m, m.rpartition(" + ")[0]) for m in methods if m.rpartition(" + ")[0] in methods]


def table_of(audited: AuditedSet, pairs: Pairs, *, seed: int) -> ResultsTable:
    """Return the table of systems with intervals and paired differences."""
    columns = ("accuracy", "ece", "brier_top1", "nll_top1") if audited.top_only else COLUMNS
    return results_table(run_of(replace(audited, tests=())), scope=Scope(columns, pairs), seed=seed)


def run_of(audited: AuditedSet, provenance: Mapping[str, object] | None = None) -> Run:
    """Return audited systems as a run, of which tables and figures are made; each test set is one of its own."""
    tests = np.array(audited.tests or [audited.name] * len(audited.questions))
    parts = [(name, audited.take(tests == name)) for name in dict.fromkeys(tests.tolist())]
    evaluations = tuple(Evaluation(name, part.questions, part.systems) for name, part in parts)
    return Run(f"Audit of {audited.name}", evaluations, {"model": {"name": audited.name}}, dict(provenance or {}))


def after_maps(measured: AuditedSet, maps: Mapping[str, SystemMaps]) -> AuditedSet:
    """Return each system, and what each map makes of it."""
    rows: dict[str, Predictions] = {}
    for name, predictions in measured.systems.items():
        rows[name] = predictions
        if measured.top_only:
            continue
        for which in ("temperature", "isotonic"):
            label = f"{name} + {which}"
            probs = maps[name].mapped(which, predictions.probs, predictions.options)
            rows[label] = replace(predictions, method=label, probs=probs)
    return replace(measured, systems=rows)


def sets_of(name: str, maps: SystemMaps, predictions: Predictions) -> Sets:
    """Measure prediction sets."""
    assert maps.sets is not None, "asked for by the caller"
    options = predictions.options
    inside = prediction_sets(maps.sets, maps.mapped(maps.used, predictions.probs, options), options)
    covered = share_of(inside[options.row(predictions.answers)], predictions.groups)
    size, n_options = float(options.sum(inside.astype(float)).mean()), float(options.sizes.mean())
    return Sets(name, maps, covered, size, n_options)


def threshold_of(name: str, maps: SystemMaps, predictions: Predictions) -> Threshold:
    """Measure a threshold."""
    assert maps.abstention is not None, "asked for by the caller"
    mapped = replace(predictions, probs=maps.mapped(maps.used, predictions.probs, predictions.options))
    facts = facts_of(mapped)
    given = ~abstains(maps.abstention, facts.confidence)
    groups = tuple(compress(predictions.groups, given))
    right = share_of(facts.right[given] > 0, groups) if given.any() else None
    return Threshold(name, maps, share_of(given, predictions.groups), right)


def share_of(marked: Bool[np.ndarray, " question"], groups: Sequence[str]) -> Score:
    """Return the share of the questions that are marked, with its interval.

    Where questions come in groups, whole ones are drawn; of a share of nought or of all that would leave no width, so the
    interval is never narrower than Wilson's.
    """
    wilson = wilson_score(float(marked.sum()), len(marked))
    if not groups:
        return wilson
    drawn = mean_score(marked.astype(np.float64), groups, n_boot=N_BOOT)
    return Score(wilson.value, min(wilson.low, drawn.low), max(wilson.high, drawn.high))


def summaries(audited: AuditedSet, column: str) -> list[ConfidenceSummary]:
    """Return every system on the questions of each value of a column; values with few questions are put together."""
    values = audited.column(column)
    counts = Counter(values)
    shown = [value for value, n in counts.items() if n >= FEWEST_IN_GROUP]
    labels = np.array([value if value in shown else "(others)" for value in values])
    found = []
    for value in [*shown, *(["(others)"] if len(shown) < len(counts) else [])]:
        mask = labels == value
        for predictions in audited.systems.values():
            found.append(confidence_summary(predictions.take(mask), base=None, where=(column, value)))
    return found
