"""One question: from the shell to its answer, and in a warm process against the bare forward pass of its tokens.

    python bench/one_question.py --data DIR

From the shell: `coral predict` of one question, several times in processes of their own, by the time on the wall; and how much
of that is importing. Warm: each question is answered alone, and its tokens are run through the model's blocks alone, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.engine.prompts import prepare
from coral_lens.engine.trees import build_tree
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.records import Prompt

IMPORTS = "import torch, transformers, coral_lens.cli, coral_lens.lens.artefact, coral_lens.engine.loading"
QUESTION = {"id": "one", "question": "Which of these is a colour?", "options": ["red", "a table", "seven", "loud"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--train", default="arc_challenge:train")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--runs", type=int, default=5, help="from the shell")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "mixed", "bfloat16"])
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()
    print(f"{args.model}, {torch.get_num_threads()} threads, load of the machine {os.getloadavg()[0]:.1f}")
    questions = load_questions(args.task, TaskOptions(limit=args.questions, data_dir=args.data))
    train = load_questions(args.train, TaskOptions(limit=60, data_dir=args.data))
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            model = load_model(args.model, dtype=dtype)
            lens = fit(model, train, FitSettings(layers=(model.n_layers // 2,)), bar=False)
            lens.save(Path(folder) / dtype)
            prompts = prepare(questions, Style(), model).prompts
            lens.predict(model, questions[:1])
            bare, ours = [], []
            for question, prompt in zip(questions, prompts, strict=True):
                bare.append(blocks_alone(model, prompt))
                start = time.perf_counter()
                lens.predict(model, [question])
                ours.append(time.perf_counter() - start)
            ratios = [a / b for a, b in zip(ours, bare, strict=True)]
            print(
                f"warm, {dtype:<9} {spread(ratios)} times the bare pass, which takes {1000 * statistics.median(bare):.0f} ms"
            )
        print(f"importing            {spread([shell([sys.executable, '-c', IMPORTS]) for _ in range(args.runs)])} s")
        for dtype in args.dtypes:
            print(f"from the shell, {dtype:<9} {spread([predict(Path(folder), dtype) for _ in range(args.runs)])} s")


@torch.inference_mode()
def blocks_alone(model: Model, prompt: Prompt) -> float:
    """Return the seconds that a pass of as many tokens takes, without head, hooks and lens."""
    ids = torch.arange(len(build_tree(prompt)))[None] % 1000
    start = time.perf_counter()
    model.hf.base_model(input_ids=ids, use_cache=False)
    return time.perf_counter() - start


def predict(folder: Path, dtype: str) -> float:
    """Answer one question from the shell."""
    (folder / "one.jsonl").write_text(json.dumps(QUESTION), "utf-8")
    files = ["--lens", str(folder / dtype), "--questions", str(folder / "one.jsonl"), "--out", str(folder / "a.jsonl")]
    return shell([sys.executable, "-m", "coral_lens", "predict", *files])


def shell(command: list[str]) -> float:
    """Run a command and return its seconds."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def spread(values: list[float]) -> str:
    """Return the median and the range, as text."""
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
