"""The folder of a lens: written in one moment, and checked when it is read, whoever made it.

    lens.json           layers, gamma, base rule, prompt style, fingerprints, how it was chosen
    lens.safetensors    standardiser, probe and shift model
    README.md           a card for people; one that somebody has edited is kept
    layers.safetensors  optional: what each layer would say, for people to look at (see `layer_view`)

Never pickle. Nothing else in the folder is touched.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors.torch import save as save_tensors

from coral_lens.errors import CoralError, nearest
from coral_lens.lens.artefact import Lens
from coral_lens.lens.checks import LARGEST_RECORD, check_record, check_tensors, load_tensors
from coral_lens.lens.layer_view import VIEW_FILE, load_view
from coral_lens.lens.publish import SHIPPED, card, local_folder
from coral_lens.lens.record import FORMAT
from coral_lens.storage.bundles import bundled, settle, write_bundle
from coral_lens.storage.files import SEAL, digest_bytes, json_bytes, kept_record, read_record, sealed
from coral_lens.storage.outputs import has_word
from coral_lens.storage.temporary import remove_abandoned

RECORD, TENSORS, CARD = "lens.json", "lens.safetensors", "README.md"
GENERAL = SHIPPED["general"]
"""The lens that ships; `make lens` makes it again."""
REMEDY = "fit or copy it again"

# -------------------------------------------------------------------------------------------------------------- writing


def save_lens(lens: Lens, folder: str | Path, *, more: str = "") -> None:
    """Write a lens; see `Lens.save`. `more` is a further part of its card, which the recorded digest then knows."""
    target = Path(folder)
    refuse_other_folder(target)
    older = kept_record(target / RECORD)
    if older:  # its writing may have been killed before the last file had its name
        settle(target, {TENSORS: str(older.get("tensors")), **older.get("sha256", {})})
    others = {VIEW_FILE: lens.view.content()} if lens.view else {}
    text = (card(lens) + more).encode()
    if is_own_card(target) or is_same_card(target, text):
        others[CARD] = text
    else:
        warnings.warn(
            f"{target / CARD} was edited, so it is kept, and tells of the lens before; delete it to have a new one.",
            stacklevel=3,
        )
    weights = save_tensors(tensors_of(lens))
    digests = {name: digest_bytes(data) for name, data in others.items()}
    record = lens.record() | {"tensors": digest_bytes(weights), "sha256": digests}
    files = {TENSORS: weights, **others}
    write_bundle(target, (RECORD, json_bytes(sealed(record))), files, gone=() if lens.view else (VIEW_FILE,))
    if older and any(older.get(promise) and not record[promise] for promise in ("sets", "abstention")):
        warnings.warn(
            f"{target} was calibrated; that was dropped with the old lens: run `coral calibrate` again.", stacklevel=3
        )


def tensors_of(lens: Lens) -> dict[str, torch.Tensor]:
    """Return the numbers of a lens."""
    return {
        "training.seen": torch.from_numpy(lens.seen),
        "training.calibrated_on": torch.from_numpy(lens.calibrated_on),
        **({"training.adapted_on": torch.from_numpy(lens.adapted_on)} if len(lens.adapted_on) else {}),
        **lens.correction.tensors(),
        **({"task_probe.weight": torch.from_numpy(lens.task_probe.weight)} if lens.task_probe else {}),
        **lens.shift.tensors(),
        **({"open.reference": torch.from_numpy(lens.open.stacked(lens.layers))} if lens.open else {}),
    }


def refuse_other_folder(target: Path) -> None:
    """Never write a lens among somebody's files: a wrong --out must not replace them."""
    is_lens = has_word(target / RECORD, '"format"') or has_word(target / TENSORS, '"training.seen"')
    if target.exists() and not is_lens and (not target.is_dir() or any(target.iterdir())):
        raise CoralError(f"{target} exists and is not a lens; choose another folder for --out.")


def is_own_card(folder: Path) -> bool:
    """Return whether the card in a folder is missing or as it was written there; that of an older version may be anybody's."""
    path = folder / CARD
    if not path.exists() and not path.is_symlink():
        return True
    record = kept_record(folder / RECORD) or {}
    written = record.get("sha256", {}).get(CARD)
    if written is None and path.is_file() and not path.is_symlink():
        try:
            written = digest_bytes(card(load_lens(folder)).encode())
        except CoralError:
            return False
    return not path.is_symlink() and path.is_file() and digest_bytes(path.read_bytes()) == written


def is_same_card(folder: Path, text: bytes) -> bool:
    """Return whether the card in a folder says this already: that of the same lens, whose record was lost."""
    path = folder / CARD
    return not path.is_symlink() and path.is_file() and path.read_bytes() == text


# -------------------------------------------------------------------------------------------------------------- reading


def load_lens(folder: str | Path) -> Lens:
    """Read a lens from a folder, or from the hub if given an id like `owner/name`, and check that nothing was changed or lost.

    Whoever made it, it is checked before it is used: none of its contents are run as code, and anything that is not a lens is
    refused in one sentence.
    """
    source = local_folder(folder)
    path = source / RECORD
    if not source.exists():
        # an earlier version that was killed while it replaced a lens has left it under another name
        remove_abandoned(source)
    if not path.exists():
        hint = nearest(source.name, [*(path.parent.name for path in source.parent.glob("*/lens.json")), *SHIPPED])
        # what is there already would be refused as a place for a lens
        remedy = (
            "give a folder that `coral fit` made" if source.exists() else f"make one with `coral fit --out {source}`"
        )
        raise CoralError(f"{source} is not a lens: it has no lens.json; {remedy}.{hint}")
    if path.is_file() and path.stat().st_size > LARGEST_RECORD:
        raise CoralError(f"{path} has {path.stat().st_size:,} bytes, which is too large for a lens; {REMEDY}.")
    record = read_record(path, remedy=REMEDY, needs=("format", SEAL))
    if record["format"] != FORMAT:
        raise CoralError(f"{source} has lens format {record['format']!r}, but this version reads {FORMAT}.")
    # lenses of older versions do not say which version of the keys they have: it is the first; and they know no trust
    record = {"keys": 1, "trust": None, "adaptation": None, "exits": False, "open": None} | record
    check_record(record, path)
    weights = bundled(source, TENSORS, record["tensors"])
    if weights is None:
        raise CoralError(f"{source / TENSORS} is missing or damaged: it does not match its digest; {REMEDY}.")
    tensors, _ = load_tensors(weights)
    check_tensors(tensors, record, weights)
    try:
        return Lens.from_record(record, tensors, load_view(source, record.get("sha256")))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # of a network whose layers have other numbers
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CoralError(f"{source} is not a lens that this version can read ({reason}); {REMEDY}.") from None
