"""What the lenses of `tests/lens/conftest.py` are fitted on, and what their methods are called."""

from __future__ import annotations

TRAINING = 40
"""Questions that they are fitted on."""
METHODS = {
    "ridge": ("base", "temperature", "coral"),
    "listwise": ("base", "temperature", "listwise", "listwise tempered"),
}
