"""A fitted correction: all that turns pooled states and base probabilities into corrected probabilities.

    states of its layers -> inputs -> standardiser -> probe -> scores -> rule at strength gamma -> probabilities

Candidates, layer views and lenses hold corrections, and nothing else applies one. It is fitted elsewhere (`choose`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from coral_lens.lens.features import build_inputs
from coral_lens.lens.probes.mlp import NetworkProbe
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.probes.standardise import Probe, Standardiser, predict_states
from coral_lens.lens.readouts import Reading
from coral_lens.lens.rules import RULES, ProbeScores, RuleName, log_of
from coral_lens.ragged import Options
from coral_lens.records import Scored
from coral_lens.storage.arrays import side_by_side

PROBES: dict[str, Callable[[dict[str, Tensor]], Probe]] = {
    "ridge": LinearProbe.from_tensors,
    "mlp": NetworkProbe.from_tensors,
}
"""How each kind of probe is made again from its saved tensors."""


@dataclass(frozen=True)
class Correction:
    """A probe with all that stands before and after it, but for the strength."""

    rule: RuleName
    """How scores correct probabilities: an entry of `rules.RULES`."""
    layers: tuple[int, ...]
    """The layers that it reads side by side; nearly always one."""
    inputs: tuple[str, ...]
    """What the probe sees beyond plain states: `centred`, `rank`."""
    standardiser: Standardiser
    probe: Probe
    base_weight: float = 1.0
    """Weight of log p under the listwise rule; the paper's rule does not use it."""
    scale: float = 1.0
    """Scale of the probe's output: gamma counts in units of it."""

    reading: Reading = Reading()  # noqa: RUF009  (frozen)
    """Which states of a layer stand for an option."""

    def layer(self, store: Scored, layer: int) -> Float[np.ndarray, "row width"]:
        """Return the states of one of its layers."""
        return self.reading.states(store, layer, self.layers.index(layer))

    def states(self, store: Scored) -> Float[np.ndarray, "row width"]:
        """Return the states that it reads, side by side."""
        return side_by_side(lambda layer: self.layer(store, layer), self.layers)

    def apply(
        self, p: Float[np.ndarray, " row"], states: Float[np.ndarray, "row width"], options: Options, *, gamma: float
    ) -> Float[np.ndarray, " row"]:
        """Return the corrected probabilities at strength gamma, from base ones and the states of its layers."""
        return RULES[self.rule].correct(self.scores(p, states, options), gamma)

    def scores(
        self, p: Float[np.ndarray, " row"], states: Float[np.ndarray, "row width"], options: Options
    ) -> ProbeScores:
        """Return what the probe says of every option, from base probabilities and the states of its layers."""
        return self.scores_of(p, build_inputs(states, p, options, self.inputs), options)

    def scores_of(
        self, p: Float[np.ndarray, " row"], features: Float[np.ndarray, "row feature"], options: Options
    ) -> ProbeScores:
        """Return the same from the probe's inputs, which are not standardised yet."""
        return ProbeScores(p, self.base_part(p), self.outputs(features), options)

    def base_part(self, p: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
        """Return the base's part of the listwise rule's logits."""
        return self.base_weight * log_of(p)

    def outputs(
        self, features: Float[np.ndarray, "row feature"], rows: Int[np.ndarray, " some"] | None = None
    ) -> Float[np.ndarray, " some"]:
        """Return the probe's outputs for some rows of its inputs, or for all."""
        return self.scale * predict_states(self.probe, self.standardiser, features, rows)

    def folded(self) -> Correction:
        """Return the same correction with standardiser and scale folded into its linear probe, whose weights fit float32."""
        assert isinstance(self.probe, LinearProbe), "only a linear probe can take in a standardiser"
        weight = self.scale * self.probe.weight / self.standardiser.scale
        bias = self.scale * self.probe.bias - float(self.standardiser.mean @ weight)
        probe = LinearProbe(weight.astype(np.float32).astype(np.float64), bias)
        return replace(self, standardiser=Standardiser.identity(len(weight)), probe=probe, scale=1.0)

    def to_json(self) -> dict[str, Any]:
        """Return what a lens keeps of it in its JSON; the scale is in a lens's gamma."""
        assert self.scale == 1.0, "the scale has no place on the disk"
        return {
            "rule": self.rule,
            "layers": list(self.layers),
            "inputs": list(self.inputs),
            "base_weight": self.base_weight,
            "probe": self.probe.kind,
            **({} if self.reading.name == "answer" else {"read": self.reading.name}),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return what a lens keeps of it in its tensors."""
        letters = self.reading.letters
        return {
            "standardiser.mean": torch.from_numpy(self.standardiser.mean),
            "standardiser.scale": torch.from_numpy(self.standardiser.scale),
            **self.probe.tensors(),
            **({} if letters is None else {"letters": torch.from_numpy(letters)}),
        }

    @staticmethod
    def from_json(record: Mapping[str, Any], tensors: dict[str, Tensor]) -> Correction:
        """Make it again from what a lens keeps of it."""
        return Correction(
            rule=record["rule"],
            layers=tuple(record["layers"]),
            inputs=tuple(record["inputs"]),
            standardiser=Standardiser(tensors["standardiser.mean"].numpy(), tensors["standardiser.scale"].numpy()),
            probe=PROBES[record["probe"]](tensors),
            base_weight=record["base_weight"],
            reading=Reading(
                record.get("read", "answer"),
                tensors["letters"].numpy() if "letters" in tensors else None,
                lettered=record.get("style", {}).get("kind") == "letters",
            ),
        )


def average(members: Sequence[Correction]) -> Correction:
    """Return the linear correction of all the members' layers side by side whose score is the mean of theirs."""
    probes = [m.probe for m in members if isinstance(m.probe, LinearProbe)]
    assert len(probes) == len(members), "only linear probes can be put side by side"
    return Correction(
        rule=members[0].rule,
        layers=tuple(layer for m in members for layer in m.layers),
        inputs=members[0].inputs,
        standardiser=Standardiser(
            np.concatenate([m.standardiser.mean for m in members]),
            np.concatenate([m.standardiser.scale for m in members]),
        ),
        probe=LinearProbe(
            np.concatenate([p.weight for p in probes]) / len(members), float(np.mean([p.bias for p in probes]))
        ),
        base_weight=float(np.mean([m.base_weight for m in members])),
    )
