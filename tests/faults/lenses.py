"""Lens folders of strangers: records and tensors in which something is wrong, under digests that are right.

A digest shows damage, never malice: whoever makes a folder makes its digests too. A lens is refused in one sentence, or
answers with probabilities.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from coral_lens.data.questions import read_questions
from coral_lens.engine.loading import load_model
from coral_lens.lens.folder import load_lens
from coral_lens.storage.files import digest_file
from faults.hostile import hostile_value, spoiled, spoiled_bytes
from faults.outcomes import Tally, call

Tensors = dict[str, torch.Tensor]
N_QUESTIONS = 3


def spoil_tensor(tensors: Tensors, rng: random.Random) -> None:
    """Change one tensor: its values, its shape, its type or its name."""
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    changes: list[Callable[[], torch.Tensor | None]] = [
        lambda: None,
        lambda: tensor[..., :-1] if tensor.dim() else tensor.reshape(1),
        lambda: torch.cat([tensor.reshape(-1)] * 2),
        lambda: tensor.unsqueeze(0),
        lambda: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor - tensor,
        lambda: torch.full_like(tensor, float("inf")) if tensor.is_floating_point() else tensor[:0],
        lambda: torch.zeros_like(tensor),
        lambda: tensor.to(torch.int64 if tensor.is_floating_point() else torch.float16),
        lambda: tensor * 1e30 if tensor.is_floating_point() else tensor * 3,
    ]
    changed = rng.choice(changes)()
    del tensors[name]
    if changed is not None:
        tensors[rng.choice([name, name, name, "../" + name])] = changed.contiguous()


def spoil_record(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Change one value of the record, more often one that steers."""
    if rng.random() < 0.6:
        key = rng.choice(["kind", "rule", "layers", "inputs", "gamma", "base_weight", "base", "base_temperature",
                          "then_temperature", "style", "probe", "tempering", "temperature", "sets", "keys"])  # fmt: skip
        return record | {key: hostile_value(rng)}
    changed = spoiled(record, rng)
    return changed if isinstance(changed, dict) else record


def sealed(folder: Path, record: dict[str, Any]) -> None:
    """Write a record with digests that are right."""
    import hashlib

    record = {k: v for k, v in record.items() if k != "digest"} | {"tensors": digest_file(folder / "lens.safetensors")}
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    whole = record | {"digest": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()}
    (folder / "lens.json").write_text(json.dumps(whole, indent=2), "utf-8")


def spoil_folder(folder: Path, rng: random.Random) -> None:
    """Make a hostile lens of a sound one."""
    record, path = json.loads((folder / "lens.json").read_text("utf-8")), folder / "lens.safetensors"
    match rng.randrange(8):
        case 0 | 1:
            tensors = load_file(path)
            spoil_tensor(tensors, rng)
            path.write_bytes(save_tensors(tensors))
        case 2:
            path.write_bytes(spoiled_bytes(path.read_bytes(), rng))
        case 3:
            # a header that promises more memory than there is
            header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header)
        case 4 if (folder / "layers.safetensors").exists():
            tensors = load_file(folder / "layers.safetensors")
            spoil_tensor(tensors, rng)
            (folder / "layers.safetensors").write_bytes(save_tensors(tensors))
        case 5 if rng.random() < 0.3:
            (folder / "lens.json").write_bytes(b"[" * 200_000)
            return
        case 6 if rng.random() < 0.3:
            path.unlink()
            os.symlink("/dev/zero" if rng.random() < 0.5 else "/nowhere", path)
            return
        case _:
            record = spoil_record(record, rng)
    sealed(folder, record)


def wrong_answers(answers: list[Any]) -> str:
    """Say what is wrong with answers: something that is no probability, or no answer at all."""
    for a in answers:
        if not math.isclose(sum(a.probs), 1.0, abs_tol=1e-6) or not all(0 <= p <= 1 for p in a.probs):
            return f"probabilities {a.probs}"
        if not math.isfinite(a.shift):
            return f"shift {a.shift}"
    return "" if len(answers) == N_QUESTIONS else f"{len(answers)} answers to {N_QUESTIONS} questions"


def hostile_lenses(lens: Path, folder: Path, home: Path, n: int) -> Tally:
    """Load so many lens folders, and answer with those that load."""
    tally, path = Tally("lens folders"), (folder / "model").resolve()
    with contextlib.chdir(home):  # where the cache of `quiet` is
        model = load_model(str(path))
    questions = read_questions(folder / "test.jsonl")[:N_QUESTIONS]
    for seed in range(n):
        target, answers = home / "lens", list[Any]()
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(lens, target)
        spoil_folder(target, random.Random(seed))
        # the name of the model is a folder of the machine that it was fitted on
        outcome = call(
            lambda target=target, answers=answers: answers.extend(load_lens(target).predict(model, questions))
        )
        tally.judge(f"lens folder {seed}", outcome, difference=wrong_answers(answers) if outcome.code == 0 else "")
    return tally
