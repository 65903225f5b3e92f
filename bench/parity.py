"""Compare our log-probabilities with those of lm-eval's HFLM on the paper's seven tasks, 0-shot and few-shot.

    python bench/parity.py --data DIR                               SmolLM2, 100 questions each
    python bench/parity.py --data DIR --model FILE.gguf --questions 20

Prints the largest difference (allowed: max(1e-3, 1e-5 |LL|)) and whether acc and acc_norm are the same question by question.
Questions beyond the tolerance are scored once more in float64, option by option, to see who is off.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.data.splits import sample
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import prepare
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, Rendered

TASKS = ("commonsense_qa", "race", "mmlu", "arc_challenge", "hellaswag:validation", "openbookqa", "mathqa")


def main() -> None:
    """Compare and print a line per task and number of shots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--shots", type=int, nargs="*", default=[0, 5])
    parser.add_argument("--tasks", nargs="*", default=TASKS)
    parser.add_argument("--batch-size", type=int, default=4, help="of HFLM, which holds the logits of all positions")
    args = parser.parse_args()
    model = load_model(args.model)
    for task in args.tasks:
        for shots in args.shots:
            try:
                questions = some_of(task, shots, args.data, args.questions)
            except CoralError as error:
                print(f"{task:<22} {shots}-shot: not compared: {error}", flush=True)
                continue
            print(
                f"{task:<22} {shots}-shot, {len(questions):4d} questions: {compare(model, questions, args.batch_size)}",
                flush=True,
            )


def some_of(task: str, shots: int, data: Path | None, n: int) -> list[Question]:
    """Return n questions of a task; of a group such as mmlu, a few of each of its tasks."""
    limit = 2 if task == "mmlu" else n
    questions = load_questions(task, TaskOptions(num_fewshot=shots, data_dir=data, limit=limit))
    return sample(questions, n, seed=0)


def compare(model: Model, questions: list[Question], batch_size: int) -> str:
    """Return the largest difference and the agreement of both accuracies."""
    asked = prepare(questions, Style(), model)
    ours = our_logprobs(model, asked.prompts)
    theirs = hflm_logprobs(model, asked.rendered, batch_size)
    gaps = [np.abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    excess = [(g - np.maximum(1e-3, 1e-5 * np.abs(b))).max() for g, b in zip(gaps, theirs, strict=True)]
    lengths = [np.array([len(c) for c in r.choices]) for r in asked.rendered]
    acc = [int(np.argmax(a)) == int(np.argmax(b)) for a, b in zip(ours, theirs, strict=True)]
    norm = [int(np.argmax(a / n)) == int(np.argmax(b / n)) for a, b, n in zip(ours, theirs, lengths, strict=True)]
    beyond = [i for i, e in enumerate(excess) if e > 0]
    return (
        f"largest difference {max(g.max() for g in gaps):.1e}, beyond the tolerance {len(beyond)}"
        f"{judged(model, [(asked.prompts[i], ours[i], theirs[i]) for i in beyond])}; "
        f"same choice by acc {sum(acc)}/{len(acc)}, by acc_norm {sum(norm)}/{len(norm)}"
    )


def judged(model: Model, beyond: list[tuple[Prompt, np.ndarray, np.ndarray]]) -> str:
    """Return how far either side is from float64 on the questions beyond the tolerance."""
    if not beyond:
        return ""
    exact = exact_logprobs(model, [prompt for prompt, _, _ in beyond])
    off = [max(np.abs(some[k] - e).max() for some, e in zip(beyond, exact, strict=True)) for k in (1, 2)]
    return f" (from float64: ours {off[0]:.1e}, HFLM {off[1]:.1e})"


@torch.inference_mode()
def exact_logprobs(model: Model, prompts: list[Prompt]) -> list[np.ndarray]:
    """Return the log-probabilities by one plain pass per option in float64; the weights are float32 again afterwards."""
    found = []
    model.hf.double()
    try:
        for prompt in prompts:
            sums = []
            for context, option in zip(prompt.contexts, prompt.options, strict=True):
                logits = model.hf(torch.tensor([context + option])).logits[0, len(context) - 1 : -1]
                sums.append(float(logits.log_softmax(-1).gather(1, torch.tensor(option)[:, None]).sum()))
            found.append(np.array(sums))
    finally:
        model.hf.float()
    return found


def our_logprobs(model: Model, prompts: tuple[Prompt, ...]) -> list[np.ndarray]:
    """Return the summed log-probabilities of each question's options."""
    found: list[np.ndarray] = [np.zeros(0)] * len(prompts)
    for scored in score(model, prompts, plan_for(prompts, token_budget=TOKEN_BUDGET, border=model.rope_border)):
        edges = scored.batch.option_offsets
        for i, q in enumerate(scored.batch.questions):
            found[q] = scored.logprobs[edges[i] : edges[i + 1]].numpy()
    return found


def hflm_logprobs(model: Model, rendered: tuple[Rendered, ...], batch_size: int) -> list[np.ndarray]:
    """Return what lm-eval's HFLM gives for the same requests."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model.hf, tokenizer=model.tokenizer, batch_size=batch_size, max_length=model.max_length)
    requests = [
        Instance("loglikelihood", {}, pair, i)
        for r in rendered
        for i, pair in enumerate(zip(r.contexts, r.continuations, strict=True))
    ]
    with torch.inference_mode():
        values = iter(float(value) for value, _ in lm.loglikelihood(requests, disable_tqdm=True))
    return [np.array([next(values) for _ in r.choices]) for r in rendered]


if __name__ == "__main__":
    main()
