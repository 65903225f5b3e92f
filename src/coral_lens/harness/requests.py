"""What lm-eval's requests tell of questions: which of them belong together, which are options, and what the options say.

Only strings and numbers: nothing here is tokenised or scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from coral_lens.errors import CoralError

Pair = tuple[str, str]
"""A context and a continuation, as lm-eval sends them."""


@dataclass(slots=True)
class Document:
    """The requests of one document of a task, in the task's order."""

    task: str
    number: int | None
    """Its number in the task; None where requests do not say which document they are of."""
    places: dict[tuple[int, Pair], list[int]] = field(default_factory=dict)
    """Number within the document and text of each request, and where it stands in the list: twice where it is repeated."""

    @property
    def name(self) -> str:
        return f"{self.task}/{self.number}" if self.number is not None else "a request"

    @property
    def pairs(self) -> list[Pair]:
        return [pair for _, pair in sorted(self.places)]

    @property
    def answers_to(self) -> list[list[int]]:
        """Where the answer to each of `pairs` goes."""
        return [self.places[key] for key in sorted(self.places)]


def documents_of(requests: Iterable[Any]) -> list[Document]:
    """Group lm-eval's requests by task and document, whatever their order.

    Not by context: two documents may share one, and the options of a document need not. Requests that do not name their
    document are grouped by context, which is enough to score them.
    """
    documents: dict[tuple[Any, ...], Document] = {}
    for place, request in enumerate(requests):
        context, continuation = request.args[:2]
        task, number = request.task_name or "", request.doc_id
        key = (task, number) if number is not None else (task, None, context)
        document = documents.setdefault(key, Document(task, number))
        at = request.idx if number is not None else 0
        document.places.setdefault((at, (context, continuation)), []).append(place)
    return list(documents.values())


def refuse_without_options(document: Document) -> None:
    """Refuse requests that are not the options of one question: a correction depends on all of them."""
    if document.number is None:
        raise CoralError(
            "With a lens, requests must name their task and document, or the options of a question cannot be told; "
            "make them with lm-eval's tasks, or leave the lens out."
        )
    if len(document.places) == 1:
        raise CoralError(
            f"Task {document.task!r} asks one continuation per document; a lens corrects multiple-choice tasks only: leave "
            "the task or the lens out."
        )
    indices = [at for at, _ in sorted(document.places)]
    if indices != list(range(len(indices))):
        raise CoralError(
            f"The requests numbered {indices} do not make up document {document.number} of task {document.task!r}; with a "
            "lens, all options of a document must be asked at once, and each once."
        )


def n_options(pairs: Sequence[Pair]) -> int:
    """Return how many of a document's requests are its options.

    `acc_mutual_info` adds one request without a context for each option, after all of them; what it asks is no option.
    """
    half, odd = divmod(len(pairs), 2)
    options, others = pairs[:half], pairs[half:]
    bare = half > 1 and not odd and not any(context for context, _ in others)
    same = [o for _, o in options] == [o for _, o in others]
    return half if bare and (same or all(context for context, _ in options)) else len(pairs)


def options_and_others(pairs: Sequence[Pair]) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Return the requests of a document that are its options, and those of `acc_mutual_info`."""
    n = n_options(pairs)
    return tuple(pairs[:n]), tuple(pairs[n:])


def choices_of(continuations: Sequence[str]) -> tuple[str, ...]:
    """Return the options without their delimiter: the white space that all of them begin with.

    Trap: where a task's delimiter is empty and all its choices begin with a space of their own, lm-eval counts that space
    as a character of the choice, and this does not; a request does not tell the two apart.
    """
    columns = zip(*continuations, strict=False)
    delimiter = len(list(takewhile(lambda letters: letters[0].isspace() and len(set(letters)) == 1, columns)))
    return tuple(continuation[delimiter:] for continuation in continuations)


def in_contexts(pairs: Sequence[Pair]) -> bool:
    """Whether the options stand in the contexts (Winogrande), all followed by the same continuation."""
    contexts, continuations = ({pair[i] for pair in pairs} for i in (0, 1))
    return len(contexts) > 1 and len(continuations) == 1
