"""On the real embedded model, log-probabilities are those of lm-eval's own HFLM, and so are its accuracies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support.models import make_hflm

from coral_lens.data.settings import TaskOptions
from coral_lens.data.tasks import load_task
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import tokenize
from coral_lens.engine.scoring import TOKEN_BUDGET, score
from coral_lens.ragged import Options
from coral_lens.records import Prompt, Question, Rendered

TASKS = ("arc_easy", "hellaswag", "openbookqa", "commonsense_qa")
N_QUESTIONS = 12


@pytest.fixture(scope="module")
def hflm(smollm2: Model) -> HFLM:
    return make_hflm(smollm2, batch_size=16)


def rendered_of(questions: Sequence[Question]) -> list[Rendered]:
    return [q.rendered for q in questions if q.rendered is not None]


def ours(model: Model, prompts: Sequence[Prompt]) -> np.ndarray:
    """Log-probabilities of all options, question by question."""
    rows: dict[int, np.ndarray] = {}
    for scored in score(model, prompts, plan_for(prompts, token_budget=TOKEN_BUDGET)):
        edges = scored.batch.option_offsets
        for i, question in enumerate(scored.batch.questions):
            rows[question] = scored.logprobs[edges[i] : edges[i + 1]].numpy()
    return np.concatenate([rows[i] for i in range(len(prompts))])


def theirs(hflm: HFLM, rendered: Sequence[Rendered]) -> np.ndarray:
    pairs = [pair for r in rendered for pair in zip(r.contexts, r.continuations, strict=True)]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    return np.array([logprob for logprob, _ in hflm.loglikelihood(requests, disable_tqdm=True)])


class Referee:
    """Decides where rounding alone makes two float32 results differ: all arithmetic in float64, one option at a time."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @cached_property
    def hf(self) -> torch.nn.Module:
        return deepcopy(self.model.hf).double()

    @torch.inference_mode()
    def logprob(self, context: tuple[int, ...], option: tuple[int, ...]) -> float:
        logits = self.hf(torch.tensor([context + option])).logits[0, len(context) - 1 : -1]
        return float(logits.log_softmax(dim=-1).gather(1, torch.tensor(option)[:, None]).sum())

    def judge(self, prompts: Sequence[Prompt], found: np.ndarray, expected: np.ndarray) -> np.ndarray:
        """Return `expected`, corrected where the two differ by more than is allowed."""
        pairs = [pair for p in prompts for pair in zip(p.contexts, p.options, strict=True)]
        verdict = expected.copy()
        for row in np.flatnonzero(np.abs(found - expected) > tolerance(expected)):
            verdict[row] = self.logprob(*pairs[row])
        return verdict


@pytest.fixture(scope="module")
def referee(smollm2: Model) -> Referee:
    return Referee(smollm2)


def tolerance(logprobs: np.ndarray) -> np.ndarray:
    return np.maximum(1e-3, 1e-5 * np.abs(logprobs))


def hits(scores: np.ndarray, questions: Sequence[Question]) -> list[bool]:
    """For each question, whether the option of the highest score is the answer."""
    parts = np.split(scores, Options.of_sizes([len(q.options) for q in questions]).starts[1:])
    return [int(np.argmax(part)) == q.answer for part, q in zip(parts, questions, strict=True)]


def assert_parity(questions: Sequence[Question], model: Model, hflm: HFLM, referee: Referee) -> None:
    """Log-probabilities are HFLM's, and so are the accuracies `acc` and `acc_norm`."""
    rendered = rendered_of(questions)
    prompts = tokenize(questions, rendered, model)
    found, expected = ours(model, prompts), theirs(hflm, rendered)
    expected = referee.judge(prompts, found, expected)
    assert (np.abs(found - expected) <= tolerance(expected)).all()
    assert hits(found, questions) == hits(expected, questions)
    lengths = np.array([len(choice) for r in rendered for choice in r.choices])
    assert hits(found / lengths, questions) == hits(expected / lengths, questions)


@pytest.mark.parametrize("task", TASKS)
def test_log_probabilities_and_accuracies_are_those_of_lm_eval(
    task: str, smollm2: Model, hflm: HFLM, referee: Referee
) -> None:
    questions = load_task(task, TaskOptions(split="validation", limit=N_QUESTIONS))
    assert len(rendered_of(questions)) == N_QUESTIONS
    assert_parity(questions, smollm2, hflm, referee)


def prefix_lengths(questions: Sequence[Question], model: Model) -> set[int]:
    prompts = tokenize(questions, rendered_of(questions), model)
    return {n for batch in plan_for(prompts, token_budget=TOKEN_BUDGET).batches for n in batch.prefixes}


def test_five_shots_that_all_questions_share_give_lm_evals_numbers(
    smollm2: Model, hflm: HFLM, referee: Referee
) -> None:
    questions = load_task("mmlu_high_school_psychology", TaskOptions(num_fewshot=5, limit=5))
    (shared,) = prefix_lengths(questions, smollm2)
    assert shared > 300, "description and shots are computed once"
    assert_parity(questions, smollm2, hflm, referee)


def test_shots_that_differ_from_question_to_question_give_lm_evals_numbers(
    smollm2: Model, hflm: HFLM, referee: Referee, tmp_path: Path
) -> None:
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / "train.jsonl").write_text("".join(json.dumps(shot(n)) + "\n" for n in range(2, 12)))
    options = TaskOptions(split="validation", num_fewshot=3, limit=5, data_dir=tmp_path)
    questions = load_task("arc_easy", options)
    beginnings = {r.contexts[0][:30] for r in rendered_of(questions)}
    assert len(beginnings) > 3
    assert_parity(questions, smollm2, hflm, referee)


def shot(n: int) -> dict[str, object]:
    """A worked example of ARC."""
    choices = {"text": [f"{n * k}" for k in (1, 2, 3, 4)], "label": ["A", "B", "C", "D"]}
    return {
        "id": f"s{n}",
        "question": f"{n} boats carry {n} nets each. How many?",
        "choices": choices,
        "answerKey": "B",
    }


def test_the_referee_agrees_where_no_rounding_is_in_doubt(smollm2: Model, referee: Referee) -> None:
    (question,) = load_task("arc_easy", TaskOptions(split="validation", limit=1))
    (prompt,) = tokenize([question], rendered_of([question]), smollm2)
    found = ours(smollm2, [prompt])
    expected = np.array([referee.logprob(c, o) for c, o in zip(prompt.contexts, prompt.options, strict=True)])
    assert (np.abs(found - expected) <= tolerance(expected)).all()
    # a wrong result does not pass because the referee is asked: it is the referee's number that counts
    wrong = found + 0.1
    assert np.abs(referee.judge([prompt], wrong, found) - wrong).min() > 0.09
