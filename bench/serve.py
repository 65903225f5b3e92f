"""A server on loopback in a process of its own: its throughput, its latency, and what questions over one input share.

    python bench/serve.py --data DIR
    OMP_WAIT_POLICY=PASSIVE python bench/serve.py --questions 64 --clients 32 --rounds 2     small, on a machine in use

Saturated: clients that each send the next question as soon as the last is answered, against `Lens.predict` on the same
questions in one call. One at a time: the median time of a request against that of the bare forward pass of its tokens. One
input: 20 questions over about 1,000 tokens in one request, against 20 requests one after the other. The server and this
process take turns, since both need all cores; machines are noisy, so medians over rounds are compared.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.prompts import prepare
from coral_lens.engine.trees import build_tree
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Prompt, Question

OVER_ONE_INPUT = 20
SENTENCE = "The committee met on Tuesday, heard the report of the treasurer, and put off the vote until spring. "


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task", default="arc_easy:validation")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()
    print(f"{args.model}, {torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}")
    questions = load_questions(args.task, TaskOptions(limit=args.questions + 60, data_dir=args.data))
    # as a client would ask them: text and options, without the template of a task
    questions = [Question(q.id, q.id, q.text, q.options) for q in questions]
    model = load_model(args.model, dtype=args.dtype)
    labelled = [Question(q.id, q.id, q.text, q.options, i % 2) for i, q in enumerate(questions[:60])]
    lens = fit(model, labelled, FitSettings(layers=(model.n_layers // 2,)), bar=False)
    with tempfile.TemporaryDirectory() as folder:
        lens.save(Path(folder) / "lens")
        with served(Path(folder) / "lens", args.model, args.dtype) as client:
            compare(client, model, lens, questions[60:], args)


@contextmanager
def served(lens: Path, model: str, dtype: str) -> Iterator[httpx2.Client]:
    """Serve a lens in a process of its own; yield a client."""
    words = ["serve", "--lens", f"lens={lens}", "--model", model, "--dtype", dtype, "--port", "0"]
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "coral_lens", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.match(r"http://\S+", process.stdout.readline())
        assert found, "it comes up"
        print(f"ready after {time.perf_counter() - start:.1f} s")
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        with httpx2.Client(base_url=found[0], timeout=600, limits=limits) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def compare(client: httpx2.Client, model: Model, lens: Lens, questions: Sequence[Question], args: Any) -> None:
    """Print the three comparisons."""
    rows = [row_of(q) for q in questions]
    lens.predict(model, questions)
    saturated, offline = [], []
    for _ in range(args.rounds):
        with ThreadPoolExecutor(args.clients) as pool:
            saturated.append(len(rows) / seconds(lambda pool=pool: list(pool.map(lambda row: ask(client, row), rows))))
        offline.append(len(rows) / seconds(lambda: lens.predict(model, questions)))
    served_rate, own_rate = statistics.median(saturated), statistics.median(offline)
    print(
        f"saturated, {args.clients} clients: {served_rate:.1f} questions/s; offline {own_rate:.1f}; "
        f"{served_rate / own_rate:.2f} of it"
    )
    prompts = prepare(questions, Style(), model).prompts[:40]
    one, bare = [], []
    for row, prompt in zip(rows, prompts, strict=False):
        one.append(seconds(lambda row=row: ask(client, row)))
        bare.append(bare_pass(model, prompt))
    p50, floor = statistics.median(one), statistics.median(bare)
    print(f"one at a time: p50 {1000 * p50:.0f} ms; bare pass {1000 * floor:.0f} ms; {p50 / floor:.2f} times it")
    passage = SENTENCE * 50
    shared = [{**row, "context": passage} for row in rows[:OVER_ONE_INPUT]]
    together, apart = [], []
    for _ in range(args.rounds):
        together.append(seconds(lambda: ask(client, *shared)))
        apart.append(seconds(lambda: [ask(client, row) for row in shared]))
    ratio = statistics.median(apart) / statistics.median(together)
    print(
        f"{len(shared)} questions over one input of {len(model.tokenizer.encode(passage))} tokens: in one request "
        f"{statistics.median(together):.2f} s, in as many requests {statistics.median(apart):.2f} s; {ratio:.1f} times"
    )


def row_of(question: Question) -> dict[str, Any]:
    """Return a question as our route takes it."""
    return {"id": question.id, "question": question.text, "options": list(question.options)}


def ask(client: httpx2.Client, *rows: dict[str, Any]) -> None:
    """Send questions in one request."""
    client.post("/v1/predict", json={"questions": list(rows)}).raise_for_status()


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


if __name__ == "__main__":
    main()
