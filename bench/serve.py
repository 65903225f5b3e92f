"""A server on loopback in a process of its own: its start, its rate, its latency, what is shared, and what overload does.

    python bench/serve.py --data DIR
    python bench/serve.py --questions 64 --clients 32 --overload 10     small, on a machine in use

Start: bare `coral serve` until /ready says so. Saturated: clients that each send the next question as soon as the last is
answered, against `Lens.predict` on the same questions in one call, round after round. One at a time: the median time of a
request against that of the bare forward pass of its tokens, and what each step takes by itself. One input: 20 questions over
about 1,000 tokens in one request, against 20 requests one after the other, without and with the prefix cache. Recurring text:
the first, second and third request over it. Overload: ten times the saturated rate. The server and this process take turns,
since both need all cores; machines are noisy, so medians over rounds are compared. `--only` does some of these.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# the threads of this process must not spin while the server computes; torch reads this when it is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import httpx2
import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.budget import choose_budget
from coral_lens.engine.extract import score_planned
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.planned import PlannedQuestions
from coral_lens.engine.prompts import prepare, prepare_any
from coral_lens.engine.self_check import packing_of
from coral_lens.engine.trees import build_tree
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Prompt, Question
from coral_lens.serve.lenses import open_lenses
from coral_lens.serve.predict import PredictRequest, predict_reply
from coral_lens.serve.queue import Scored
from coral_lens.serve.service import Reply

OVER_ONE_INPUT = 20
SENTENCE = "The committee met on Tuesday, heard the report of the treasurer, and put off the vote until spring. "
TIMES = 10
"""So many times the saturated rate is overload."""
SETTLE = 3.0
"""Seconds after the overload at which memory is looked at again."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task", default="arc_easy:validation")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overload", type=float, default=60.0, help="seconds of it")
    parser.add_argument("--only", choices=PARTS, action="append", default=None)
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()
    print(f"{args.model}, {torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}")
    if "start" in (args.only or PARTS):
        starting(args)
    questions = load_questions(args.task, TaskOptions(limit=args.questions + 60, data_dir=args.data))
    # as a client would ask them: text and options, without the template of a task
    questions = [Question(q.id, q.id, q.text, q.options) for q in questions]
    model = load_model(args.model, dtype=args.dtype)
    labelled = [Question(q.id, q.id, q.text, q.options, i % 2) for i, q in enumerate(questions[:60])]
    lens = fit(model, labelled, FitSettings(layers=(model.n_layers // 2,)), bar=False)
    with tempfile.TemporaryDirectory() as folder:
        lens.save(Path(folder) / "lens")
        case = Case(model, lens, Path(folder) / "lens", questions[60:], args)
        for name in args.only or PARTS:
            PARTS[name](case)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    model: Model
    lens: Lens
    folder: Path
    """Of the lens."""
    questions: Sequence[Question]
    args: Any

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The questions as our route takes them."""
        return [{"id": q.id, "question": q.text, "options": list(q.options)} for q in self.questions]


# ------------------------------------------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    client: httpx2.Client
    address: str
    process: int

    def ask(self, *rows: dict[str, Any]) -> Any:
        """Send questions in one request, and return the reply."""
        reply = self.client.post("/v1/predict", json={"questions": list(rows)})
        return reply.raise_for_status().json()

    def memory(self, name: str = "VmRSS") -> float:
        """Return the megabytes that it has in memory, or (VmHWM) had at most."""
        found = re.search(
            rf"^{name}:\s+(\d+) kB", Path(f"/proc/{self.process}/status").read_text("utf-8"), re.MULTILINE
        )
        return int(found[1]) / 1024 if found else float("nan")


@contextmanager
def served(case: Case, *more: str) -> Iterator[Server]:
    """Serve the lens in a process of its own, with further options."""
    args = case.args
    words = [
        "serve",
        "--lens",
        f"lens={case.folder}",
        "--model",
        args.model,
        "--dtype",
        args.dtype,
        "--port",
        "0",
        *more,
    ]
    process = subprocess.Popen([sys.executable, "-m", "coral_lens", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"http://\S+", process.stdout.readline())
        assert found, "it comes up"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        with httpx2.Client(base_url=found[0], timeout=600, limits=limits) as client:
            yield Server(client, found[0], process.pid)
    finally:
        process.terminate()
        process.wait()


def starting(args: argparse.Namespace) -> None:
    """Print how long bare `coral serve` takes until it is ready."""
    taken = []
    for _ in range(args.rounds):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        start = time.perf_counter()
        words = [sys.executable, "-m", "coral_lens", "serve", "--port", str(port)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not is_ready(port):
                assert process.poll() is None, "it comes up"
                time.sleep(0.02)
            taken.append(time.perf_counter() - start)
        finally:
            process.terminate()
            process.wait()
    print(f"start: bare `coral serve` is ready after {', '.join(f'{s:.1f}' for s in taken)} s")


def is_ready(port: int) -> bool:
    """Whether the server at a port says that questions can be answered."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


# ------------------------------------------------------------------------------------------------------------ measures


def saturated(case: Case) -> None:
    """Print the rate under many clients against the offline one, round by round."""
    with served(case) as server:
        server.ask(*case.rows[:20])
        case.lens.predict(case.model, case.questions)
        pairs = []
        for _ in range(case.args.rounds):
            online = served_rate(server, case)
            offline = len(case.questions) / seconds(lambda: case.lens.predict(case.model, case.questions))
            pairs.append((online, offline, online / offline))
    online, offline, ratio = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"saturated, {case.args.clients} clients: {online:.1f} questions/s; offline {offline:.1f}; {ratio:.2f} of it "
        f"(rounds: {', '.join(f'{r:.2f}' for *_, r in pairs)})"
    )


def served_rate(server: Server, case: Case) -> float:
    """Return how many questions are answered in a second under many clients."""
    with ThreadPoolExecutor(case.args.clients) as pool:
        return len(case.rows) / seconds(lambda: list(pool.map(server.ask, case.rows)))


def one_at_a_time(case: Case) -> None:
    """Print the median time of a request against the bare pass of its tokens, and where the rest goes."""
    prompts = prepare(case.questions, Style(), case.model).prompts[:40]
    one, bare, steps = [], [], []
    with served(case) as server:
        server.ask(*case.rows[:20])
        for row, prompt, question in zip(case.rows, prompts, case.questions, strict=False):
            one.append(seconds(lambda row=row: server.ask(row)))
            bare.append(bare_pass(case.model, prompt))
            steps.append(steps_of(case, question))
    p50, floor = statistics.median(one), statistics.median(bare)
    print(f"one at a time: p50 {1000 * p50:.1f} ms; bare pass {1000 * floor:.1f} ms; {p50 / floor:.2f} times it")
    medians = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    medians["the rest (HTTP, queue, threads)"] = p50 - sum(medians.values())
    print("  of it: " + ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in medians.items()))


def steps_of(case: Case, question: Question) -> dict[str, float]:
    """Return the seconds of each step of an answer, by itself and without a server."""
    body = {"questions": {"question": question.text, "options": list(question.options)}}
    raw, extraction = httpx2.Request("POST", "http://a/", json=body).content, case.lens.extraction
    found: dict[str, Any] = {}
    taken: dict[str, float] = {}

    def step(name: str, work: Callable[[], Any]) -> None:
        taken[name] = seconds(lambda: found.__setitem__(name, work()))

    step("parse", lambda: PredictRequest.model_validate_json(raw).asked())
    step("tokenise", lambda: prepare_any(found["parse"], case.lens.style, case.model))
    whole = replace(extraction, packing=packing_of(case.model), token_budget=choose_budget(case.model, 0))
    step("pass", lambda: score_planned(PlannedQuestions(case.model, found["tokenise"], whole)))
    step("lens", lambda: case.lens.answers(found["pass"]))
    served_lens = next(iter(open_lenses([str(case.folder)])))
    reply = Reply(served_lens, tuple(found["parse"]), tuple(Scored(answer) for answer in found["lens"]))
    step("JSON", lambda: predict_reply(reply).model_dump_json())
    return taken


def over_one_input(case: Case) -> None:
    """Print what 20 questions over one input take in one request and in as many, without and with the prefix cache."""
    passage = SENTENCE * 50
    shared = [{**row, "context": passage} for row in case.rows[:OVER_ONE_INPUT]]
    together, apart, cached = [], [], []
    with served(case, "--cache-mb", "0") as server:
        server.ask(*case.rows[:5])
        for _ in range(case.args.rounds):
            together.append(seconds(lambda: server.ask(*shared)))
            apart.append(seconds(lambda: [server.ask(row) for row in shared]))
    with served(case) as server:
        server.ask(*case.rows[:5])
        for _ in range(case.args.rounds):
            cached.append(seconds(lambda: [server.ask(row) for row in shared]))
    whole, single, known = map(statistics.median, (together, apart, cached))
    print(
        f"{len(shared)} questions over one input of {len(case.model.tokenizer.encode(passage))} tokens: in one request "
        f"{whole:.2f} s; in as many requests without a cache {single:.2f} s, {single / whole:.1f} times; with the prefix "
        f"cache {known:.2f} s, {known / whole:.1f} times"
    )


def recurring(case: Case) -> None:
    """Print the first, second and third request over a long text, each with another question."""
    taken: list[list[float]] = [[], [], []]
    with served(case) as server:
        server.ask(*case.rows[:5])
        for n in range(2 * case.args.rounds):
            passage = f"Minutes number {n}. " + SENTENCE * 50
            for place, row in enumerate(case.rows[3 * n % 20 :][:3]):
                taken[place].append(seconds(lambda row=row, passage=passage: server.ask({**row, "context": passage})))
        known = server.ask({**case.rows[0], "context": passage})["cached_tokens"]
    first, second, third = map(statistics.median, taken)
    print(
        f"a text that recurs: first request {1000 * first:.0f} ms, second {1000 * second:.0f} ms, third {1000 * third:.0f} ms "
        f"({known} tokens known); the first takes {first / third:.1f} times the third"
    )


def overload(case: Case) -> None:
    """Print what becomes of ten times the load that the server holds."""
    with served(case) as server:
        server.ask(*case.rows[:20])
        rate = served_rate(server, case)
        before = server.memory()
        outcomes = asyncio.run(flood(server, case, TIMES * rate))
        time.sleep(SETTLE)
        after, most = server.memory(), server.memory("VmHWM")
        alive = server.client.get("/health").status_code
    statuses = Counter(status for status, _ in outcomes)
    accepted = sorted(taken for status, taken in outcomes if status == "200")
    p50, p95 = (accepted[int(share * (len(accepted) - 1))] if accepted else float("nan") for share in (0.5, 0.95))
    print(
        f"overload, {TIMES} times {rate:.1f} questions/s for {case.args.overload:g} s: "
        f"{', '.join(f'{n} of status {status}' for status, n in sorted(statuses.items()))}; of the accepted p50 {p50:.1f} s, "
        f"p95 {p95:.1f} s; memory {before:.0f} MB before, {after:.0f} MB after, {most:.0f} MB at most; then /health {alive}"
    )


async def flood(server: Server, case: Case, rate: float) -> list[tuple[str, float]]:
    """Send requests at a rate, whatever comes back, and return the status and seconds of each, or why none came."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    outcomes: list[tuple[str, float]] = []

    async def one(client: httpx2.AsyncClient, row: dict[str, Any]) -> None:
        start = time.perf_counter()
        try:
            status = str((await client.post("/v1/predict", json={"questions": row})).status_code)
        except httpx2.HTTPError as error:
            status = type(error).__name__
        outcomes.append((status, time.perf_counter() - start))

    async with (
        httpx2.AsyncClient(base_url=server.address, timeout=600, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        start, sent = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < case.args.overload:
            while sent < passed * rate:
                group.create_task(one(client, case.rows[sent % len(case.questions)]))
                sent += 1
            await asyncio.sleep(0.01)
    return outcomes


def seconds(work: Callable[[], Any]) -> float:
    """Return how long work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.inference_mode()
def bare_pass(model: Model, prompt: Prompt) -> float:
    """Return the seconds of one plain pass over as many tokens as the question's tree has."""
    ids = torch.from_numpy(build_tree(prompt).tokens)[None].long()
    return seconds(lambda: model.hf.base_model(input_ids=ids, use_cache=False))


PARTS: dict[str, Callable[[Case], None]] = {
    "start": lambda _: None,
    "saturated": saturated,
    "one": one_at_a_time,
    "input": over_one_input,
    "recurring": recurring,
    "overload": overload,
}
"""What `--only` names; the start needs nothing of the rest and comes before it."""


if __name__ == "__main__":
    main()
