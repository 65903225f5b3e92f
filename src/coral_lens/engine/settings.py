"""Which tokens are read and how answers are written, as settings. Light: classes of settings elsewhere name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from coral_lens.errors import CoralError
from coral_lens.storage.settings import LATER, Count, OneOf, Option, Range, Seed, Settings, parse_names

TokenPlace = Literal["answer", "context", "all"]
"""The tokens of options, those before them, or both."""
StatePlace = Literal["answer", "listed", "context"]
"""Where the states of an option are read: the mean over its own tokens, which are scored; the mean over its text where that
stands listed in the prompt (an option that is not listed is read at its own tokens); the last token before it."""
STATE_PLACES: tuple[StatePlace, ...] = get_args(StatePlace)


def parse_places(text: str, option: str) -> tuple[str, ...]:
    """Return the places of `answer,listed`, in the order in which they are kept."""
    named = parse_names(text, option)
    return tuple(place for place in STATE_PLACES if place in named) + tuple(n for n in named if n not in STATE_PLACES)


StatePlaces = Annotated[tuple[Annotated[StatePlace, OneOf(lambda: STATE_PLACES)], ...], Option(read=parse_places)]


@dataclass(frozen=True)
class GenerationSettings(Settings):
    """How answers are written."""

    max_new_tokens: Count = 128
    """An answer that has not ended by then is cut, and marked as not finished."""
    temperature: Annotated[float, Range(0)] = 0.0
    """0 takes the most probable token each time."""
    n_samples: Count = 1
    """Answers per prompt. The first k of n samples are the k samples of a smaller run."""
    seed: Seed = 0
    """Seed of the samples."""
    batch_size: Count = 64
    """Answers that are written at a time, samples included; fewer where their keys and values would need too much memory."""
    first_sample: Annotated[int, Range(0), LATER] = 0
    """Number of the first of these samples: those before it are not written again where they are there already."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0 and self.n_samples > 1:
            raise CoralError("At temperature 0 all samples are alike; set n_samples to 1 or raise the temperature.")


CANDIDATES_AT_A_TIME = 512
"""Candidates end at different lengths, and the last ones of a batch cost a pass over all weights at each step: of many at a time,
each bears less of that. Keys and values are few, as answers are short."""
MOST_EXAMPLES = 4
"""Worked examples that there are of open questions."""


@dataclass(frozen=True)
class Sampling(Settings):
    """How the model writes candidates for an open question."""

    candidates: Annotated[int, Range(1, 64)] = 8
    """Answers that the model writes to each open question; equal ones are one candidate."""
    temperature: Annotated[float, Range(above=0, most=5)] = 0.7
    """The temperature at which these answers are drawn."""
    max_tokens: Annotated[int, Range(1, 1024)] = 32
    """Tokens that such an answer may have; one that has not ended by then is no candidate."""
    examples: Annotated[int, Range(0, MOST_EXAMPLES)] = MOST_EXAMPLES
    """Worked examples before each open question, which show that an answer is a few words."""
    seed: Seed = 0
    """Seed of the split into training and validation questions, of networks, and of what the model writes."""

    def generation(self) -> GenerationSettings:
        """Return how answers are written."""
        return GenerationSettings(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            n_samples=self.candidates,
            seed=self.seed,
            batch_size=CANDIDATES_AT_A_TIME,
        )
