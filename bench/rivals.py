"""Exact scores a second of our engine and of what else a user of a CPU could pick, in one run, in turns, on the same questions.

    python bench/rivals.py --data DIR --task arc_challenge --questions 40 --rounds 3

- ours, in each arithmetic;
- lm-eval's HFLM in float32 and in bfloat16, with a fixed batch size;
- OpenVINO through lm-eval's `openvino` backend, in float32 and in bfloat16, if `optimum-intel[openvino]` is installed (it asks
  for an older transformers than ours, so it wants an environment of its own);
- llama.cpp reading the same tokens one option after the other, if `llama-cpp-python` is installed: of that the tokens a second.

Log-probabilities of all are compared with ours in float32: a rival that is fast and wrong is no rival.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import render, tokenize
from coral_lens.engine.readers import PooledResidual
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.records import Prompt, Rendered

OURS = ("float32", "mixed", "bfloat16", "int8")
OURS_NAMED = "ours with states, {}"
HINTS = {"float32": "f32", "bfloat16": "bf16"}
"""What OpenVINO calls the arithmetic."""


class Rival(NamedTuple):
    """A contender."""

    name: str
    score: Callable[[], np.ndarray | None]
    """Returns the log-probability of every option, or None where it gives none."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4, help="of HFLM and OpenVINO")
    parser.add_argument("--gguf", type=Path, default=None, help="what llama.cpp reads")
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()
    models = {precision: load_model(args.model, dtype=precision) for precision in OURS}
    first = models["float32"]
    questions = load_questions(args.task, TaskOptions(limit=args.questions, data_dir=args.data))
    rendered = [render(q, Style(), first) for q in questions]
    prompts = tokenize(questions, rendered, first)
    with tempfile.TemporaryDirectory() as folder:
        rivals = [ours(name, model, prompts) for name, model in models.items()]
        rivals += [hflm(f"HFLM, {name}", models[name], rendered, args.batch_size) for name in HINTS]
        if find_spec("optimum"):
            rivals += openvino(first, rendered, args.batch_size, Path(folder))
        if args.gguf and find_spec("llama_cpp"):
            rivals.append(llama_cpp(args.gguf, prompts))
        n_tokens = sum(len(c) + len(o) for p in prompts for c, o in zip(p.contexts, p.options, strict=True))
        print(
            f"{args.task}, {len(questions)} questions, {n_tokens} tokens in rows of one option each; "
            f"{torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}"
        )
        print_rates(rivals, args.rounds, len(questions), n_tokens)


def ours(name: str, model: Model, prompts: list[Prompt]) -> Rival:
    """Return our engine, with the states of all layers."""

    def run() -> np.ndarray:
        plan = plan_for(prompts, token_budget=TOKEN_BUDGET)
        found: dict[int, list[float]] = {}
        for batch in score(model, prompts, plan, readers=[PooledResidual(tuple(range(model.n_layers + 1)))]):
            edges = batch.batch.option_offsets
            for i, question in enumerate(batch.batch.questions):
                found[question] = batch.logprobs[edges[i] : edges[i + 1]].tolist()
        return np.array([value for i in range(len(prompts)) for value in found[i]])

    return Rival(OURS_NAMED.format(name), run)


def requests_of(rendered: Sequence[Rendered]) -> list[Any]:
    """Return lm-eval's requests."""
    from lm_eval.api.instance import Instance

    pairs = [pair for r in rendered for pair in zip(r.contexts, r.continuations, strict=True)]
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def lm_eval_rival(name: str, lm: Any, rendered: Sequence[Rendered]) -> Rival:
    """Return a model of lm-eval."""
    requests = requests_of(rendered)
    return Rival(name, lambda: np.array([found[0] for found in lm.loglikelihood(requests, disable_tqdm=True)]))


def hflm(name: str, model: Model, rendered: Sequence[Rendered], batch_size: int) -> Rival:
    """Return lm-eval's own model on the weights of ours."""
    from lm_eval.models.huggingface import HFLM

    return lm_eval_rival(name, HFLM(pretrained=model.hf, tokenizer=model.tokenizer, batch_size=batch_size), rendered)


def openvino(model: Model, rendered: Sequence[Rendered], batch_size: int, folder: Path) -> list[Rival]:
    """Return lm-eval's OpenVINO backend on the same weights, in float32 and in bfloat16."""
    from lm_eval.models.optimum_lm import OptimumLM

    model.hf.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    rivals = []
    for name, hint in HINTS.items():
        config = folder / f"{hint}.json"
        config.write_text(json.dumps({"INFERENCE_PRECISION_HINT": hint}), "utf-8")
        lm = OptimumLM(pretrained=str(folder / "model"), batch_size=batch_size, ov_config=str(config), export=True)
        rivals.append(lm_eval_rival(f"OpenVINO, {name}", lm, rendered))
    return rivals


def llama_cpp(path: Path, prompts: Sequence[Prompt]) -> Rival:
    """Return llama.cpp, which reads every option's row; it gives no log-probabilities here."""
    from llama_cpp import Llama

    llama = Llama(
        str(path), n_ctx=2048, n_batch=512, n_threads=torch.get_num_threads(), logits_all=False, verbose=False
    )

    def run() -> None:
        for prompt in prompts:
            for context, option in zip(prompt.contexts, prompt.options, strict=True):
                llama.reset()
                llama.eval([*context, *option])

    return Rival(f"llama.cpp, {path.stem}", run)


def print_rates(rivals: Sequence[Rival], rounds: int, n_questions: int, n_tokens: int) -> None:
    """Let all take turns, and print their rates, ours in the same arithmetic relative to theirs, and how far scores differ."""
    exact = rivals[0].score()
    assert exact is not None
    differences = {}
    for rival in rivals:
        start = time.perf_counter()
        differences[rival.name] = difference(rival.score(), exact)
        print(f"warmed up: {rival.name}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    seconds: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    for i in range(rounds):
        for rival in rivals[i % len(rivals) :] + rivals[: i % len(rivals)]:
            start = time.perf_counter()
            rival.score()
            seconds[rival.name].append(time.perf_counter() - start)
    print(
        f"| | questions/s | tokens/s | {OURS_NAMED.format('float32')} is so many times as fast | the same arithmetic | scores |"
    )
    print("|---|---|---|---|---|---|")
    for name, taken in seconds.items():
        alike = next((p for p in OURS[::-1] if name.endswith(p)), "float32")
        same, usual = (times(taken, seconds[OURS_NAMED.format(p)]) for p in (alike, "float32"))
        rate = n_questions / statistics.median(taken)
        print(
            f"| {name} | {rate:.2f} | {n_tokens / statistics.median(taken):.0f} | {usual} | {same} | {differences[name]} |"
        )


def times(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Return how many times as long theirs takes: the median over rounds, with the least and the greatest."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def difference(found: np.ndarray | None, exact: np.ndarray) -> str:
    """Say how far log-probabilities are from ours in float32."""
    if found is None:
        return "no log-probabilities"
    moved = np.abs(found - exact)
    return f"log-probabilities differ by {np.median(moved):.4f} in the median, {moved.max():.3f} at most"


if __name__ == "__main__":
    main()
