"""Which questions of a study train, validate and test, and that none of them leaks. Reads questions; never loads a model.

Before a question is read: tasks and mixtures exist, no split is both trained on and tested, none is tuned on that was
published for testing (unless a part of it is held out), no worked example comes from a tested split. Then, by the guard of
`leaks`: what a test set holds is dropped from training, and what is shown as a worked example is left out of tests. All is
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import or_
from pathlib import Path

from coral_lens.data.leaks import Guard, guard_of, guard_of_shown
from coral_lens.data.own_files import apart_by_file
from coral_lens.data.questions import load_questions
from coral_lens.data.settings import ChatTemplate, TaskOptions
from coral_lens.data.sources import is_file
from coral_lens.data.splits import sample, split_mask
from coral_lens.data.tasks import Definition, definitions, shot_splits
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question
from coral_lens.study.config import Mixture, Source, Study, Test

Load = Callable[[Source], tuple[Question, ...]]
"""Gives the questions of a source, already sampled."""


@dataclass(frozen=True)
class Selection:
    """Some of the questions of a source."""

    source: Source
    ids: frozenset[str]


@dataclass(frozen=True)
class MixturePlan:
    """What a mixture trains and validates on."""

    mixture: Mixture
    parts: tuple[Selection, ...]
    dropped: dict[str, int]
    """By test set: training questions that were dropped because it holds them too, or one of the same article."""
    reasons: dict[str, int]
    """By reason: the same questions, each counted once."""

    @property
    def n_dropped(self) -> int:
        return sum(self.reasons.values())

    @property
    def n_questions(self) -> int:
        return sum(len(part.ids) for part in self.parts)


@dataclass(frozen=True)
class TestPlan:
    """What one test set holds."""

    name: str
    part: Selection
    n_left_out: int
    """Questions that are also worked examples in some prompt of the study."""
    adapt: Selection | None = None
    """What methods may adapt on; no test set holds any of it."""
    apart: bool = False
    """Whether it is left out of means."""

    @property
    def n_questions(self) -> int:
        return len(self.part.ids)


@dataclass(frozen=True)
class Plan:
    """All questions of a study."""

    mixtures: tuple[MixturePlan, ...]
    tests: tuple[TestPlan, ...]


def plan_study(study: Study, load: Load) -> Plan:
    """Return which questions each mixture trains on and each test set holds."""
    check_sources(study)
    for source in study.sources:
        if source not in study.guard:
            refuse_unlabelled(source, load(source))
    refuse_same_ids(study.sources, load)
    held_out = {m.name: held_out_ids(m, load, seed=study.seed) for m in study.mixture}
    tests = [one for test in study.test for one in test_selections(study, test, load, held_out)]
    refuse_same_names([name for name, _ in tests])
    shown = guard_of_shown(worked_examples(study, load))
    kept = tuple(without_shown(name, part, load, shown) for name, part in tests)
    guards = {name: guard_of(selected(part, load)) for name, part in tests}
    adapted = {named(t, t.source.label): adaptation(t.adaptation, load, guards) for t in study.test if t.adaptation}
    apart = {named(t, t.source.label) for t in study.test if t.task and t.apart}
    kept = tuple(replace(t, adapt=adapted.get(t.name), apart=t.name in apart) for t in kept)
    guards |= {f"guard {s.label}": guard_of(load(s)) for s in study.guard}
    mixtures = tuple(mixture_plan(m, load, held_out[m.name], guards) for m in study.mixture)
    return Plan(mixtures, kept)


def loader(study: Study, data_dir: Path | None, template: ChatTemplate | None = None) -> Load:
    """Return a function that loads sources the way the study asks for, each once."""

    @cache
    def load(source: Source) -> tuple[Question, ...]:
        if is_file(source.task):
            options = TaskOptions(num_fewshot=source.shots or None)
        else:
            options = TaskOptions(
                split=source.split,
                num_fewshot=source.shots,
                data_dir=data_dir,
                chat_template=template,
                fixed_shots=study.fixed_shots,
            )
        questions = load_questions(source.task, options)
        return tuple(questions if source.n is None else sample(questions, source.n, seed=study.seed))

    return load


# ------------------------------------------------------------------------------------- before a question is read


def check_sources(study: Study) -> None:
    """Refuse a study that leaks by its very splits, or that asks a task in two ways."""
    known = {s.task: definitions_of(s) for s in study.sources}
    for source in study.sources:
        check_shots(source, known[source.task])
    for task in known:
        numbers = sorted({s.shots for s in study.sources if s.task == task})
        if len(numbers) > 1:
            raise CoralError(
                f"Study {study.name!r} asks {task} with {' and with '.join(map(str, numbers))} shots; every use of a task must "
                "have the same prompts: set one number."
            )
    tested = {split for s in study.tested for split in splits_of(s, known[s.task])}
    for mixture in study.mixture:
        for source in mixture.sources:
            refuse_overlap(mixture, source, known[source.task], tested)
    rests = [study.mixture_named(t.rest) for t in study.test if t.rest]
    for mixture in rests:
        if not mixture.held_out:
            raise CoralError(
                f"Mixture {mixture.name!r} holds nothing out, so it has no rest to test; give it held_out, such as 0.2."
            )
    tested |= {split for m in rests for s in m.sources for split in splits_of(s, known[s.task])}
    for source in study.adapted:
        if splits_of(source, known[source.task]) & tested:
            raise CoralError(
                f"The study would adapt on {source.label}, and tests on questions of the same split; use another split."
            )
    for source in study.sources:
        refuse_tested_shots(source, known[source.task], tested)


def definitions_of(source: Source) -> tuple[Definition, ...]:
    """Return the definitions of a task, or a stand-in for a file."""
    if is_file(source.task):
        return (Definition(source.task, str(Path(source.task).resolve()), None, None, shots=0),)
    return tuple(definitions(source.task))


def splits_of(source: Source, known: Iterable[Definition]) -> set[tuple[str, str]]:
    """Return the published splits that a source draws from."""
    return {(d.data, source.split) for d in known}


def check_shots(source: Source, known: Sequence[Definition]) -> None:
    """Refuse a source without a split, and shots where a task or a file takes none."""
    if is_file(source.task):
        if source.split or source.shots:
            raise CoralError(f"{source.task} is a file of questions: it has no splits, and takes shots = 0.")
        return
    if not source.split:
        raise CoralError(f"The study names no split of {source.task}; say which, such as split = 'validation'.")
    stubborn = [d.task for d in known if d.shots == 0]
    if source.shots and stubborn:
        raise CoralError(
            f"Task {stubborn[0]} is always asked without shots, but the study wants {source.shots}; set 0."
        )


def refuse_overlap(mixture: Mixture, source: Source, known: Sequence[Definition], tested: set[tuple[str, str]]) -> None:
    """Refuse to train on a split that is tested, and to tune on one that was published for testing."""
    if splits_of(source, known) & tested:
        raise CoralError(
            f"Mixture {mixture.name!r} trains on {source.label}, and the study tests on questions of the same split; use another "
            "split, or give the mixture held_out and test its rest."
        )
    if not mixture.held_out and any(source.split in ("test", d.test_split) for d in known):
        raise CoralError(
            f"Mixture {mixture.name!r} would tune on {source.label}, which was published for testing; use another split, or "
            "hold a part of it out for the test with held_out."
        )


def refuse_tested_shots(source: Source, known: Sequence[Definition], tested: set[tuple[str, str]]) -> None:
    """Refuse worked examples that come from a split of which questions are tested."""
    for d in known:
        if source.shots and d.shot_split and (d.data, d.shot_split) in tested:
            raise CoralError(
                f"Task {d.task} takes its worked examples from its split {d.shot_split!r}, on which the study tests; "
                "set its shots to 0."
            )


# ------------------------------------------------------------------------------------------- when they are read


def refuse_unlabelled(source: Source, questions: Sequence[Question]) -> None:
    """Refuse questions that can be neither learned from nor scored."""
    unknown = [q.id for q in questions if q.answer == UNKNOWN]
    if unknown:
        raise CoralError(
            f"{source.label}: {len(unknown)} of {len(questions)} questions have no answer, first {unknown[0]!r}; labels of many "
            "test splits were never published: use another split, such as validation."
        )


def refuse_same_ids(sources: Sequence[Source], load: Load) -> None:
    """Refuse sources whose ids are the same: their questions could not be told apart (files of one name have such ids)."""
    seen: dict[str, str] = {}
    for source in sources:
        for question in load(source):
            if seen.setdefault(question.id, source.label) != source.label:
                raise CoralError(
                    f"The question id {question.id!r} is in {seen[question.id]} and in {source.label}; make ids unique."
                )


def refuse_same_names(names: Sequence[str]) -> None:
    """Refuse two test sets of one name."""
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise CoralError(f"Two test sets are called {twice!r}; give one of them another name.")


def everything(source: Source, load: Load) -> Selection:
    """Select all questions of a source."""
    return Selection(source, ids_of(load(source)))


def held_out_ids(mixture: Mixture, load: Load, *, seed: int) -> frozenset[str]:
    """Return the questions that a mixture keeps for a test, whole groups only and the same share of every task."""
    questions = apart_by_file([q for s in mixture.sources for q in load(s)])
    ids = [q.id for q in questions]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise CoralError(f"Mixture {mixture.name!r} holds the question {twice!r} twice; make ids and sources unique.")
    if not mixture.held_out:
        return frozenset()
    mask = split_mask(questions, fraction=mixture.held_out, seed=seed, stratified=mixture.stratified)
    return ids_of(q for q, out in zip(questions, mask, strict=True) if out)


def test_selections(
    study: Study, test: Test, load: Load, held_out: dict[str, frozenset[str]]
) -> list[tuple[str, Selection]]:
    """Return the test sets that one entry of a study stands for, by name."""
    if test.task:
        return [(named(test, test.source.label), everything(test.source, load))]
    mixture = study.mixture_named(test.rest)
    parts = [Selection(s, ids_of(load(s)) & held_out[mixture.name]) for s in mixture.sources]
    return [(named(test, f"{p.source.label} held out of {mixture.name}"), p) for p in parts if p.ids]


def named(test: Test, source: str) -> str:
    """Return what tables call a test set: its name, if it has one, always with the split that is really used."""
    return f"{test.name} ({source})" if test.name else source


def worked_examples(study: Study, load: Load) -> list[Question]:
    """Return all questions that may stand in a prompt as a worked example, with their answers."""
    pools = [
        Source(task=source.task, split=split, shots=0)
        for source in study.sources
        for split in shot_splits(definitions_of(source), source.shots)
    ]
    return [q for pool in dict.fromkeys(pools) for q in load(pool)]


def without_shown(name: str, part: Selection, load: Load, shown: Guard) -> TestPlan:
    """Leave out of a test set what a prompt may show as a worked example."""
    questions = selected(part, load)
    kept = shown.find(questions).kept(questions)
    if not kept:
        raise CoralError(f"{name}: every question is also a worked example of some prompt; set the shots to 0.")
    return TestPlan(name, Selection(part.source, ids_of(kept)), len(questions) - len(kept))


def selected(part: Selection, load: Load) -> list[Question]:
    """Return the questions of a selection, in the order of their source."""
    return [q for q in load(part.source) if q.id in part.ids]


def ids_of(questions: Iterable[Question]) -> frozenset[str]:
    """Return the ids of questions."""
    return frozenset(q.id for q in questions)


def mixture_plan(mixture: Mixture, load: Load, held_out: frozenset[str], guards: Mapping[str, Guard]) -> MixturePlan:
    """Drop from training what leaks into a test set."""
    questions = {s: [q for q in load(s) if q.id not in held_out] for s in mixture.sources}
    everyone = [q for part in questions.values() for q in part]
    leaks = {name: guard.find(everyone) for name, guard in guards.items()}
    together = reduce(or_, leaks.values())
    kept = ids_of(together.kept(everyone))
    if not kept:
        raise CoralError(
            f"Mixture {mixture.name!r}: every training question is in a test set too; choose other sources."
        )
    parts = tuple(Selection(s, ids_of(part) & kept) for s, part in questions.items())
    return MixturePlan(mixture, parts, {name: int(one.mask.sum()) for name, one in leaks.items()}, together.counts)


def adaptation(source: Source, load: Load, guards: Mapping[str, Guard]) -> Selection:
    """Return the questions of a source that no test set holds."""
    questions = load(source)
    leaks = reduce(or_, (guard.find(questions) for guard in guards.values()))
    return Selection(source, ids_of(leaks.kept(questions)))
