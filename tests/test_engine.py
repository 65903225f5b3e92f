"""The engine scores a packed tree exactly as plain passes would, and leaves the model as it found it."""
import torch
from conftest import make_model, toy_questions
from coral_lens.engine import PooledResidual, plan_for, score
from coral_lens.prompts import render, tokenize
from coral_lens.records import Style


def test_smoke(any_tiny):
    qs = toy_questions(9)
    prompts = tokenize(qs, [render(q, Style(), any_tiny) for q in qs], any_tiny)
    out = {}
    for packing in ("tree", "plain"):
        plan = plan_for(prompts, token_budget=300, packing=packing)
        rows = {}
        for s in score(any_tiny, prompts, plan, readers=[PooledResidual((0, 1, 2, 3))]):
            for i, q in enumerate(s.batch.questions):
                sl = slice(s.batch.option_offsets[i], s.batch.option_offsets[i + 1])
                rows[q] = (s.logprobs[sl], {k: v[sl] for k, v in s.readings.items()})
        out[packing] = rows
    for q in range(9):
        torch.testing.assert_close(out["tree"][q][0], out["plain"][q][0], atol=1e-4, rtol=1e-5)
        for k in out["tree"][q][1]:
            torch.testing.assert_close(out["tree"][q][1][k], out["plain"][q][1][k], atol=1e-4, rtol=1e-4)
