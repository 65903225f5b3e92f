"""Candidates a second: our writing of samples against transformers' `generate` with the same sampling, in one run.

    python bench/writing.py --model smollm2 --questions 32 --candidates 8

Both get the same model in float32, the same prompts (worked examples, then a question of TriviaQA), 64 sequences at a time, plain
sampling at the same temperature, and end an answer at its line. `generate` reads a prompt once for every sample and computes on
until the last answer of a batch has ended; here what prompts share is read once, samples of a question share its prompt, and an
answer that has ended is dropped. Counted are the tokens of answers alone. Runs alternate; medians are printed, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from ask import questions_of

from coral_lens.data.settings import Style
from coral_lens.engine.candidates import STOP, as_choice
from coral_lens.engine.generation import generate_answers, prompt_ids
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.prompts import render
from coral_lens.engine.settings import Sampling

AT_A_TIME = 64
"""Sequences of a batch."""


def ours(model: Model, prompts: Sequence[str], sampling: Sampling) -> int:
    """Write with coral-lens and return how many tokens the answers have."""
    answers = generate_answers(model, prompts, settings=sampling.generation(), stop=STOP)
    return sum(sample.n_tokens for samples in answers for sample in samples)


@torch.inference_mode()
def theirs(model: Model, prompts: Sequence[str], sampling: Sampling) -> int:
    """Write with transformers' generate and return how many tokens the answers have, up to the end of their line."""
    ids = prompt_ids(model, prompts, sampling.max_tokens)
    ends = LineEnd(model)
    pad, size, total = model.tokenizer.eos_token_id, AT_A_TIME // sampling.candidates, 0
    for start in range(0, len(ids), size):
        batch = ids[start : start + size]
        width = max(map(len, batch))
        padded = torch.tensor([[pad] * (width - len(row)) + list(row) for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        out = model.hf.generate(  # type: ignore[operator]
            padded, attention_mask=mask, do_sample=True, temperature=sampling.temperature, top_k=0, top_p=1.0,
            num_return_sequences=sampling.candidates, max_new_tokens=sampling.max_tokens, pad_token_id=pad,
            stopping_criteria=[ends],
        )  # fmt: skip
        total += sum(answer_tokens(model, row.tolist()) for row in out[:, width:])
    return total


class LineEnd:
    """Ends each answer of `generate` at its line, by the ids of the tokens that break one: faster than its `stop_strings`."""

    def __init__(self, model: Model) -> None:
        self.tokens = torch.tensor(line_breaks(model.tokenizer))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


@cache
def line_breaks(tokenizer: Any) -> list[int]:
    """Return the tokens that break a line."""
    return [i for i in range(len(tokenizer)) if STOP[0] in tokenizer.decode([i])]


def answer_tokens(model: Model, tokens: Sequence[int]) -> int:
    """Return how many tokens an answer has until its line, or the answer, ends."""
    breaks = set(line_breaks(model.tokenizer))
    for n, token in enumerate(tokens, start=1):
        if token == model.tokenizer.eos_token_id:
            return n - 1
        if token in breaks:
            return n
    return len(tokens)


def rate(write: Callable[[Model, Sequence[str], Sampling], int], model: Model, *rest: object) -> float:
    """Return tokens a second."""
    start = time.perf_counter()
    tokens = write(model, *rest)  # type: ignore[arg-type]
    return tokens / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--candidates", type=int, default=Sampling.candidates)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model, sampling = load_model(args.model, dtype="float32"), Sampling(candidates=args.candidates)
    asked = [as_choice(q, ("?",), (0, 0), sampling) for q in questions_of("triviaqa", args.questions)]
    prompts = [render(q, Style(), model).contexts[0] for q in asked]
    found: dict[str, list[float]] = {"coral-lens": [], "transformers": []}
    for round_number in range(args.rounds + 1):
        for name, write in (("coral-lens", ours), ("transformers", theirs)):
            measured = rate(write, model, prompts, sampling)
            print(f"round {round_number}: {name} {measured:.1f} tokens/s", flush=True)
            if round_number or not args.rounds:  # the first warms up
                found[name].append(measured)
    for name, rates in found.items():
        print(f"{name}: {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})")
    ratios = [a / b for a, b in zip(*found.values(), strict=True)]
    print(f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}) as fast (wanted: 2)")


if __name__ == "__main__":
    main()
