"""The steps of the commands `coral sae ...`, from questions to what is on the disk. Parses nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_lens.manifest import read_json, write_json
from coral_lens.progress import Bar, silent
from coral_lens.prompts import prepare
from coral_lens.records import UNKNOWN, Question
from coral_lens.sae.quality import fidelity, loss_recovered
from coral_lens.sae.tokens import Sampling, TokenStore, collect
from coral_lens.sae.training import TrainingSettings, train

if TYPE_CHECKING:
    from coral_lens.models import Model

QUALITY_QUESTIONS = 200
"""Held-out questions on which the loss of the patched model is measured."""


def train_on_tokens(
    model: Model,
    questions: Sequence[Question],
    folder: Path,
    *,
    how: tuple[Sampling, TrainingSettings],
    bar: Bar = silent,
) -> dict[str, Any]:
    """Collect token states, train on them and measure on what was held out; return the record in FOLDER/quality.json."""
    sampling, settings = how
    with bar("collecting states", len(questions), "questions") as advance:
        store = collect(model, questions, folder / "tokens", what=sampling, progress=advance)
    saes = train(store, folder, settings, layer=sampling.layer, bar=bar)
    held_out = held_out_questions(model, questions, store, sampling)
    prompts, answers = prepare(held_out, sampling.style, model).prompts, [q.answer for q in held_out]
    path = folder / "quality.json"
    known = read_json(path) if path.exists() else {}
    for expansion, sae in saes.items():
        about = {"steps": sae.about["training"], "questions": [q.id for q in held_out]}
        if known.get(f"{expansion}x", {}).get("about") == about:
            continue
        found = fidelity(sae, store, store.held_out)
        recovered = loss_recovered(model, sae, prompts, answers) if held_out else None
        patched = {**asdict(recovered), "share": recovered.share} if recovered else {}
        known[f"{expansion}x"] = {"n_features": sae.n_features, **asdict(found), "loss": patched, "about": about}
        write_json(path, known)
    return known


def held_out_questions(
    model: Model, questions: Sequence[Question], store: TokenStore, sampling: Sampling
) -> list[Question]:
    """Return labelled questions whose states training has not seen."""
    asked = prepare(questions, sampling.style, model).questions
    found = [asked[i] for i in store.questions(store.held_out)]
    return [q for q in found if q.answer != UNKNOWN][:QUALITY_QUESTIONS]
