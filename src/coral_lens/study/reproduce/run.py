"""Run the parts that are left, one after another, and write the page after each: a killed run goes on, a failed part is named.

OUT/reproduction.html       the page; tables.tex, tables.md and figures/ beside it
OUT/MODEL/PART/part.json    what a part has left, or why it failed
OUT/MODEL/PART/             its tables and figures, or the report of its study
WORK/                       states, lenses, autoencoders
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_lens.engine.loading import files_digest, load_outline
from coral_lens.errors import CoralError, need
from coral_lens.methods.interface import prompts_digest
from coral_lens.storage.files import digest, kept_record, versions, write_atomic, write_record
from coral_lens.storage.progress import Bar, duration, silent
from coral_lens.study.folders import Folders, check_folders
from coral_lens.study.plan import Load, loader
from coral_lens.study.reproduce.page import STUDIES, Figures, Findings, write_page
from coral_lens.study.reproduce.parts import PARTS, Workplace
from coral_lens.study.reproduce.scale import Scale
from coral_lens.study.states import Helpers, OpenModel

if TYPE_CHECKING:
    from coral_lens.engine.model import Model

DigestOf = Callable[[str], str]
Tell = Callable[[str], None]
"""Told in a sentence what happens."""
CLAIM = "reproduction.json"
"""What a folder of results belongs to."""
FORMAT = 1
"""Of that file."""


@dataclass(frozen=True)
class Undertaking:
    """What is to be reproduced, and with what."""

    models: tuple[str, ...]
    scale: Scale
    folders: Folders
    parts: tuple[str, ...]
    """In the order of the paper; empty: all."""
    open_model: OpenModel
    bar: Bar = silent
    device: str = "cpu"
    helpers: Helpers | None = None
    """Who computes states and fits of studies in place of this process."""
    anyway: bool = False
    """Whether a model of another size than the scale is meant for is let through."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The parts that are run."""
        return tuple(part for part in PARTS if not self.parts or part in self.parts)

    def place(self, model: str) -> Workplace:
        """Return where the parts of a model are done."""
        opened = OneModel(self.open_model)
        return Workplace(self.scale, model, self.folders, opened, self.load, self.bar, self.device, self.helpers)

    @cached_property
    def load(self) -> Load:
        """Gives the questions of a source, each read once for all parts and models."""
        return loader(self.scale.study("probe1", self.models[0]), self.folders.data)

    @cached_property
    def figures(self) -> Figures:
        """The figures of the page, each drawn once for all the times that it is written."""
        return Figures()

    @cached_property
    def questions(self) -> DigestOf:
        """Gives a digest of the questions of a part as they are asked; empty where they cannot be read."""

        @cache
        def digest_of(part: str) -> str:
            try:
                asked = [
                    prompts_digest(self.load(source)) for source in PARTS[part].sources(self.scale, self.models[0])
                ]
            except CoralError:
                return ""
            return digest(asked)

        return digest_of


class OneModel:
    """Opens models, and keeps the last one: the parts of a model share it."""

    def __init__(self, open_model: OpenModel) -> None:
        self._open = open_model
        self._kept: dict[str, Model] = {}

    def __call__(self, name: str, *, dtype: str | None = None) -> Model:
        if name not in self._kept:
            self._kept.clear()
            gc.collect()  # one model in memory at a time
            self._kept[name] = self._open(name, dtype=dtype)
        return self._kept[name]


def reproduce(undertaking: Undertaking, *, tell: Tell = lambda _: None) -> Path:
    """Run every part that is left and return the page; parts that failed are named at the end, in one sentence."""
    need("report", by="coral reproduce")
    check_folders(undertaking.folders, holds=CLAIM, kind="reproduction")
    for model in undertaking.models:
        refuse_size(model, undertaking)
    claim_folder(undertaking)
    failures: list[str] = []
    page = show(undertaking)
    for model in undertaking.models:
        place = undertaking.place(model)
        for part in undertaking.wanted:
            place.done.clear()
            place.done.update(records_of(undertaking, model))
            if part in place.done:
                continue
            tell(f"{PARTS[part].title}, {model} ...")
            failures += [f"{part} of {model}"] if attempt(undertaking, place, part, tell) else []
            page = show(undertaking)
        del place
        gc.collect()
    if failures:
        raise CoralError(
            f"Parts that failed: {', '.join(failures)}. {page} says why and has all others; the same command tries "
            "them again."
        )
    return page


def attempt(undertaking: Undertaking, place: Workplace, part: str, tell: Tell) -> str:
    """Run a part and keep its record, or why it failed; return the reason, or nothing."""
    path, start = part_path(place, part), time.perf_counter()
    missing = [name for name in PARTS[part].needs if name not in place.done]
    reason = f"it needs the part {missing[0]}, which is missing" if missing else ""
    record: dict[str, Any] = {}
    if not reason:
        try:
            record = PARTS[part].run(place)
        except CoralError as error:
            reason = str(error)
        except Exception as error:  # a part that fails must not stop the others
            where = path.with_name("failure.txt")
            reason = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is known'} ({where})"
            )
            write_atomic(where, traceback.format_exc().encode())
    seconds = time.perf_counter() - start
    about = {"part": part, "key": key_of(place, part), "questions": undertaking.questions(part), "seconds": seconds}
    write_record(path, about | ({"failed": reason} if reason else {"record": record}))
    tell(f"failed: {reason}" if reason else f"done in {duration(seconds)}")
    return reason


# ------------------------------------------------------------------------------------------------------------- records


def part_path(place: Workplace, part: str) -> Path:
    """Return the file with what a part has left."""
    return place.out(part) / "part.json"


def key_of(place: Workplace, part: str) -> str:
    """Return what the record of a part depends on, beside its questions: the scale's settings, and the files of the model."""
    scale, files = place.scale, files_digest(place.name, place.folders.adapter)
    study = place.study(part).model_dump(mode="json") if part in STUDIES else {}
    inside = (scale.home, scale.away, scale.n_heads, scale.sae, scale.layers, scale.probes, scale.dimensions)
    return digest([part, place.name, files, place.folders.adapter, place.folders.dtype, study, list(map(repr, inside))])


def records_of(undertaking: Undertaking, model: str) -> dict[str, dict[str, Any]]:
    """Return the records of the parts of a model that are done at this scale."""
    return {part: kept["record"] for part, kept in kept_parts(undertaking, model).items() if "record" in kept}


def kept_parts(undertaking: Undertaking, model: str) -> dict[str, dict[str, Any]]:
    """Return what every part of a model has left, done or failed; what does not stand any more counts as nothing."""
    place = undertaking.place(model)
    kept = {part: kept_record(part_path(place, part)) for part in PARTS}
    return {part: one for part, one in kept.items() if one and stands(undertaking, place, part, one)}


def stands(undertaking: Undertaking, place: Workplace, part: str, kept: dict[str, Any]) -> bool:
    """Whether what a part has left is of this model, these settings and these questions, and its files are there.

    Questions that cannot be read any more contradict nothing: a page is made again without them.
    """
    if kept.get("key") != key_of(place, part):
        return False
    if "record" not in kept:
        return True
    if not all(path.exists() for path in PARTS[part].files(place.folders.out, kept["record"])):
        return False
    return undertaking.questions(part) in ("", kept.get("questions"))


def show(undertaking: Undertaking) -> Path:
    """Write the page of what is done so far."""
    kept = {model: kept_parts(undertaking, model) for model in undertaking.models}
    records = {m: {p: one["record"] for p, one in parts.items() if "record" in one} for m, parts in kept.items()}
    failed = {
        m: {p: why_missing(undertaking, p, parts.get(p)) for p in PARTS if p not in records[m]}
        for m, parts in kept.items()
    }
    took = {
        m: {p: duration(one["seconds"]) for p, one in parts.items() if "record" in one} for m, parts in kept.items()
    }
    findings = Findings(
        undertaking.models, undertaking.scale, undertaking.folders.out, records, failed, figures=undertaking.figures
    )
    provenance = {
        "scale": undertaking.scale.name,
        "models": list(undertaking.models),
        "time of each part": took,
        "device": undertaking.device,
        "versions": versions(),
    }
    return write_page(findings, provenance)


def why_missing(undertaking: Undertaking, part: str, kept: dict[str, Any] | None) -> str:
    """Say why a part is not there."""
    if kept and "failed" in kept:
        return str(kept["failed"])
    return "it has not been run yet." if part in undertaking.wanted else f"it was not asked for (--part {part})."


def claim_folder(undertaking: Undertaking) -> None:
    """Write what the folder of results belongs to, unless it belongs to another scale."""
    path = undertaking.folders.out / CLAIM
    known = kept_record(path)
    if known and known["scale"] != undertaking.scale.name:
        raise CoralError(
            f"{undertaking.folders.out} holds a reproduction at scale {known['scale']!r}, not {undertaking.scale.name!r}; choose "
            "another --out."
        )
    write_record(path, {"format": FORMAT, "scale": undertaking.scale.name, "models": list(undertaking.models)})


def refuse_size(model: str, undertaking: Undertaking) -> None:
    """Refuse a model that is too small or too large for the scale, as far as its configuration tells."""
    if complaint := size_complaint(model, undertaking):
        raise CoralError(complaint)


def size_complaint(model: str, undertaking: Undertaking) -> str:
    """Return what is wrong with the size of a model, in a sentence; nothing where it is right, or let through."""
    outline, scale = load_outline(model), undertaking.scale
    weights = outline.n_layers * outline.block_parameters
    fewest, most = scale.weights
    if undertaking.anyway or fewest <= weights <= most:
        return ""
    if weights < fewest:
        harm, remedy = "it would answer by chance", "take a larger model"
    else:
        harm, remedy = "it would take long", f"take a smaller model{scale.larger and f' or {scale.larger}'}"
    return (
        f"{model!r} has {weights:,} weights in its blocks, and the scale {scale.name!r} is meant for models with {fewest:,} to "
        f"{most:,} there: {harm}; {remedy}, or go on with --anyway."
    )


def parts_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return parts in the order of the paper, with those that they need."""
    wanted = set(names) | {needed for name in names for needed in PARTS[name].needs}
    return tuple(part for part in PARTS if part in wanted)
