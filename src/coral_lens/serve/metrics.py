"""What a server tells Prometheus: its load, and of each lens what can be watched without labels, such as shift and confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coral_lens.lens.answers import Answer
from coral_lens.lens.open_answers import OpenAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    from coral_lens.serve.queue import Refusal

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TENTHS = tuple(round(0.1 * i, 1) for i in range(1, 11))
SHIFTS = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5, 10)
"""1 is typical of the training questions; 1.5 and beyond is far."""


class ServeMetrics:
    """Counters and histograms of one server, in a registry of its own."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "coral_requests", "Requests, by route and status.", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "coral_request_seconds", "Time to an answer.", ["route"], buckets=SECONDS, registry=registry
        )
        Gauge("coral_queue_questions", "Questions that wait.", registry=registry).set_function(waiting)
        self._batch_tokens = Histogram("coral_batch_tokens", "Tokens of a batch.", buckets=TOKENS, registry=registry)
        self._batch_questions = Histogram(
            "coral_batch_questions", "Questions of a batch.", buckets=COUNTS, registry=registry
        )
        self._batch_seconds = Histogram("coral_batch_seconds", "Time of a batch.", buckets=SECONDS, registry=registry)
        self._cached_tokens = Counter(
            "coral_cached_tokens", "Tokens that an earlier request had computed.", registry=registry
        )
        self._cache_bytes = Gauge("coral_cache_bytes", "Size of the texts that are kept.", registry=registry)
        self._failures = Counter("coral_failures", "Requests that ended in an error of the server.", registry=registry)
        self._dropped = Counter("coral_dropped", "Requests that nobody waited for any more.", registry=registry)
        self._answers = Counter("coral_answers", "Answers.", ["lens"], registry=registry)
        self._refusals = Counter("coral_refusals", "Questions that were not answered.", ["lens"], registry=registry)
        self._changed = Counter(
            "coral_changed",
            "Answers in which the lens prefers another option than the model.",
            ["lens"],
            registry=registry,
        )
        self._abstained = Counter(
            "coral_abstained", "Answers too uncertain for the stated risk.", ["lens"], registry=registry
        )
        self._confidence = Histogram(
            "coral_confidence", "Probability of the chosen option.", ["lens"], buckets=TENTHS, registry=registry
        )
        self._shift = Histogram(
            "coral_shift",
            "Distance from the training questions: 1 is typical.",
            ["lens"],
            buckets=SHIFTS,
            registry=registry,
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request and its time."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def batch(self, *, n_questions: int, n_tokens: int, seconds: float) -> None:
        """Count a batch."""
        self._batch_questions.observe(n_questions)
        self._batch_tokens.observe(n_tokens)
        self._batch_seconds.observe(seconds)

    def cached(self, *, n_tokens: int, n_bytes: int) -> None:
        """Count tokens that were known, and note the size of what is kept."""
        self._cached_tokens.inc(n_tokens)
        self._cache_bytes.set(n_bytes)

    def failure(self) -> None:
        """Count an error of ours."""
        self._failures.inc()

    def dropped(self) -> None:
        """Count a request that was given up."""
        self._dropped.inc()

    def outcome(self, lens: str, outcome: Answer | OpenAnswer | Refusal) -> None:
        """Count what became of a question."""
        if not isinstance(outcome, Answer | OpenAnswer):
            self._refusals.labels(lens).inc()
            return
        self._answers.labels(lens).inc()
        self._confidence.labels(lens).observe(outcome.confidence)
        self._shift.labels(lens).observe(outcome.shift)
        if is_changed(outcome):
            self._changed.labels(lens).inc()
        if outcome.abstain:
            self._abstained.labels(lens).inc()

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


def is_changed(answer: Answer | OpenAnswer) -> bool:
    """Whether a lens prefers another option than the model, or another answer than the one that the model wrote most often."""
    if isinstance(answer, OpenAnswer):
        return answer.answer != answer.candidates[0]
    base = answer.base_probs  # empty where the lens exits before the model has said anything
    return bool(base) and base.index(max(base)) != answer.answer
