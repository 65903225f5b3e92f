"""SteerConf: ask the model for its answer and its confidence in words, several times and under steering instructions.

Reads what the model writes; no state is read or changed. The answer is chosen by majority, of tied ones the one with the highest
mean confidence; its score is the consistency of the answers, their mean confidence, or the confidence weighted by the
consistency of both (the paper's appendix B.3). How a score becomes a distribution: the answer gets the score, but never less
than an even share, and the other options share the rest evenly. A sample that cannot be read is left out; a question none of
whose samples can be read gets the even distribution. How often that happens is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float

from coral_lens.engine.generation import Generated
from coral_lens.engine.settings import GenerationSettings
from coral_lens.lens.settings import Criterion
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, options_of
from coral_lens.methods.steerconf.answers import Said, read_answer
from coral_lens.methods.steerconf.prompts import STEERING, option_texts, verbal_prompt
from coral_lens.methods.steerconf.texts import written
from coral_lens.metrics.scores import METRICS, score
from coral_lens.ragged import Options
from coral_lens.records import Predictions, Question, predictions_of
from coral_lens.storage.files import file_name, write_json
from coral_lens.storage.settings import Count, Counts, NotEmpty, OneOf, Range, Settings

MARGIN = 1e-6
"""By how much the answer's share exceeds an even one at least, so that it stays the answer."""

MOSTLY = 0.5
"""A way of asking that fails on more of the validation questions than this is taken only if all do."""

# ---------------------------------------------------------------------------------------------------- arithmetic


def majority(said: Sequence[Said]) -> int:
    """Return the most frequent answer; of tied ones the one with the highest mean confidence, then the first option."""
    given = {s.option: [t.confidence for t in said if t.option == s.option] for s in said}
    return min(given, key=lambda option: (-len(given[option]), -float(np.mean(given[option])), option))


def consistency(said: Sequence[Said]) -> float:
    """Return the share of the most frequent answer."""
    best = majority(said)
    return sum(s.option == best for s in said) / len(said)


def mean_confidence(said: Sequence[Said]) -> float:
    """Return the mean confidence of all samples."""
    return float(np.mean([s.confidence for s in said]))


def weighted_confidence(said: Sequence[Said]) -> float:
    """Return mean confidence * (1 - V_ans) * (1 - V_conf): answers and confidences that vary count less."""
    mean = mean_confidence(said)
    if mean == 0:
        return 0.0
    variation = float(np.std([s.confidence for s in said])) / mean
    return mean * consistency(said) * (1.0 - variation / (1.0 + variation))


AGGREGATIONS: dict[str, Callable[[Sequence[Said]], float]] = {
    "weighted": weighted_confidence,
    "consistency": consistency,
    "mean": mean_confidence,
}


def distribution(said: Sequence[Said], n_options: int, aggregation: str) -> Float[np.ndarray, " option"]:
    """Return a distribution over the options: the answer's score, and the rest spread evenly; even where nothing was said."""
    if not said:
        return np.full(n_options, 1.0 / n_options)
    share = min(max(AGGREGATIONS[aggregation](said), 1.0 / n_options + MARGIN), 1.0)
    probs = np.full(n_options, (1.0 - share) / (n_options - 1))
    probs[majority(said)] = share
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
    batch_size: Count = 64
    """Answers that are written at a time."""


@dataclass(frozen=True)
class Choice:
    """One way to ask and to aggregate."""

    prompt: str
    thinking: bool
    temperature: float
    samples: int
    aggregation: str


# ------------------------------------------------------------------------------------------------------- asking


@dataclass(frozen=True)
class Heard:
    """What the model said to questions asked in one way: for each question its samples, None where they cannot be read."""

    samples: list[list[Said | None]]
    cut: int
    """Samples that had not ended at the limit of tokens."""

    def probs(self, sizes: Sequence[int], n: int, aggregation: str) -> Float[np.ndarray, " row"]:
        """Return the distributions from the first n samples of each question."""
        pairs = zip(self.samples, sizes, strict=True)
        return np.concatenate([distribution([s for s in some[:n] if s], k, aggregation) for some, k in pairs])

    def failures(self, n: int) -> dict[str, float]:
        """Return how often the first n samples could not be read."""
        first = [some[:n] for some in self.samples]
        unread = [s is None for some in first for s in some]
        return {
            "samples that could not be read": float(np.mean(unread)),
            "questions without any readable sample": float(np.mean([not any(some) for some in first])),
            "samples cut at the limit": self.cut / max(1, sum(len(some) for some in self.samples)),
        }


@dataclass(frozen=True)
class Interview:
    """Asks questions in one way after another."""

    context: FitContext
    settings: SteerConfSettings

    def hear(self, questions: Sequence[Question], name: str, choice: Choice) -> Heard:
        """Ask all questions in one way, as often as it says."""
        model = self.context.model()
        wrap = model.chat_template if getattr(model.tokenizer, "chat_template", None) else None
        prompts = [verbal_prompt(q, choice.prompt, thinking=choice.thinking, wrap=wrap) for q in questions]
        how = GenerationSettings(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=choice.temperature,
            n_samples=choice.samples,
            seed=self.context.common.seed,
            batch_size=self.settings.batch_size,
        )
        label = f"{name}-{choice.prompt}-{'cot' if choice.thinking else 'direct'}-{choice.temperature}"
        answers: list[list[Generated]] = written(self.context, prompts, label, settings=how)
        read = [
            [read_answer(a.text, option_texts(q)) for a in some] for q, some in zip(questions, answers, strict=True)
        ]
        return Heard(read, sum(not a.finished for some in answers for a in some))


def choose_interview(interview: Interview, questions: Sequence[Question], judge: Callable[..., float]) -> Choice:
    """Choose prompt and thinking first, then temperature, number of samples and aggregation; or all at once if crossed.

    `judge` gives the cost of probabilities of these questions. Of equals the first in the order of the settings wins.
    """
    settings = interview.settings
    sizes = [len(q.options) for q in questions]
    trace: list[dict[str, Any]] = []

    def best(ways: Sequence[Choice], aggregations: Sequence[str], counts: Sequence[int]) -> Choice:
        found = []
        for way in ways:
            heard = interview.hear(questions, "validation", way)
            for n, aggregation in product(counts, aggregations):
                one = replace(way, samples=n, aggregation=aggregation)
                cost = judge(heard.probs(sizes, n, aggregation))
                trace.append({**asdict(one), settings.criterion: cost, **heard.failures(n)})
                # the even distribution is well calibrated: a way that cannot be read must not win for that
                unread = heard.failures(n)["questions without any readable sample"] > MOSTLY
                found.append(((unread, cost), one))
        return min(found, key=lambda pair: pair[0])[1]

    everything = list(product(settings.prompts, settings.thinking))
    most, names = max(settings.samples), list(AGGREGATIONS)
    if settings.crossed:
        asked = [Choice(p, t, temp, most, "") for (p, t), temp in product(everything, settings.temperatures)]
    else:
        screened = [Choice(p, t, settings.temperatures[0], settings.screening, "") for p, t in everything]
        first = best(screened, names[:1], [settings.screening])
        asked = [replace(first, temperature=temp, samples=most) for temp in settings.temperatures]
    chosen = best(asked, names, settings.samples)
    write_json(interview.context.folder / "choice.json", {"chosen": asdict(chosen), "tried": trace})
    return chosen


def fit_steerconf(context: FitContext, settings: SteerConfSettings) -> Predict:
    """Choose how to ask on validation questions; nothing else is fitted."""
    interview = Interview(context, settings)
    numbers, asked = context.validation(settings.questions), context.train.asked()
    questions = [asked[i] for i in numbers]
    chosen = choose_interview(interview, questions, judge_of(questions, settings.criterion))
    context.note("chosen", asdict(chosen))

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        questions = test.asked()
        heard = interview.hear(questions, file_name(test.name), chosen)
        context.note(test.name, heard.failures(chosen.samples))
        probs = heard.probs([len(q.options) for q in questions], chosen.samples, chosen.aggregation)
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
