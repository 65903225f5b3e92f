"""The folder of one autoencoder's features, and what everything in it is bound to. Reads and refuses, computes nothing.

selection.json         autoencoder, model, base, worked examples and questions of the selection; the numbers of each feature
ablation-NAME.json     what taking features out does, with a digest of the selection that it is of
steering.json          steering by those effects
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from coral_lens.data.leaks import question_keys
from coral_lens.engine.fingerprints import identity_difference
from coral_lens.errors import CoralError
from coral_lens.records import UNKNOWN, Question
from coral_lens.sae.autoencoder import Autoencoder, load_autoencoder
from coral_lens.sae.codes import sae_digest
from coral_lens.storage.files import digest, read_record
from coral_lens.storage.outputs import has_word, refuse_folder

if TYPE_CHECKING:
    from coral_lens.engine.model import Model


BOUND = ("sae_digest", "layer", "base", "style", "shots", "weights", "keys")
"""What an ablation depends on beside the chosen features."""


LEAST_ACTIVE = 10
"""A feature must be active in so many samples at least."""
LEAST_FREQUENCY = 1e-4
"""A feature must be active in more than this share of the samples."""


@dataclass(frozen=True)
class FeatureSelection:
    """What is known of every feature, and which were chosen."""

    n_samples: int
    r: Float[np.ndarray, " feature"]
    n_active: Int[np.ndarray, " feature"]
    mean: Float[np.ndarray, " feature"]
    impact: Float[np.ndarray, " feature"]
    chosen: dict[str, list[int]]
    """By criterion, `correlation` or `impact`: features, best first."""

    def alive(self) -> Int[np.ndarray, " alive"]:
        """Return the features that are active often enough."""
        return np.flatnonzero((self.n_active >= LEAST_ACTIVE) & (self.n_active > LEAST_FREQUENCY * self.n_samples))

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        columns = {name: getattr(self, name).tolist() for name in ("r", "n_active", "mean", "impact")}
        return {"n_samples": self.n_samples, "chosen": self.chosen, **columns}

    @staticmethod
    def from_record(record: dict[str, Any]) -> FeatureSelection:
        arrays = {name: np.array(record[name]) for name in ("r", "n_active", "mean", "impact")}
        return FeatureSelection(n_samples=record["n_samples"], chosen=record["chosen"], **arrays)


def refuse_other_folder(folder: Path) -> None:
    """Refuse a folder of somebody else: what is selected begins with states, and ends with a record."""
    is_ours = (folder / "states").is_dir() or has_word(folder / "selection.json", '"sae_digest"')
    refuse_folder(folder, "features of ours", is_ours=is_ours)


@dataclass(frozen=True)
class FeatureStudy:
    """What was selected, ablated and steered by."""

    folder: Path

    @cached_property
    def record(self) -> dict[str, Any]:
        """What `select` wrote."""
        path = self.folder / "selection.json"
        if not path.exists():
            raise CoralError(f"{self.folder} holds no selection of features; run `coral sae select` first.")
        record = read_record(path, remedy="run `coral sae select` again")
        if missing := [name for name in BOUND if name not in record]:
            raise CoralError(
                f"{path} says nothing of {missing[0]}, because an earlier version wrote it; run `coral sae select` again."
            )
        return record

    @property
    def identity(self) -> str:
        """A digest of the selection: ablations of another one are not mixed with it."""
        return digest([{name: self.record[name] for name in BOUND}, self.record["selection"]["chosen"]])

    def autoencoder(self) -> Autoencoder:
        """Return the autoencoder whose features were selected; another in its place is refused."""
        sae = load_autoencoder(Path(self.record["sae"]), layer=self.record["layer"])
        if sae_digest(sae) != self.record["sae_digest"]:
            raise CoralError(f"{self.record['sae']} was changed after its features were selected; select them again.")
        return sae

    def check(self, model: Model) -> None:
        """Refuse a model other than the one that features were selected on."""
        if difference := identity_difference(self.record, model.identity):
            raise CoralError(
                f"The features were selected on {self.record['model']!r}, and {model.name!r} is another model: {difference}; "
                "use that model or select anew."
            )

    @property
    def selection(self) -> FeatureSelection:
        return FeatureSelection.from_record(self.record["selection"])

    def ablations(self) -> list[str]:
        """Return the names of the ablations that there are."""
        return sorted(p.stem.removeprefix("ablation-") for p in self.folder.glob("ablation-*.json"))

    def ablation(self, name: str) -> dict[str, Any]:
        """Return the record of an ablation; one of another selection is refused."""
        if name not in self.ablations():
            raise CoralError(f"{self.folder} holds no ablation {name!r}; run `coral sae ablate` first.")
        record = self._read(name)
        if record["of"] != self.identity:
            raise CoralError(
                f"The ablation {name!r} in {self.folder} is of another selection (another base, for instance); run "
                "`coral sae ablate` again, which computes no score twice."
            )
        return record

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / f"ablation-{name}.json"
        record = read_record(path, remedy="run `coral sae ablate` again, which computes no score twice")
        if "of" not in record:
            raise CoralError(f"{path} was written by an earlier version; run `coral sae ablate` again.")
        return record

    @property
    def seen(self) -> set[int]:
        """Keys of the questions that selection and ablation used, whatever selection the ablation is of."""
        return set(self.record["keys"]).union(*(self._read(name)["keys"] for name in self.ablations()))


def without_known(questions: Sequence[Question], known: Collection[int]) -> list[Question]:
    """Return the questions whose text is not among the known ones. Ids would not do: in a user's file they are line numbers."""
    return [q for q, key in zip(questions, question_keys(questions).tolist(), strict=True) if key not in known]


def unseen(study: FeatureStudy, questions: Sequence[Question], n: int | None) -> list[Question]:
    """Return labelled questions that selection did not use, at most n; another ablation may have used them."""
    fresh = [q for q in without_known(questions, set(study.record["keys"])) if q.answer != UNKNOWN]
    if not fresh:
        raise CoralError(f"All {len(questions)} questions were used to select features or have no answer; give others.")
    return fresh[:n]
