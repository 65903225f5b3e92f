"""Questions whose answer the lens changed, for better and for worse, and how many there are. Chooses, never formats.

What a page shows unasked must be fit to be shown to anyone: short questions without words of violence, sex, crime, death,
illness, drugs or insult. Whoever wants to see the others finds them in the browser of questions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coral_lens.records import Predictions, Question
from coral_lens.report.runs import Evaluation

LONGEST = 700
"""Characters of a question that are shown. A longer one is cut in the middle: its beginning and what it asks stay."""
PLAIN_TEXT, PLAIN_OPTION = 200, 70
"""Characters of a question, and of an option, that is shown unasked."""
STEMS = (
    "abort|abus|accident|addict|adulter|alcohol|amput|anus|arse|assassin|assault|asshole|attack|beaten|"
    "bitch|bleed|blood|bomb|breast|brutal|burglar|cancer|cheat|cigar|cocaine|condom|corpse|crap|crim|cruel|"
    "dead|death|diarr|disease|divorc|drown|drug|drunk|dying|erotic|execution|explos|fight|flatul|flirt|fuck|"
    "funeral|gambl|genit|genocid|gun|harass|hate|heroin|homicid|hostage|humiliat|hurt|idiot|illness|"
    "injur|insult|jail|kidnap|kill|knife|liquor|lust|marijuana|massacr|menstru|molest|murder|naked|nazi|nude|"
    "obscen|offend|overdos|penis|piss|pills|pistol|poison|poop|porn|pregnan|prison|prostit|punch|racis|rape|rifle|"
    "robber|seduc|semen|sex|shit|shoot|shot|sick|slaughter|slave|slut|smok|sperm|stabb|steal|stole|strangl|"
    "stupid|suicid|surger|terror|theft|thief|tobacco|toilet|tortur|trauma|tumor|ugly|underwear|urin|"
    "vagin|victim|viol|virgin|virus|vomit|weapon|whisk|whore|widow|worship|wound"
)
"""What an unfit word begins with."""
WORDS = (
    "affair|anal|ass|bar|beer|butt|church|cult|damn|devil|die|died|dies|fat|god|grave|hang|hanged|hell|kiss|lover|mosque|"
    "pee|pub|religion|religious|rob|robbed|stab|strip|war|wars|wine"
)
"""Unfit as whole words."""
_UNFIT = re.compile(rf"\b(?:(?:{STEMS})\w*|(?:{WORDS})\b)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ShownOption:
    """An option as it is shown."""

    text: str
    base: float
    steered: float
    correct: bool


@dataclass(frozen=True, slots=True)
class Example:
    """One question whose answer changed."""

    id: str
    task: str
    """The exact name of its test set."""
    text: str
    options: tuple[ShownOption, ...]
    before: int
    """Index of the option that the base model prefers."""
    after: int


@dataclass(frozen=True, slots=True)
class AnswerChanges:
    """What steering did to the answers of one task."""

    name: str
    still_right: int
    still_wrong: int
    """Wrong before and after, with the same or with another answer."""
    n_better: int
    n_worse: int


@dataclass(frozen=True, slots=True)
class _Answers:
    """Which answers of a test set were right, and what the correct option gained."""

    was_right: np.ndarray
    is_right: np.ndarray
    gain: np.ndarray


def answers_of(evaluation: Evaluation, *, before: str, after: str) -> _Answers | None:
    """Compare two methods question by question; None where the run lacks one of them."""
    if before not in evaluation.predictions or after not in evaluation.predictions:
        return None
    base, steered = evaluation.predictions[before], evaluation.predictions[after]
    was, now = (p.options.top(p.probs) for p in (base, steered))
    rows = base.options.row(base.answers)
    return _Answers(was == base.answers, now == base.answers, steered.probs[rows] - base.probs[rows])


def answer_changes(evaluation: Evaluation, *, before: str, after: str) -> AnswerChanges | None:
    """Count the answers that changed; None where the run lacks one of the methods."""
    answers = answers_of(evaluation, before=before, after=after)
    if answers is None:
        return None
    was, now = answers.was_right, answers.is_right
    counts = (int(both.sum()) for both in (was & now, ~was & ~now, ~was & now, was & ~now))
    return AnswerChanges(evaluation.name, *counts)


def choose_examples(
    evaluations: Sequence[Evaluation], *, before: str, after: str
) -> tuple[Example | None, Example | None]:
    """Return one question that became right and one that became wrong: of the plain ones, where most changed."""
    best: list[tuple[float, Evaluation, int] | None] = [None, None]
    for evaluation in evaluations:
        answers = answers_of(evaluation, before=before, after=after)
        if answers is None:
            continue
        plain = np.array([is_plain(q) for q in evaluation.questions])
        for k, changed in enumerate((~answers.was_right & answers.is_right, answers.was_right & ~answers.is_right)):
            for i in np.flatnonzero(changed & plain):
                size, known = abs(float(answers.gain[i])), best[k]
                if known is None or size > known[0]:
                    best[k] = (size, evaluation, int(i))
    better, worse = (b and example_of(b[1], b[2], (before, after)) for b in best)
    return better, worse


def is_plain(question: Question) -> bool:
    """Whether a question may be shown unasked: short, and without a word of the lists above."""
    text = shortened(question.text)
    if len(text) > PLAIN_TEXT or max(map(len, question.options)) > PLAIN_OPTION:
        return False
    return not any(_UNFIT.search(part) for part in (text, *question.options))


def example_of(evaluation: Evaluation, i: int, methods: tuple[str, str]) -> Example:
    """Return question i as it is shown."""
    question = evaluation.questions[i]
    pair: tuple[Predictions, ...] = tuple(evaluation.predictions[m] for m in methods)
    base, steered = (p.probs[p.options.of(i)] for p in pair)
    options = tuple(
        ShownOption(text, float(base[j]), float(steered[j]), j == question.answer)
        for j, text in enumerate(question.options)
    )
    text = shortened(question.text)
    return Example(question.id, evaluation.name, text, options, int(base.argmax()), int(steered.argmax()))


def shortened(text: str, *, limit: int = LONGEST) -> str:
    """Return the question without the words that frame it in a prompt, cut in the middle where it is long."""
    text = text.strip()
    for opening, ending in (("Question:", "Answer:"), ("Q:", "A:")):
        text = text.removeprefix(opening).removesuffix(ending).strip()
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3].rstrip()} […] {text[-2 * limit // 3 :].lstrip()}"
