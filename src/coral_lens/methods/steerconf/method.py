"""SteerConf: ask the model for its answer and its confidence in words, several times and under steering instructions.

Reads what the model writes; no state is read or changed. The answer is chosen by majority, among tied ones by the highest mean
confidence; its score is the consistency of the answers, their mean confidence, or the confidence weighted by the
consistency of both (the paper's appendix B.3). The score becomes a distribution: the answer gets the score, but never less
than an even share, and the other options share the rest evenly. A sample that cannot be read is left out; a question none of
whose samples can be read gets the even distribution. How often that happens is noted. An explanation that was cut before its
answer may be asked for it in one more step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, product
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float

from coral_lens.engine.generation import Generated
from coral_lens.engine.settings import GenerationSettings
from coral_lens.errors import CoralError
from coral_lens.lens.settings import Criterion
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, options_of
from coral_lens.methods.steerconf.answers import StatedAnswer, read_answer
from coral_lens.methods.steerconf.prompts import ANSWER_LINE, STEERING, option_texts, verbal_prompt
from coral_lens.methods.steerconf.texts import load_or_generate
from coral_lens.metrics.scores import METRICS, score
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question, predictions_of
from coral_lens.storage.files import file_name, write_json
from coral_lens.storage.settings import LATER, Count, Counts, NotEmpty, OneOf, Range, Settings

MARGIN = 1e-6
"""By how much the answer's share exceeds an even one at least: it must stay the answer."""

MOSTLY = 0.5
"""A plan that fails on a larger share of the validation questions than this is taken only if all do."""

# ---------------------------------------------------------------------------------------------------- arithmetic


def majority(samples: Sequence[StatedAnswer]) -> int:
    """Return the most frequent answer; a tie is broken by the highest mean confidence, then by the first option."""
    confidences = {s.option: [t.confidence for t in samples if t.option == s.option] for s in samples}
    return min(confidences, key=lambda o: (-len(confidences[o]), -float(np.mean(confidences[o])), o))


def consistency(samples: Sequence[StatedAnswer]) -> float:
    """Return the share of the most frequent answer."""
    answer = majority(samples)
    return sum(s.option == answer for s in samples) / len(samples)


def mean_confidence(samples: Sequence[StatedAnswer]) -> float:
    """Return the mean confidence of all samples."""
    return float(np.mean([s.confidence for s in samples]))


def weighted_confidence(samples: Sequence[StatedAnswer]) -> float:
    """Return mean confidence * (1 - V_ans) * (1 - V_conf): answers and confidences that vary count less."""
    mean = mean_confidence(samples)
    if mean == 0:
        return 0.0
    variation = float(np.std([s.confidence for s in samples])) / mean
    return mean * consistency(samples) * (1.0 - variation / (1.0 + variation))


def adjusted_confidence(samples: Sequence[StatedAnswer]) -> float:
    """Return mean confidence * consistency."""
    return mean_confidence(samples) * consistency(samples)


AGGREGATIONS: dict[str, Callable[[Sequence[StatedAnswer]], float]] = {
    "weighted": weighted_confidence,
    "consistency": consistency,
    "mean": mean_confidence,
    "adjusted": adjusted_confidence,
}
"""The paper tries mean, weighted and `consistency-adjusted`, which it does not define: `consistency` reads it as the consistency
itself, `adjusted` as the mean confidence times the consistency."""


def distribution(samples: Sequence[StatedAnswer], n_options: int, aggregation: str) -> Float[np.ndarray, " option"]:
    """Return a distribution over the options: the answer's score, and the rest spread evenly; even where there is no sample."""
    if not samples:
        return np.full(n_options, 1.0 / n_options)
    share = min(max(AGGREGATIONS[aggregation](samples), 1.0 / n_options + MARGIN), 1.0)
    probs = np.full(n_options, (1.0 - share) / (n_options - 1))
    probs[majority(samples)] = share
    return probs


# ------------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class SteerConfSettings(Settings):
    """What SteerConf tries; the defaults are the paper's, in stages."""

    prompts: Annotated[tuple[Annotated[str, OneOf(tuple(STEERING))], ...], NotEmpty()] = tuple(STEERING)
    """Steering instructions that are tried."""
    thinking: Annotated[tuple[bool, ...], NotEmpty()] = (True, False)
    """Chain of thought on or off."""
    temperatures: Annotated[tuple[Annotated[float, Range(above=0)], ...], NotEmpty()] = (0.7, 0.5, 1.0)
    """Temperatures of sampling that are tried; the first is that of the first stage."""
    samples: Counts = (1, 3, 5, 10)
    """Numbers of samples that are tried: all are the first of the largest number."""
    screening: Count = 3
    """Samples in the first stage, which chooses prompt and thinking."""
    questions: Count = 40
    """Validation questions to choose on."""
    criterion: Criterion = "ece"
    """Validation metric that chooses."""
    crossed: bool = False
    """Try everything with everything instead of in stages: hours on a CPU."""
    max_new_tokens: Count = 128
    """Tokens of an answer, at most."""
    batch_size: Count = 256
    """Answers that are written at a time."""
    aggregations: Annotated[tuple[Annotated[str, OneOf(tuple(AGGREGATIONS))], ...], NotEmpty(), LATER] = (
        "weighted",
        "consistency",
        "mean",
    )
    """Ways to aggregate that are tried; the first is that of the first stage. `adjusted` is the other reading of the paper's
    `consistency-adjusted`."""
    ask_again: Annotated[bool, LATER] = False
    """Whether an answer that was cut and cannot be read is asked for in one more step: the line before it is written for the
    model, which goes on from there. The paper does not say what happens to such answers."""


@dataclass(frozen=True)
class InterviewPlan:
    """One way to ask a model and to aggregate its answers."""

    prompt: str
    thinking: bool
    temperature: float
    samples: int
    aggregation: str


# ------------------------------------------------------------------------------------------------------- asking


@dataclass(frozen=True)
class Replies:
    """The model's replies to questions asked in one way: for each question its samples, None where one cannot be read."""

    samples: list[list[StatedAnswer | None]]
    cut: int
    """Samples that had not ended at the limit of tokens."""
    asked_again: int = 0
    """Samples that were cut, could not be read, and were asked for their answer once more."""

    def probs(self, sizes: Sequence[int], n: int, aggregation: str) -> Float[np.ndarray, " row"]:
        """Return the distributions from the first n samples of each question."""
        pairs = zip(self.samples, sizes, strict=True)
        read = [([sample for sample in samples[:n] if sample], k) for samples, k in pairs]
        return np.concatenate([distribution(samples, k, aggregation) for samples, k in read])

    def failures(self, n: int) -> dict[str, float]:
        """Return how often the first n samples could not be read."""
        first = [samples[:n] for samples in self.samples]
        unread = [sample is None for samples in first for sample in samples]
        return {
            "samples that could not be read": float(np.mean(unread)),
            "questions without any readable sample": float(np.mean([not any(samples) for samples in first])),
            "samples cut at the limit": self.cut / max(1, sum(len(samples) for samples in self.samples)),
            **({"samples asked for their answer again": self.asked_again} if self.asked_again else {}),
        }


@dataclass(frozen=True)
class Interview:
    """Asks questions, in one way after another, and reads the replies."""

    context: FitContext
    settings: SteerConfSettings
    drawn: dict[tuple[str, float, int], list[Generated]] = field(default_factory=dict)
    """The samples of each prompt so far, by temperature and limit of tokens."""

    def ask(self, questions: Sequence[Question], name: str, plan: InterviewPlan) -> Replies:
        """Ask all questions in one way, as often as it says."""
        return self.ask_all(questions, name, [plan])[0]

    def ask_all(self, questions: Sequence[Question], name: str, plans: Sequence[InterviewPlan]) -> list[Replies]:
        """Ask all questions in several ways that differ in their wording alone, side by side: a step reads the weights once."""
        ((temperature, n_samples),) = {(plan.temperature, plan.samples) for plan in plans}
        model, n = self.context.model(), len(questions)
        wrap = model.chat_template if getattr(model.tokenizer, "chat_template", None) else None
        prompts = [verbal_prompt(q, p.prompt, thinking=p.thinking, wrap=wrap) for p in plans for q in questions]
        settings = GenerationSettings(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=temperature,
            n_samples=n_samples,
            seed=self.context.common.seed,
            batch_size=self.settings.batch_size,
        )
        (first, *others) = (f"{plan.prompt}-{'cot' if plan.thinking else 'direct'}" for plan in plans)
        label = f"{name}-{f'{1 + len(others)}-wordings' if others else first}-{temperature}"
        answers = self.write(prompts, label, settings)
        options = [option_texts(q) for q in questions] * len(plans)
        samples = [
            [read_answer(text.text, o, finished=text.finished) for text in texts]
            for o, texts in zip(options, answers, strict=True)
        ]
        asked = Asked(prompts, options, answers, samples, label)
        again = self.ask_again(asked, settings) if self.settings.ask_again else []
        found = []
        for start in range(0, len(prompts), n):
            cut = sum(not text.finished for texts in answers[start : start + n] for text in texts)
            found.append(Replies(samples[start : start + n], cut, sum(start <= i < start + n for i in again)))
        return found

    def ask_again(self, asked: Asked, settings: GenerationSettings) -> list[int]:
        """Ask for the answers of samples that were cut and cannot be read, put them in their places; return their prompts."""
        places = [
            (i, j)
            for i, texts in enumerate(asked.answers)
            for j, text in enumerate(texts)
            if not text.finished and asked.samples[i][j] is None
        ]
        if not places:
            return []
        prompts = [f"{asked.prompts[i]}{asked.answers[i][j].text.rstrip()}\n{ANSWER_LINE}" for i, j in places]
        once = replace(settings, n_samples=1, max_new_tokens=ANSWER_TOKENS)
        ended = self.write(prompts, f"{asked.label}-again", once)
        for (i, j), (more,) in zip(places, ended, strict=True):
            # the cut text was not readable: only what was written now is read, so that half a number stays unread
            asked.samples[i][j] = read_answer(f"{ANSWER_LINE}{more.text}", asked.options[i], finished=more.finished)
        return [i for i, _ in places]

    def write(self, prompts: Sequence[str], name: str, settings: GenerationSettings) -> list[list[Generated]]:
        """Return the samples of prompts; those that this interview has drawn before are not written again."""
        keys = [(prompt, settings.temperature, settings.max_new_tokens) for prompt in prompts]
        samples = [self.drawn.get(key, []) for key in keys]
        if lacking := [i for i, drawn in enumerate(samples) if len(drawn) < settings.n_samples]:
            first = min(len(samples[i]) for i in lacking)
            rest = replace(settings, first_sample=first, n_samples=settings.n_samples - first)
            written = load_or_generate(self.context, [prompts[i] for i in lacking], name, settings=rest)
            for i, more in zip(lacking, written, strict=True):
                samples[i] = self.drawn[keys[i]] = [*samples[i][:first], *more]
        return [drawn[: settings.n_samples] for drawn in samples]


ANSWER_TOKENS = 24
"""Tokens of an answer that is asked for once more: a letter or an option, and a number."""


@dataclass(frozen=True)
class Asked:
    """What was asked, and what came of it."""

    prompts: Sequence[str]
    options: Sequence[Sequence[str]]
    """The texts of the options that each prompt asks about."""
    answers: Sequence[Sequence[Generated]]
    samples: list[list[StatedAnswer | None]]
    label: str


def choose_interview(interview: Interview, questions: Sequence[Question], judge: Callable[..., float]) -> InterviewPlan:
    """Choose prompt and thinking first, then temperature, number of samples and aggregation; or all at once if crossed.

    `judge` gives the cost of probabilities of these questions. Of equals the first in the order of the settings wins; a value
    that is named twice is tried once. What has no cost, such as AUROC where all answers are wrong, comes last.
    """
    settings = interview.settings
    prompts, thinking, temperatures, samples, names = (
        tuple(dict.fromkeys(getattr(settings, name)))
        for name in ("prompts", "thinking", "temperatures", "samples", "aggregations")
    )
    sizes = [len(q.options) for q in questions]
    trace: list[dict[str, Any]] = []

    def best(plans: Sequence[InterviewPlan], aggregations: Sequence[str], counts: Sequence[int]) -> InterviewPlan:
        judged = []
        for plan, replies in ask_each(interview, questions, plans):
            for n, aggregation in product(counts, aggregations):
                aggregated = replace(plan, samples=n, aggregation=aggregation)
                cost = judge(replies.probs(sizes, n, aggregation))
                shown = None if np.isnan(cost) else cost
                trace.append({**asdict(aggregated), settings.criterion: shown, **replies.failures(n)})
                # the even distribution is well calibrated: a plan whose replies cannot be read must not win for that
                unread = replies.failures(n)["questions without any readable sample"] > MOSTLY
                judged.append(((unread, shown is None, cost), aggregated))
        if all(undefined for (_, undefined, _), _ in judged):
            raise CoralError(
                f"{settings.criterion} does not exist on the {len(questions)} validation questions of SteerConf, because all are "
                "answered right or all wrong, however they are asked; choose by brier or ece, or give more questions."
            )
        return min(judged, key=lambda pair: pair[0])[1]

    wordings, most = list(product(prompts, thinking)), max(samples)
    if settings.crossed:
        plans = [InterviewPlan(p, t, temp, most, "") for temp, (p, t) in product(temperatures, wordings)]
    else:
        screened = [InterviewPlan(p, t, temperatures[0], settings.screening, "") for p, t in wordings]
        first = best(screened, names[:1], [settings.screening])
        plans = [replace(first, temperature=temp, samples=most) for temp in temperatures]
    chosen = best(plans, names, samples)
    write_json(interview.context.folder / "choice.json", {"chosen": asdict(chosen), "tried": trace})
    return chosen


def ask_each(
    interview: Interview, questions: Sequence[Question], plans: Sequence[InterviewPlan]
) -> Iterator[tuple[InterviewPlan, Replies]]:
    """Yield each plan with the replies to validation questions; plans that differ in their wording alone are asked together."""
    for _, alike in groupby(plans, key=lambda plan: (plan.temperature, plan.samples)):
        together = list(alike)
        yield from zip(together, interview.ask_all(questions, "validation", together), strict=True)


def fit_steerconf(context: FitContext, settings: SteerConfSettings) -> Predict:
    """Choose how to ask on validation questions; nothing else is fitted."""
    interview = Interview(context, settings)
    train = context.train.prompted()
    questions = [train[i] for i in context.validation(settings.questions)]
    chosen = choose_interview(interview, questions, judge_of(questions, settings.criterion))
    context.note("chosen", asdict(chosen))

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        questions = test.prompted()
        # an interview of its own: what tests have drawn is not kept in memory for the others
        replies = Interview(context, settings).ask(questions, file_name(test.name), chosen)
        context.note(test.name, replies.failures(chosen.samples))
        probs = replies.probs([len(q.options) for q in questions], chosen.samples, chosen.aggregation)
        return {"": predictions_of("steerconf", test.states, probs)}

    return predict


def judge_of(questions: Sequence[Question], criterion: str) -> Callable[[Float[np.ndarray, " row"]], float]:
    """Return a function that says how bad probabilities of the questions are."""
    edges = Options.of_sizes([len(q.options) for q in questions]).edges
    answers = np.array([q.answer for q in questions], dtype=np.int64)
    sign = -1.0 if METRICS[criterion].higher_is_better else 1.0

    def judge(probs: Float[np.ndarray, " row"]) -> float:
        ids = tuple(q.id for q in questions)
        return sign * score(Predictions("candidate", "", "validation", "", ids, answers, edges, probs), criterion)

    return judge


STEERCONF = Method(options_of(SteerConfSettings), fit_steerconf, from_scores=False)
