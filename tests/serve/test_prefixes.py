"""A text that comes again is computed once and known from the third time on, and no answer changes by more than rounding."""

from __future__ import annotations

from typing import Any

import pytest
from support.servers import Running, Shop, running, settings

from coral_lens.records import Prompt, Question
from coral_lens.serve.prefixes import RECENT, STEP, RecurringPrefixes
from coral_lens.serve.settings import Batching

TEXT = "The committee met on Tuesday and put off the vote until the spring of the next year. " * 4
OTHER = "Rain fell on the hills all night, and in the morning the river stood above the bridge. " * 4


def body(*questions: str, context: str = TEXT) -> dict[str, Any]:
    rows = [{"question": q, "options": ["the vote", "the bridge", "nothing"], "context": context} for q in questions]
    return {"lens": "second", "questions": rows}


def test_a_text_that_comes_again_is_known_and_answers_stay_the_same(shop: Shop) -> None:
    with running(shop.model, shop.lenses) as server, server.client() as client:
        asked = [f"What was put off, number {i}?" for i in range(4)]
        replies = [client.post("/v1/predict", json=body(text)).json() for text in asked]
        several = client.post("/v1/predict", json=body("What?", "Who?", "When?")).json()
        others = client.post("/v1/predict", json=body("What?", context=OTHER)).json()
        metrics = client.get("/metrics").text
    cached = [reply["cached_tokens"] for reply in replies]
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[3] >= len(TEXT) // STEP * STEP - STEP  # of this model, a letter is a token
    assert several["cached_tokens"] == 3 * cached[2]
    assert others["cached_tokens"] == 0
    assert f"coral_cached_tokens_total {5.0 * cached[2]}" in metrics
    questions = [
        Question(q, q, q, ("the vote", "the bridge", "nothing"), passage=TEXT)
        for q in [*asked, "What?", "Who?", "When?"]
    ]
    wanted = shop.lens("second").predict(shop.model, questions)
    found = [answer for reply in (*replies, several) for answer in reply["answers"]]
    for answer, known in zip(found, wanted, strict=True):
        assert answer["probs"] == pytest.approx(list(known.probs), abs=1e-4)
        assert answer["shift"] == pytest.approx(known.shift, rel=1e-3)


def test_openai_clients_are_told_what_was_known(server: Running) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    predicate = {"type": "predicate", "instructions": "It rained."}
    usages = [client.decisions.create(model="first", input=OTHER, questions=[predicate]).usage for _ in range(3)]
    assert [usage.input_tokens_details.cached_tokens > 0 for usage in usages] == [False, False, True]


@pytest.mark.parametrize("batching", [Batching(cache_mb=0), Batching(one_by_one=True)])
def test_without_a_cache_nothing_is_known(shop: Shop, batching: Batching) -> None:
    with running(shop.model, shop.lenses, settings(batching=batching)) as server, server.client() as client:
        cached = [client.post("/v1/predict", json=body("What?")).json()["cached_tokens"] for _ in range(3)]
    assert cached == [0, 0, 0]


def prompt(*context: int) -> Prompt:
    return Prompt("p", (context, context), ((1,), (2,)))


def test_what_two_texts_share_is_kept_in_steps_and_what_is_short_is_not() -> None:
    prefixes = RecurringPrefixes(2**20)
    long, other = tuple(range(200)), (*range(150), *range(900, 950))
    assert prefixes.kept([prompt(*long)])[0].lengths == (0,)
    kept, known = prefixes.kept([prompt(*other), prompt(*range(STEP))])
    assert (kept.lengths, known) == ((2 * STEP, 0), (0, 0))
    # nothing was computed meanwhile, so nothing is known
    assert prefixes.kept([prompt(*long)])[1] == (0,)


def test_only_the_last_contexts_are_remembered() -> None:
    prefixes = RecurringPrefixes(2**20)
    for i in range(RECENT + 1):
        prefixes.kept([prompt(i, *range(1000, 1200))])
    assert prefixes.kept([prompt(0, *range(1000, 1200))])[0].lengths == (0,)
    assert prefixes.kept([prompt(RECENT, *range(1000, 1200))])[0].lengths == (3 * STEP,)
