"""A method as a study names it, before it is known which one it is. Light: reading a study loads nothing heavy."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from coral_lens.storage.settings import MOST_SEED

StudySeed = Annotated[int, Field(ge=0, le=MOST_SEED)]


class StudyPart(BaseModel):
    """A part of a study; a key that is not known is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MethodEntry(StudyPart):
    """A method and its options; which keys it takes beyond these two, the table of methods knows."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    kind: str = Field(min_length=1)
    """Its row in the table of methods: a lens (`mlp`, `ridge`, `listwise`, ...) or another method."""
    name: str = ""
    """How tables call it; by default its kind."""

    @property
    def row(self) -> str:
        return self.name or self.kind

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
