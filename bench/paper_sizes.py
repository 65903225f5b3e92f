"""What a batch costs a model of the paper's size, which is not at hand here: tokens, FLOPs and memory on real questions.

    python bench/paper_sizes.py --data DIR --task arc_challenge --tokens 2048

The questions are laid out by the engine itself; the model is a configuration without weights (torch's `meta` device), whose
products torch's own counter adds up. Nothing is timed. Tokens are those of SmolLM2's tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from coral_lens.data.questions import load_questions
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.engine._flex import block_mask
from coral_lens.engine.batches import Batch, lay_out
from coral_lens.engine.loading import load_model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import prepare

SEVEN = LlamaConfig(
    vocab_size=32_000,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
"""Mistral 7B's sizes."""
GIB = 2**30


def main() -> None:
    """Work it out and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="arc_challenge:validation")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--data", type=Path, default=None)
    args = parser.parse_args()
    prompts = prepare(
        load_questions(args.task, TaskOptions(limit=args.questions, data_dir=args.data)), Style(), load_model("smollm2")
    ).prompts
    plan = plan_for(prompts, token_budget=args.tokens)
    batch = lay_out(prompts, max(plan.batches, key=lambda b: len(b.questions)), joined=True)
    plain = sum(
        len(c) + len(o) for q in batch.questions for c, o in zip(prompts[q].contexts, prompts[q].options, strict=True)
    )
    with torch.device("meta"):
        hf = LlamaForCausalLM(SEVEN).to(torch.bfloat16)
    print_costs(args.task, batch, plain, hf)


def print_costs(task: str, batch: Batch, plain: int, hf: LlamaForCausalLM) -> None:
    """Print tokens, FLOPs and memory of one batch."""
    assert batch.allowed is not None
    n, heads = batch.input_ids.numel(), SEVEN.num_attention_heads
    size = SEVEN.hidden_size // heads
    sparsity = float(block_mask(batch.allowed).sparsity()) / 100
    layers = SEVEN.num_hidden_layers
    dense = 4 * n * n * heads * size * layers
    scored = len(torch.unique(batch.before_tokens))
    weights = sum(p.numel() for p in hf.parameters())
    print(f"{task}: {len(batch.questions)} questions, {batch.n_options} options, {weights / 1e9:.1f} G weights")
    print(f"tokens: {n} in the tree, {plain} with a row for each option ({plain / n:.2f} times)")
    print(f"products with weights: {products(hf, n) / 1e12:.1f} TFLOP")
    kept = dense * (1 - sparsity)
    print(
        f"attention: {dense / 1e12:.2f} TFLOP under a dense mask, {kept / 1e12:.2f} in squares ({sparsity:.0%} skipped)"
    )
    head = 2 * scored * SEVEN.hidden_size * SEVEN.vocab_size
    print(
        f"head: {head / 1e12:.2f} TFLOP on the rows that predict an option's token, {head * n / scored / 1e12:.2f} on all"
    )
    cache = 2 * layers * SEVEN.num_key_value_heads * size * 2 * n
    streams = n * (2 * SEVEN.hidden_size + 2 * SEVEN.intermediate_size) * 2
    pooled = batch.n_options * SEVEN.hidden_size * (layers + 1) * 4
    print(
        f"memory: weights {2 * weights / GIB:.1f} GiB in bfloat16; of the batch: one block's activations {streams / GIB:.2f}, "
        f"logits {4 * scored * SEVEN.vocab_size / GIB:.2f}, pooled states of all layers {pooled / GIB:.3f}, dense mask "
        f"{2 * n * n / GIB:.3f}, keys and values, if they were kept, {cache / GIB:.2f} GiB"
    )


def products(hf: LlamaForCausalLM, n: int) -> int:
    """Return the operations of all products with the weights of the blocks, as torch counts them."""
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        mask, positions = torch.zeros(1, 1, n, n, dtype=torch.bfloat16), torch.zeros(1, n, dtype=torch.int64)
        hf.model(input_ids=positions, position_ids=positions, attention_mask=mask, use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    return sum(value for name, value in counts.items() if "attention" not in str(name) and "bmm" not in str(name))


if __name__ == "__main__":
    main()
