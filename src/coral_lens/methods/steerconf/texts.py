"""What the model writes for SteerConf, kept in the method's folder: a killed study goes on where it was."""

from __future__ import annotations

from collections.abc import Sequence

from coral_lens.engine.generation import Generated
from coral_lens.engine.settings import GenerationSettings
from coral_lens.engine.texts import kept_answers
from coral_lens.methods.interface import FitContext


def load_or_generate(
    context: FitContext, prompts: Sequence[str], name: str, *, settings: GenerationSettings
) -> list[list[Generated]]:
    """Return the model's answers to prompts: from the disk as far as they were written before, the others generated now."""
    place = context.folder / "texts" / name
    with context.bar(name, len(prompts), "questions") as advance:
        return kept_answers(context.model(), prompts, place, settings=settings, progress=advance)
