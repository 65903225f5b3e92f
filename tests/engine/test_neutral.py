"""Options after a neutral context score what a plain pass over that context and the option scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.engine import scoring, shard_work
from coral_lens.engine.activations import JoinedStore, Subset
from coral_lens.engine.extract import extract, score_in_memory
from coral_lens.engine.model import Model
from coral_lens.engine.neutral import neutral_context
from coral_lens.engine.planned import Extraction
from coral_lens.records import Rendered

pytestmark = pytest.mark.usefixtures("one_thread")

WHAT = Extraction(layers=(1,), neutral=True, token_budget=300, packing="tree")


@pytest.mark.parametrize(
    ("context", "left"),
    [
        ("Question: Why?\nAnswer:", "Answer:"),
        ("Article: long\n\nWhy is the sky blue?", ""),
        ("Answer: ", "Answer:"),
        ("It was said: that", ""),
    ],
)
def test_of_a_context_only_its_cue_is_left(tiny: Model, context: str, left: str) -> None:
    assert neutral_context(Rendered((context,) * 2, (" a", " b"), ("a", "b")), tiny) == left


@torch.no_grad()
def plain_logprob(model: Model, context: str, continuation: str) -> float:
    ids = model.tokenizer(context)["input_ids"] or [model.tokenizer.bos_token_id]
    option = model.tokenizer(continuation)["input_ids"]
    logits = model.hf(torch.tensor([ids + option])).logits[0, len(ids) - 1 : -1].double().log_softmax(-1)
    return float(logits.gather(1, torch.tensor(option)[:, None]).sum())


def test_neutral_scores_are_those_of_plain_passes_and_change_nothing_else(tiny: Model, tmp_path: Path) -> None:
    questions = toy_questions(7)
    store = extract(tiny, questions, tmp_path / "store", extraction=WHAT)
    expected = [plain_logprob(tiny, "Answer:", f" {option}") for q in questions for option in q.options]
    neutral = store.table.neutral
    assert neutral is not None
    np.testing.assert_allclose(neutral, expected, atol=1e-4)
    without = extract(tiny, questions, tmp_path / "without", extraction=replace(WHAT, neutral=False))
    assert without.table.neutral is None
    assert "neutral" not in without.manifest
    np.testing.assert_array_equal(store.table.logprobs, without.table.logprobs)
    half = np.arange(7) < 3
    joined = JoinedStore([Subset(store, ~half), Subset(store, half)]).table.neutral
    rows = store.table.options.rows(half)
    np.testing.assert_array_equal(joined, np.concatenate([neutral[~rows], neutral[rows]]))
    assert JoinedStore([Subset(store, half), Subset(without, half)]).table.neutral is None


def test_letters_are_scored_after_a_neutral_context_once_for_all_questions(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    score_plans = scoring.score_plans

    def counting(model: Model, prompts: list, *args: object, **kwargs: object) -> object:
        counted.append(len(prompts))
        return score_plans(model, prompts, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring, "score_plans", counting)
    monkeypatch.setattr(shard_work, "score_plans", counting)
    questions = toy_questions(12)
    table = score_in_memory(tiny, questions, replace(WHAT, style=Style("letters"))).table
    assert counted == [len(questions), len({len(q.options) for q in questions})]
    assert table.neutral is not None
    first = table.neutral[table.options.starts]
    np.testing.assert_allclose(first, first[0])  # the letter A
