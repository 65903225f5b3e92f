"""How candidates that the model wrote are weighed before their states are looked at: the base probabilities of an open question.

    score of a candidate = bias + token * mean log-probability + sum * log-probability + share * log share + spread * entropy
    score of `none of these` = 0

The softmax of these scores is what an open lens starts from, as other lenses start from the model's probabilities. Five numbers,
fitted by cross-entropy on the training questions: how often a candidate was written speaks for it, and so does what the model
says of its tokens; many different candidates speak against all of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Float

from coral_lens.lens.rules import uniform_probs
from coral_lens.ragged import Options
from coral_lens.records import OptionTable

DECAY = 1e-3
"""Weight decay of the fit: next to nothing, but numbers stay finite where all candidates are right."""


@dataclass(frozen=True)
class Weighing:
    """The weight of each fact about a candidate."""

    bias: float
    """Of every candidate against none of them."""
    token: float
    """Of the mean log-probability of its tokens."""
    sum: float
    """Of its log-probability."""
    share: float
    """Of the logarithm of its share among what was written."""
    spread: float
    """Of the entropy of the shares of all candidates of the question."""

    def __call__(self, table: OptionTable) -> Float[np.ndarray, " row"]:
        """Return the score of each option, whose softmax is its base probability."""
        return candidate_facts(table) @ np.array(list(asdict(self).values()))


def candidate_facts(table: OptionTable) -> Float[np.ndarray, "row fact"]:
    """Return what is known of each candidate in the order of the weights; of `none of these`, the last option, nothing."""
    assert table.counts is not None, "only of options that the model wrote"
    options, is_none = table.options, none_rows(table.options)
    shares = table.counts / options.spread(options.sum(table.counts))
    logs = np.where(is_none, 0.0, np.log(np.maximum(shares, 1e-12)))
    spread = options.spread(merged_entropy(table))
    columns = (np.ones(len(shares)), table.logprobs / table.n_tokens, table.logprobs, logs, spread)
    return np.where(is_none[:, None], 0.0, np.column_stack(columns))


def none_rows(options: Options) -> Bool[np.ndarray, " row"]:
    """Return which rows are `none of these`: the last of each question."""
    marks = np.zeros(options.n_rows, dtype=bool)
    marks[options.edges[1:] - 1] = True
    return marks


def merged_entropy(table: OptionTable) -> Float[np.ndarray, " question"]:
    """Return the entropy of the merged candidates of each question, by how often each was written (in nats)."""
    assert table.counts is not None, "only of options that the model wrote"
    options = table.options
    counts = np.where(none_rows(options), 0, table.counts).astype(np.float64)
    shares = options.normalise(counts)
    return -options.sum(shares * np.log(np.maximum(shares, 1e-12)))


def fit_weighing(table: OptionTable, mask: Bool[np.ndarray, " question"]) -> Weighing:
    """Fit the weights on the marked questions, which have answers: the listwise fit of five facts, without a base."""
    from coral_lens.lens.probes.listwise import fit_listwise_path

    options, rows = table.options.take(mask), table.options.rows(mask)
    facts = candidate_facts(table)[rows]
    scale = np.maximum(facts.std(axis=0), 1e-6)
    targets = None if table.targets is None else table.targets[rows]
    (fitted,) = fit_listwise_path(
        facts / scale, uniform_probs(options), options, table.answers[mask], [DECAY], targets=targets
    )
    return Weighing(*map(float, fitted.probe.weight / scale))  # type: ignore[attr-defined]
