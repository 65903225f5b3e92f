"""Remedies of letter bias: contextual calibration, batch calibration, PriDe, and averaging over cyclic orders.

A model may prefer a letter whatever stands behind it. A lens that merely undoes this must not be credited with knowing
answers, so its table should have these rows. All of them divide a preference for letters out of the probabilities or average
it away, and none of them looks at an answer.

They need questions whose options are listed in the prompt under letters, which are what is scored. The first part of this
file asks such questions again, in another order or without content; worked examples before the question stay as they are.
"""

from __future__ import annotations

import string
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from coral_lens.data.settings import Style
from coral_lens.errors import CoralError
from coral_lens.lens.rules import base_probs
from coral_lens.methods.interface import FitContext, Method, Predict, QuestionSet, no_options, options_of
from coral_lens.ragged import Options
from coral_lens.records import UNKNOWN, Predictions, Question, Scored, Wording, predictions_of
from coral_lens.storage.settings import Count, Settings

CONTENT_FREE = "N/A"


def listed_wording(question: Question) -> Wording | None:
    """Return the wording of a task's question, or None where its options are not listed under the letters that are scored."""
    rendered = question.rendered
    if rendered is None:  # a style lists the options of the user's own questions
        return None
    letters = string.ascii_uppercase[: len(question.options)]
    scored = [c.strip() for c in rendered.continuations]
    if scored != list(letters) or len(set(rendered.contexts)) > 1 or question.text not in rendered.contexts[0]:
        return None
    return question.wording if question.wording.listed else None


def is_listed(question: Question, style: Style) -> bool:
    """Whether the options of a question are listed under letters, and letters are scored."""
    return listed_wording(question) is not None if question.rendered else style.kind == "letters"


def refuse_texts(questions: Sequence[Question], style: Style, _: Any) -> None:
    """Refuse questions whose option texts are scored: there is no preference for a letter in them."""
    for question in questions:
        if not is_listed(question, style):
            raise CoralError(
                f"Remedies of letter bias need options that are listed in the prompt and scored by letter, but question "
                f"{question.id!r} of {question.task} is not asked so; leave the method out, or use a task such as "
                "commonsense_qa or mmlu, or your own questions in the style letters."
            )


def reordered(question: Question, shift: int) -> Question:
    """Return the question with its options moved up by `shift` places: the one that was number j comes to j - shift."""
    n = len(question.options)
    order = [(j + shift) % n for j in range(n)]
    known = question.answer != UNKNOWN and not question.is_soft  # a soft answer names its likeliest option itself
    renamed = replace(
        question,
        id=f"{question.id} shifted by {shift}",
        answer=order.index(question.answer) if known else UNKNOWN,
        right=tuple(sorted(map(order.index, question.right))),
        soft=tuple(question.soft[i] for i in order) if question.soft else (),
        descriptions=tuple(question.descriptions[i] for i in order) if question.descriptions else (),
    )
    wording = listed_wording(question)
    if wording is None:
        return replace(renamed, options=tuple(question.options[i] for i in order))
    return rewritten(renamed, replace(wording, listed=tuple(wording.listed[i] for i in order)))


def without_content(question: Question) -> Question:
    """Return the question with N/A in place of its text, of every option and of what each means; instructions stay."""
    wording = listed_wording(question)
    if wording is None:
        nothing = (CONTENT_FREE,) * len(question.options)
        passage = CONTENT_FREE if question.passage else ""
        meant = tuple(CONTENT_FREE if one else "" for one in question.descriptions)
        return replace(question, text=CONTENT_FREE, options=nothing, descriptions=meant, passage=passage)
    nothing = (CONTENT_FREE,) * len(wording.listed)
    return rewritten(question, replace(wording, stem=CONTENT_FREE, listed=nothing))


def rewritten(question: Question, wording: Wording) -> Question:
    """Return a task's question with another wording, in its prompt too."""
    assert question.rendered is not None
    # the last occurrence: a worked example may hold the same words
    before, _, after = question.rendered.contexts[0].rpartition(question.text)
    contexts = (before + wording.text + after,) * len(question.options)
    return replace(question, text=wording.text, rendered=replace(question.rendered, contexts=contexts))


# ---------------------------------------------------------------------------------------- preferences for letters

SMALLEST = 1e-12
Priors = dict[int, np.ndarray]
"""The preference for each letter, by number of options."""
Ragged = Sequence[np.ndarray]
"""For each question the probabilities of its options."""


def per_question(scored: Scored, base: str) -> list[np.ndarray]:
    """Return the base probabilities of each question."""
    return np.split(base_probs(scored.table, base), scored.table.options.starts[1:])


def divide_out(probs: Ragged, priors: Ragged) -> Float[np.ndarray, " row"]:
    """Return probabilities divided by the preference for their letters, renormalised."""
    quotients = [p / np.maximum(prior, SMALLEST) for p, prior in zip(probs, priors, strict=True)]
    return np.concatenate([q / q.sum() for q in quotients])


def prior_for(priors: Priors, n: int) -> Float[np.ndarray, " letter"]:
    """Return the preference among n letters; where it was measured only among more, among the first n of the fewest."""
    size = min((k for k in priors if k >= n), default=None)
    if size is None:
        raise CoralError(
            f"A test question has {n} options, but no validation question has more than {max(priors)}, so the preference "
            "for its letters is not known; train on questions with as many options."
        )
    return priors[size][:n] / priors[size][:n].sum()


# --------------------------------------------------------------------------------------------------- contextual


def prompt_key(question: Question) -> Hashable:
    """Return what tells the prompts of questions without content apart."""
    if question.rendered:
        return question.rendered.contexts[0]
    shown = tuple((s.passage, s.text, s.options, s.answer) for s in question.shots)
    return question.passage, question.instructions, question.descriptions, len(question.options), shown


def fit_contextual(context: FitContext, _: None) -> Predict:
    """Divide by what the model says of a prompt without content (Zhao et al. 2021), with the same worked examples."""

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        empty = [without_content(q) for q in test.prompted()]
        keys = [prompt_key(q) for q in empty]
        distinct = {key: replace(q, id=f"content-free {i}") for i, (key, q) in enumerate(zip(keys, empty, strict=True))}
        scored = context.score(list(distinct.values()), "content-free")
        priors = dict(zip(distinct, per_question(scored, context.common.base), strict=True))
        probs = divide_out(per_question(test.states, context.common.base), [priors[key] for key in keys])
        return {"": predictions_of("contextual-calibration", test.states, probs)}

    return predict


# -------------------------------------------------------------------------------------------------------- batch


def batch_priors(probs: Ragged) -> Priors:
    """Return the mean probability of each letter, by number of options (Zhou et al. 2024)."""
    return {n: np.mean([p for p in probs if len(p) == n], axis=0) for n in sorted({len(p) for p in probs})}


def fit_batch(context: FitContext, _: None) -> Predict:
    """Divide by the mean probabilities of the validation questions."""
    probs = per_question(context.train.states, context.common.base)
    priors = batch_priors([probs[i] for i in context.validation()])
    return predict_divided("batch-calibration", priors, context)


def predict_divided(method: str, priors: Priors, context: FitContext) -> Predict:
    """Return a function that divides the preferences out of a test set."""

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        probs = per_question(test.states, context.common.base)
        quotients = divide_out(probs, [prior_for(priors, len(p)) for p in probs])
        return {"": predictions_of(method, test.states, quotients)}

    return predict


# ------------------------------------------------------------------------------------------------- cyclic orders


def score_orders(context: FitContext, questions: Sequence[Question], probs: Ragged, name: str) -> list[np.ndarray]:
    """Return for each question [shift, letter]: the letters' probabilities under every cyclic order of its options.

    `probs` are those of the order as it is, which is not scored again.
    """
    orders = [(i, shift) for i, q in enumerate(questions) for shift in range(1, len(q.options))]
    scored = context.score([reordered(questions[i], shift) for i, shift in orders], name)
    observed: list[list[np.ndarray]] = [[p] for p in probs]
    for (i, _), p in zip(orders, per_question(scored, context.common.base), strict=True):
        observed[i].append(p)
    return [np.stack(by_shift) for by_shift in observed]


def letter_prior(observed: Float[np.ndarray, "shift letter"]) -> Float[np.ndarray, " letter"]:
    """Return softmax of the mean over orders of log p: PriDe's estimate of the preference for each letter, of one question."""
    logs = np.log(np.maximum(observed, SMALLEST)).mean(axis=0)
    return Options.of_sizes([len(logs)]).softmax(logs)


def mean_over_orders(observed: Float[np.ndarray, "shift letter"]) -> Float[np.ndarray, " option"]:
    """Return each option's mean probability over the orders: under a shift of s, letter j stands for option j + s."""
    n = observed.shape[1]
    return np.mean([np.roll(observed[s], s) for s in range(n)], axis=0)


@dataclass(frozen=True)
class PriDeSettings(Settings):
    """How PriDe is fitted."""

    questions: Count = 100
    """Validation questions, of each number of options, that are asked in every cyclic order."""


def fit_pride(context: FitContext, settings: PriDeSettings) -> Predict:
    """Divide by the preference that cyclic orders of a few validation questions show (Zheng et al. 2024)."""
    probs, questions = per_question(context.train.states, context.common.base), context.train.prompted()
    order = np.random.default_rng(context.common.seed).permutation(context.validation())  # of all sources alike
    priors: Priors = {}
    for n in sorted({len(probs[i]) for i in order}):
        drawn = sorted([i for i in order if len(probs[i]) == n][: settings.questions])
        observed = score_orders(context, [questions[i] for i in drawn], [probs[i] for i in drawn], f"orders-of-{n}")
        priors[n] = np.mean([letter_prior(o) for o in observed], axis=0)
    return predict_divided("pride", priors, context)


def fit_cyclic(context: FitContext, _: None) -> Predict:
    """Ask every test question in every cyclic order of its options, and average what each option gets."""

    def predict(test: QuestionSet) -> dict[str, Predictions]:
        observed = score_orders(context, test.prompted(), per_question(test.states, context.common.base), "orders")
        probs = np.concatenate([mean_over_orders(o) for o in observed])
        return {"": predictions_of("cyclic", test.states, probs)}

    return predict


CONTEXTUAL = Method(no_options, fit_contextual, check=refuse_texts)
BATCH = Method(no_options, fit_batch, check=refuse_texts)
PRIDE = Method(options_of(PriDeSettings), fit_pride, check=refuse_texts)
CYCLIC = Method(no_options, fit_cyclic, check=refuse_texts)
