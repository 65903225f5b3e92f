"""The lenses that are served, by their names: all of one model, whose layers one pass reads for all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from coral_lens.engine.settings import STATE_PLACES, StatePlace
from coral_lens.errors import CoralError, nearest
from coral_lens.lens.artefact import Lens
from coral_lens.lens.folder import RECORD, load_lens
from coral_lens.lens.publish import SHIPPED, local_folder
from coral_lens.serve.complaints import Complaint
from coral_lens.storage.files import SEAL, read_json

NAME = re.compile(r"[\w.-]+")
FEWEST_DIGITS = 7
"""Of a commit that is named by its first digits."""


@dataclass(frozen=True, eq=False)
class ServedLens:
    """A lens with the name that requests call it by."""

    name: str
    lens: Lens
    digest: str
    """Of its record, which has the digests of its numbers: answers say which lens gave them."""
    saved: datetime
    """When its record was written."""

    @property
    def view_layers(self) -> tuple[int, ...]:
        """The layers of which it can say what each would do."""
        return self.lens.view.layers if self.lens.view else ()


@dataclass(frozen=True)
class ServedLenses:
    """Lenses of one model."""

    by_name: Mapping[str, ServedLens]

    def __iter__(self) -> Iterator[ServedLens]:
        return iter(self.by_name.values())

    def find(self, name: str | None) -> ServedLens:
        """Return the lens of a name; none needs to be said where there is but one."""
        if name is None and len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        if name is None:
            raise Complaint(422, f"lens is missing: {self._said}.", field="lens")
        if name not in self.by_name:
            raise Complaint(404, f"There is no lens of that name: {self._said}.{nearest(name, self.by_name)}")
        return self.by_name[name]

    @property
    def _said(self) -> str:
        return f"served here are {', '.join(self.by_name)}"

    @property
    def for_options(self) -> list[ServedLens]:
        """Those that questions with options share a pass for; open questions are asked for one lens at a time."""
        return [served for served in self if not served.lens.open]

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that one pass reads."""
        return tuple(sorted({layer for served in self.for_options for layer in served.lens.layers}))

    @property
    def places(self) -> tuple[StatePlace, ...]:
        """Where the model is read for all of them."""
        return tuple(p for p in STATE_PLACES if any(p in served.lens.places for served in self.for_options))

    @property
    def exits(self) -> bool:
        """Whether none of them needs more of the model than the deepest of these layers."""
        return bool(self.for_options) and all(served.lens.exits for served in self.for_options)

    def settled(self, settle: Callable[[Lens], Lens]) -> ServedLenses:
        """Return them as they are to be used: on another model, or at home."""
        return ServedLenses({name: replace(s, lens=settle(s.lens)) for name, s in self.by_name.items()})


def open_lenses(sources: Sequence[str]) -> ServedLenses:
    """Read lenses given as `NAME=FOLDER`, `FOLDER` or a hub id; without a name the last part of the source is its name."""
    lenses: dict[str, ServedLens] = {}
    for source in sources:
        name, place = name_and_place(source)
        if name in lenses:
            raise CoralError(f"Two lenses would be called {name!r}; name one of them: --lens NAME={place}")
        lenses[name] = open_lens(name, place)
    models = {name: served.lens.model["weights"] for name, served in lenses.items()}
    others = [name for name in models if models[name] != next(iter(models.values()))]
    if others:
        first = next(iter(models))
        raise CoralError(
            f"The lenses {first!r} and {others[0]!r} were fitted on different models; start a server for each model."
        )
    return ServedLenses(lenses)


def name_and_place(source: str) -> tuple[str, str]:
    """Return the name and the place of a lens that is given as `NAME=FOLDER` or `FOLDER`."""
    name, equals, place = source.partition("=")
    if not equals or Path(source).exists():
        name, place = Path(os.path.abspath(source.split("@")[0])).name, source
    if not NAME.fullmatch(name) or not place:
        raise CoralError(
            f"--lens {source} names no lens: write NAME=FOLDER, with letters, digits, dots, dashes and underscores in NAME."
        )
    return name, place


def open_lens(name: str, place: str) -> ServedLens:
    """Read a lens from a folder, or from the hub, where a commit says which."""
    folder = local_folder(place)
    if folder != Path(place) and place not in SHIPPED:
        repo, _, revision = place.partition("@")
        # a download is kept under its commit; a branch such as main, or a tag, may be another one tomorrow
        if len(revision) < FEWEST_DIGITS or not folder.name.startswith(revision):
            what = f"{revision!r} is a branch or a tag of the hub" if revision else "is a lens of the hub"
            raise CoralError(f"--lens {place}: {what}, which may change; name the commit, as in {repo}@{folder.name}")
    lens = load_lens(folder)
    if lens.style.kind == "p-true":
        raise CoralError(
            f"--lens {place} asks about every option by itself, which a server cannot do yet: use `coral predict`."
        )
    path = folder / RECORD
    return ServedLens(name, lens, str(read_json(path)[SEAL]), datetime.fromtimestamp(path.stat().st_mtime, UTC))
