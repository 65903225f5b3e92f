"""A study of the tiny model in `tests/golden` in which every method that keeps work of its own takes part."""

from __future__ import annotations

HEAD = """
name = "own"
models = ["model"]
layers = [1]
mixture = [{ name = "mine", sources = [{ task = "train.jsonl", shots = 0 }] }]
test = [{ task = "test.jsonl", shots = 0 }]
"""
PLAIN = """
[[method]]
kind = "mlp"
hidden = [16, 8]
epochs = 4

[[method]]
kind = "isotonic"
"""
KEEPING = """
[[method]]
kind = "iti"
heads = [2]
alphas = [1.0]
directions = ["mean"]

[[method]]
kind = "ccps"
search = false
steps = 5

[[method]]
kind = "steerconf"
prompts = ["vanilla"]
thinking = [false]
temperatures = [1.0]
samples = [1]
screening = 1
questions = 2
max_new_tokens = 2

[[method]]
kind = "corrsteer"
sae = "SAE"
features = [1]
alphas = [0.0, 1.0]
"""
"""Methods that keep work of their own; SAE stands for an autoencoder's folder."""


def study_text(*, keeping: bool, sae: str) -> str:
    """The text of a study; `keeping`: with every method that keeps work of its own."""
    return HEAD + PLAIN + (KEEPING.replace("SAE", sae) if keeping else "")
