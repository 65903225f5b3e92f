"""Which tokens are read and how answers are written, as settings. Light: classes of settings elsewhere name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from coral_lens.errors import CoralError
from coral_lens.storage.settings import Count, Range, Seed, Settings

TokenPlace = Literal["answer", "context", "all"]
"""The tokens of options, those before them, or both."""


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0 and self.n_samples > 1:
            raise CoralError("At temperature 0 all samples are alike; set n_samples to 1 or raise the temperature.")
