"""The table of methods that a study may name. Each is fitted on a training mixture and then turns test sets into Predictions.

A new method is one more row: a file that ends in a Method (see `interface`) and a line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coral_lens.errors import CoralError, nearest
from coral_lens.lens.probes.registry import LENSES
from coral_lens.methods.calibrators import BASE, ISOTONIC, TEMPERATURE, VECTOR_SCALING
from coral_lens.methods.ccps.method import CCPS
from coral_lens.methods.controls import BASE_ONLY, OTHER, RANDOM, TEXT, UNTRAINED
from coral_lens.methods.corrsteer import CORRSTEER
from coral_lens.methods.interface import Method
from coral_lens.methods.iti.method import ITI
from coral_lens.methods.lens import LENS
from coral_lens.methods.letters import BATCH, CONTEXTUAL, CYCLIC, PRIDE
from coral_lens.methods.steerconf.method import STEERCONF

if TYPE_CHECKING:
    from coral_lens.methods.entry import MethodEntry


CONTROLS = ("base", "temperature")
"""Every table has these two, asked for or not."""
ZERO_SHOT = "0-shot"
"""A row of tests with shots; it is no method, because it starts from other prompts than all methods."""

BASELINES: dict[str, Method] = {
    "base": BASE,
    "temperature": TEMPERATURE,
    "isotonic": ISOTONIC,
    "vector-scaling": VECTOR_SCALING,
    "contextual-calibration": CONTEXTUAL,
    "batch-calibration": BATCH,
    "pride": PRIDE,
    "cyclic": CYCLIC,
    "steerconf": STEERCONF,
    "control-random": RANDOM,
    "control-untrained": UNTRAINED,
    "control-base": BASE_ONLY,
    "control-text": TEXT,
    "control-other": OTHER,
    "iti": ITI,
    "ccps": CCPS,
    "corrsteer": CORRSTEER,
}
METHODS: dict[str, Method] = BASELINES | dict.fromkeys((*LENSES, "auto"), LENS)


def read_method(entry: MethodEntry) -> Any:
    """Return the settings of a study's method, or refuse it in one sentence."""
    if entry.kind not in METHODS:
        raise CoralError(
            f"There is no method of kind {entry.kind!r}.{nearest(entry.kind, METHODS)} Known: {', '.join(METHODS)}."
        )
    reserved = entry.row == ZERO_SHOT or entry.row.endswith((" tempered", " adapted"))
    if reserved or (entry.row in CONTROLS and entry.kind != entry.row):
        raise CoralError(f"A method of kind {entry.kind!r} cannot be called {entry.row!r}: another row has that name.")
    return METHODS[entry.kind].read(entry)
