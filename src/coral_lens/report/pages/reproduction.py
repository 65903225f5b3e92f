"""The page of a reproduction: the paper's tables and figures in its order, ours beside its own, and a sentence to each claim.

It shows what it is given. What is missing is named with its reason, in the place where it would stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coral_lens.report.figures.style import DrawnPicture, Picture
from coral_lens.report.pages.contents import Contents
from coral_lens.report.pages.templates import fill_template, leaves_of
from coral_lens.report.tables.paper import COLUMNS
from coral_lens.report.tables.paper_shape import NOTE, Block

LOOK = {"agrees": "good", "does not agree": "bad", "cannot be told": "even"}


@dataclass(frozen=True, slots=True)
class ClaimLine:
    """A statement of the paper with its number, ours, and what that says."""

    statement: str
    paper: str
    ours: str
    said: str
    """`agrees`, `does not agree` or `cannot be told`."""
    sentence: str
    model: str = ""
    """Where there are several, the one that it is of, or that it is of all."""


@dataclass(frozen=True, slots=True)
class PaperSection:
    """A section of the page."""

    anchor: str
    title: str
    where: str
    """Where in the paper it stands."""
    words: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    table: str = ""
    """What the paper calls the table that the blocks are."""
    pictures: tuple[tuple[Picture | DrawnPicture, str], ...] = ()
    """Each with its title."""
    claims: tuple[ClaimLine, ...] = ()
    missing: tuple[str, ...] = ()
    """What is not there, each with the reason."""
    links: tuple[tuple[str, str], ...] = ()
    """Names and places of the reports behind it."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """All that the page shows."""

    title: str
    headline: tuple[str, ...]
    sections: tuple[PaperSection, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)


def render_reproduction(page: Reproduction) -> str:
    """Return the page."""
    contents = Contents()
    shown = [shown_section(section, contents) for section in page.sections]
    contents.begin("provenance", "Provenance")
    return fill_template(
        "reproduction.html",
        {
            "shown": shown,
            "sections": contents.sections,
            "heads": [f"{column} {'↑' if column == 'Acc' else '↓'}" for column in COLUMNS],
            "shape_note": NOTE,
            "look": LOOK,
        },
        title=page.title,
        headline=page.headline,
        provenance=list(leaves_of(page.provenance)),
    )


def shown_section(section: PaperSection, contents: Contents) -> dict[str, Any]:
    """Number what a section shows."""
    contents.begin(section.anchor, section.title)
    table = contents.table(section.table) if section.blocks else None
    plates = [contents.figure(picture, title) for picture, title in section.pictures]
    return {"section": section, "table": table, "plates": plates}


def tally(claims: Sequence[ClaimLine]) -> dict[str, int]:
    """Return how many claims agree, do not, and cannot be told."""
    return {said: sum(claim.said == said for claim in claims) for said in LOOK}
