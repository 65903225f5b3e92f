"""Say how long scoring will take and how much it will keep, from a few seconds of the work itself on this machine.

What an earlier run left in the folders is not counted again. Nothing is written.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coral_lens.engine.packing import tree_size
from coral_lens.engine.planned import Extraction, PlannedQuestions, plan_questions
from coral_lens.engine.scoring import score
from coral_lens.engine.trees import build_tree
from coral_lens.records import Prompt, Question
from coral_lens.storage.shards import Journal

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

SAMPLE_TOKENS = 6000
"""Tokens of the questions that are timed at most: three batches of the usual size."""
SAMPLE_SECONDS = 4.0
"""No batch is begun after so long."""
WARM_UP = 256
"""Tokens that are scored before the clock starts: the first pass of a process is slow."""


@dataclass(frozen=True)
class Forecast:
    """What is still to be scored, and how long that takes here."""

    n_questions: int
    """Of all sets."""
    n_kept: int
    """Of these, scored by an earlier run."""
    tokens: int
    """That are still to be run through the model."""
    speed: float
    """Tokens a second, as just measured; 0 where nothing is left to do."""
    new_bytes: int
    """That will be written."""

    @property
    def seconds(self) -> float:
        """How long the scoring takes."""
        return self.tokens / self.speed if self.tokens else 0.0


def forecast(model: Model, sets: Mapping[Path, Sequence[Question]], extraction: Extraction) -> Forecast:
    """Measure how fast this machine scores these questions, each set of which will be kept in its folder."""
    n_kept, n_rows, left = 0, 0, list[Prompt]()
    for folder, questions in sets.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever scores them says what is left out and cut
            planned = plan_questions(model, questions, extraction, folder=folder)
        known = kept_questions(folder)
        n_kept += len(known)
        rest = [prompt for i, prompt in enumerate(planned.prepared.prompts) if i not in known]
        n_rows += sum(len(prompt.options) for prompt in rest)
        left += rest
    n_questions = sum(len(questions) for questions in sets.values())
    if not left:
        return Forecast(n_questions, n_kept, tokens=0, speed=0.0, new_bytes=0)
    sizes = [tree_size(build_tree(prompt), planned.packing) for prompt in left]
    new_bytes = n_rows * extraction.row_bytes(model.width)
    return Forecast(n_questions, n_kept, sum(sizes), measure_speed(planned, left, sizes), new_bytes)


def kept_questions(folder: Path) -> set[int]:
    """Return the numbers of the questions whose scores and states are in a folder already."""
    journal = Journal(folder)
    names = [
        (shard, name) for shard, tensors in journal.entries.items() for name in {"question", "broken"} & set(tensors)
    ]
    return {int(q) for shard, name in names for q in journal.tensors(shard, name)[name]}


def measure_speed(planned: PlannedQuestions, prompts: Sequence[Prompt], sizes: Sequence[int]) -> float:
    """Return tokens a second, from prompts that are spread over all of them."""
    time_tokens(planned, spread(prompts, sizes, WARM_UP))
    tokens, seconds = time_tokens(planned, spread(prompts, sizes, SAMPLE_TOKENS))
    return tokens / seconds


def spread(prompts: Sequence[Prompt], sizes: Sequence[int], tokens: int) -> list[Prompt]:
    """Return every n-th prompt, so that they have about this many tokens together."""
    return list(prompts[:: max(1, round(sum(sizes) / tokens))])


def time_tokens(planned: PlannedQuestions, prompts: Sequence[Prompt]) -> tuple[int, float]:
    """Score prompts for a while, and return how many tokens were done in how many seconds."""
    plan, readers = planned.plan(prompts), planned.extraction.readers
    tokens, start = 0, time.perf_counter()
    for scored in score(planned.model, prompts, plan, readers=readers, on_broken=lambda _: None):
        tokens += sum(tree_size(build_tree(prompts[q]), plan.packing) for q in scored.batch.questions)
        if time.perf_counter() - start > SAMPLE_SECONDS:
            break
    return tokens, time.perf_counter() - start
