"""One model shared by threads, and by forks of the process that loaded it: each gets the numbers of one alone, or one sentence.

A server answers from threads, and a data loader forks. Whatever they do at the same time, the model is afterwards as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import select
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from support.commands import GOLDEN

from coral_lens.data.questions import read_questions
from coral_lens.engine.extract import score_questions
from coral_lens.engine.in_use import in_use
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.planned import Extraction
from coral_lens.errors import CoralError
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Question
from faults.outcomes import Outcome, Tally

LONG = 30
"""Seconds after which a fork counts as hanging."""


@dataclass(frozen=True)
class Shared:
    """What threads and forks have in common."""

    model: Model
    lens: Lens
    questions: list[Question]

    @staticmethod
    def loaded() -> Shared:
        """Return the tiny model, a lens of it and questions."""
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # where the cache of `quiet` is
            model = load_model(str(GOLDEN / "model"))
        questions = read_questions(GOLDEN / "train.jsonl")
        return Shared(model, fit(model, questions, FitSettings(lens="ridge"), bar=False), questions)

    def state(self) -> bytes:
        """Return how a plain pass of the model sees it: numbers, attention, and hooks."""
        with torch.inference_mode():
            logits = self.model.hf(torch.tensor([[5, 6, 7, 8, 9]])).logits
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model.hf.modules())
        return pickle.dumps((logits.numpy().tobytes(), self.model.hf.config._attn_implementation, hooks))


Work = Callable[[Shared], bytes]


def answering(first: int, n: int) -> Work:
    """Return work that answers some of the questions."""

    def work(shared: Shared) -> bytes:
        answers = shared.lens.predict(shared.model, shared.questions[first : first + n])
        return json.dumps([asdict(a) for a in answers]).encode()

    return work


def scoring(shared: Shared) -> bytes:
    """Score questions and read a layer."""
    with score_questions(shared.model, shared.questions[:6], Extraction(layers=(1,))) as store:
        return store.table.logprobs.tobytes() + store.layer(1).tobytes()


def fitting(shared: Shared) -> bytes:
    """Fit a lens."""
    lens = fit(shared.model, shared.questions, FitSettings(lens="ridge", layers=(1,)), bar=False)
    return json.dumps([asdict(a) for a in lens.predict(shared.model, shared.questions[:4])]).encode()


def failing(shared: Shared) -> bytes:
    """Break off in the midst of a pass."""
    with in_use(shared.model):
        raise CoralError("somebody else's mistake")


WORKS: dict[str, Work] = {
    "answers to the same questions": answering(0, 5),
    "answers to a few": answering(3, 2),
    "answers to others": answering(8, 7),
    "scores": scoring,
    "a fit": fitting,
    "a mistake": failing,
}


def ended(work: Work, shared: Shared) -> tuple[Outcome, bytes]:
    """Return how a piece of work ended, and its result."""
    try:
        return Outcome(0, "", ""), work(shared)
    except CoralError as error:
        return Outcome(2, "", f"coral: {error}"), b""
    except Exception as error:
        return Outcome(None, "", f"{type(error).__name__}: {error}"), b""


# ------------------------------------------------------------------------------------------------------------- threads


def threads(rounds: int, *, most: int = 6) -> Tally:
    """Have threads compute with one model at the same time; each round ends with a look at the model itself."""
    tally, shared = Tally("threads"), Shared.loaded()
    alone = {name: ended(work, shared)[1] for name, work in WORKS.items()}
    before = shared.state()
    for seed in range(rounds):
        rng = random.Random(seed)
        names = [rng.choice(list(WORKS)) for _ in range(rng.randint(2, most))]
        begin = threading.Barrier(len(names))

        def run(name: str, begin: threading.Barrier = begin) -> tuple[Outcome, bytes]:
            begin.wait()
            return ended(WORKS[name], shared)

        with ThreadPoolExecutor(len(names)) as pool:
            results = list(pool.map(run, names))
        for name, (outcome, result) in zip(names, results, strict=True):
            tally.judge(f"round {seed}, {name}", outcome, difference="" if result == alone[name] else "another result")
        tally.judge(
            f"round {seed}, the model", Outcome(0, "", ""), difference="" if shared.state() == before else "it changed"
        )
    return tally


# --------------------------------------------------------------------------------------------------------------- forks


@contextlib.contextmanager
def meanwhile(shared: Shared, at_work: bool) -> Iterator[None]:
    """Have another thread hold the model while the block runs, if asked for."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with in_use(shared.model):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    if at_work:
        thread.start()
        held.wait()
    try:
        yield
    finally:
        done.set()
        if at_work:
            thread.join()


def in_fork(work: Work, shared: Shared) -> tuple[Outcome, bytes]:
    """Do a piece of work in a fork of this process; one that hangs is killed."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        with open(sending, "wb") as pipe:
            pickle.dump(ended(work, shared), pipe)
        os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], LONG)
        if not ready:
            os.kill(child, signal.SIGKILL)
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else (Outcome(None, "", "it hangs, or died without a word"), b"")


def forks(n: int) -> Tally:
    """Fork a process that has computed, on one thread and on two, idle or in the midst of a pass, and compute in the fork."""
    tally, shared, usual = Tally("forks"), Shared.loaded(), torch.get_num_threads()
    cases = [(t, busy, name) for name in WORKS for t in (1, 2) for busy in (False, True)]
    try:
        for seed in range(n):
            n_threads, busy, name = cases[seed % len(cases)]
            torch.set_num_threads(n_threads)
            alone, before = ended(WORKS[name], shared)[1], shared.state()
            with meanwhile(shared, busy):
                outcome, result = in_fork(WORKS[name], shared)
            case = f"{name} in a fork of {n_threads} threads, {'in the midst of a pass' if busy else 'idle'}"
            tally.judge(case, outcome, difference="" if result == alone else "another result")
            again = ended(WORKS[name], shared)[1]
            tally.judge(
                f"{case}: here",
                Outcome(0, "", ""),
                difference="" if (again, shared.state()) == (alone, before) else "changed",
            )
    finally:
        torch.set_num_threads(usual)
    return tally
