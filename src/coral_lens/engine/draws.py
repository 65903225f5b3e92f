"""Draw the next token of an answer: a race in which each token wins with its probability.

The clock of a token is an exponential random number divided by its probability, and the first to ring wins. The random number is
a function of the answer, the step and the token. So rounding of the logits hardly ever changes who wins, which a draw from their
cumulative sum would let it do. Tokens that are far behind have one clock together: it rings when the first of theirs would have,
and only then they race among themselves. That is the same draw, without a random number for every word of the vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from coral_lens.errors import CoralError

FAR = 16.0
"""Nats behind the most probable token from which tokens share a clock: each has less than 1e-6 of its probability."""


def stream_of(text: str, sample: int, seed: int) -> int:
    """Return what the random numbers of one sample of one prompt begin with; a prompt that occurs twice gets the same ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{sample}\n{text}".encode()).digest()[:8], "big")


@dataclass(frozen=True)
class NextToken:
    """What may come next after a text."""

    scores: Float[np.ndarray, " token"]
    """Logits over temperature."""
    near: Int[np.ndarray, " near"]
    """The tokens that have clocks of their own."""
    others: float
    """The logarithm of the summed exponentials of all others, whose clock is one; -inf where there are none."""

    @staticmethod
    def after(logits: Float[Tensor, " token"], temperature: float) -> NextToken:
        """Return what may come next; at temperature 0 the most probable token alone."""
        scores = logits.numpy().astype(np.float32)
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            raise CoralError("The model's next token has no probability (NaN or inf); load it with --dtype float32.")
        if temperature == 0:
            return NextToken(scores, np.array([best]), -np.inf)
        scores = scores / np.float32(temperature)
        behind = scores - scores[best]
        total = np.exp(behind[behind < -FAR]).sum(dtype=np.float64)
        others = float(np.log(total) + scores[best]) if total > 0 else -np.inf
        return NextToken(scores, np.flatnonzero(behind >= -FAR), others)

    def draw(self, stream: int, step: int) -> int:
        """Return the token that wins this step of an answer."""
        if len(self.near) == 1 and self.others == -np.inf:
            return int(self.near[0])
        lead = self.scores[self.near] - np.log(exponentials(stream, step, self.near))
        winner = int(lead.argmax())
        together = self.others - np.log(exponentials(stream, step, np.array([len(self.scores)])))[0]
        if lead[winner] >= together:
            return int(self.near[winner])
        far = np.setdiff1d(np.arange(len(self.scores)), self.near, assume_unique=True)
        return int(far[(self.scores[far] - np.log(exponentials(stream, step, far))).argmax()])


def exponentials(stream: int, step: int, tokens: Int[np.ndarray, " token"]) -> Float[np.ndarray, " token"]:
    """Return an exponential random number for each token at a step of a stream: the hash splitmix64 of the three."""
    key = (stream + step * 0x9E3779B97F4A7C15) % 2**64
    mixed = mix(mix(np.full(1, key, dtype=np.uint64)) + tokens.astype(np.uint64))
    # 53 bits in the midst of (0, 1): never 0, whose logarithm would be infinite
    return -np.log(((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def mix(numbers: UInt64[np.ndarray, " number"]) -> UInt64[np.ndarray, " number"]:
    """Return whole numbers of 64 bits in which every bit depends on every bit of those given (splitmix64)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
