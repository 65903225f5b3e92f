"""Servers of tiny lenses, each in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from coral_lens.engine.model import Model
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.serve.lenses import ServedLenses, open_lenses
from coral_lens.serve.server import LensServer
from coral_lens.serve.service import Service
from coral_lens.serve.settings import Address, Answering, Batching, Limits, ServeSettings
from support.models import make_model
from support.questions import toy_questions

PATIENCE = 60
"""Seconds for a server to come up, or an answer to come, on a busy machine."""
GOOD: dict[str, Any] = {
    "/v1/predict": {
        "lens": "first",
        "layers": True,
        "questions": [
            {"question": "2 + 2?", "options": ["3", "4"], "context": "c", "id": 7},
            {"state": {"a": 1}, "instructions": "Is it so?", "kind": "yes-no"},
            {"state": "s", "question": "Which?", "instructions": "Be fair.", "options": {"a": "first", "b": None}},
        ],
    },
    "/v1/decisions": {
        "model": "first",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "It rains."}]}],
        "questions": [
            {"type": "predicate", "instructions": "It is wet."},
            {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": True}]},
            {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]},
        ],
    },
    "/v1/systemone": {
        "model": "first",
        "state": {"text": "It rains."},
        "questions": {
            "wet": {"type": "noul", "instructions": "Is it wet?", "criteria": {"true": "yes"}},
            "which": {"type": "choice", "criteria": {"a": None, "b": "the second"}},
            "how": {"type": "score", "criteria": ["low", "high"]},
        },
    },
}
"""A request to each route that is answered with all that there is."""


@dataclass(frozen=True)
class Shop:
    """A tiny model and two lenses of it, in folders."""

    model: Model
    lenses: ServedLenses
    folder: Path

    def lens(self, name: str) -> Lens:
        return self.lenses.find(name).lens


def open_shop(folder: Path) -> Shop:
    """Fit two lenses of different kinds and layers on a tiny model that reads 1,024 tokens."""
    model = make_model("llama", max_length=1024)
    model.hf.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    questions = toy_questions(60)
    for name, kind, layer in (("first", "ridge", 1), ("second", "listwise", 2)):
        fit(model, questions, FitSettings(lens=kind, layers=(layer,))).save(folder / name)
    return Shop(model, open_lenses([f"first={folder / 'first'}", str(folder / "second")]), folder)


def settings(
    *, address: Address | None = None, limits: Limits | None = None, batching: Batching | None = None,
    answering: Answering | None = None,
) -> ServeSettings:  # fmt: skip
    return ServeSettings(
        address or Address(port=0), limits or Limits(), batching or Batching(), answering or Answering()
    )


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    address: str
    service: Service

    def client(self, **options: object) -> httpx2.Client:
        return httpx2.Client(base_url=self.address, timeout=PATIENCE, **options)  # type: ignore[arg-type]


@contextmanager
def running(model: Model, lenses: ServedLenses, asked: ServeSettings | None = None) -> Iterator[Running]:
    """A server of lenses, until the block ends; what waits is then answered."""
    server = LensServer(model, lenses, asked or settings())
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda _: ready.set(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE), "it comes up"
        yield Running(server.address, server.service)
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it ends"
