"""The text of an option is found where the prompt lists it, to the token, and its states are those of a plain pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import make_model
from support.plain_passes import by_option, options, plain_states, run
from support.questions import toy_questions

from coral_lens.data.settings import Style
from coral_lens.engine.activations import ActivationStore, JoinedStore, Subset
from coral_lens.engine.extract import extract, score_in_memory
from coral_lens.engine.hooks import Site
from coral_lens.engine.listings import listed_in
from coral_lens.engine.model import Model
from coral_lens.engine.packing import plan_for
from coral_lens.engine.planned import Extraction
from coral_lens.engine.prompts import prepare
from coral_lens.engine.readers import PooledResidual
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, Rendered

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = Style("letters")
PLACES = ("answer", "listed", "context")
WHAT = Extraction(layers=(0, 2), style=LETTERS, read=PLACES, token_budget=400, packing="tree")


def rendered(context: str, letters: str) -> Rendered:
    return Rendered((context,) * len(letters), tuple(f" {c}" for c in letters), tuple(letters))


def texts(context: str, letters: str, last: str = "") -> list[str]:
    return [context[start:stop] for start, stop in listed_in(context, rendered(context, letters), last)]


def test_listed_options_are_found_behind_the_letters_that_are_scored() -> None:
    asked = "Question: Where is a bank?\nA. by a river\nB. in town\nC. nowhere\nAnswer:"
    assert texts(asked, "ABC") == ["by a river", "in town", "nowhere"]
    assert texts(asked, "XYZ") == []
    assert texts("Question: Where is a bank?\nAnswer:", "AB") == []


def test_of_worked_examples_the_last_list_is_read() -> None:
    shots = "Q\nA. no\nB. yes\nAnswer: B\n\nWhich?\nA. red\nB. blue\nAnswer:"
    assert texts(shots, "AB") == ["red", "blue"]


def test_the_end_of_a_chats_turn_is_no_part_of_the_last_option() -> None:
    chat = "<user>\nWhich?\nA. red\nB. blue\nor green\nAnswer:<end>\n<assistant>\n"
    assert texts(chat, "AB", last="blue\nor green") == ["red", "blue\nor green"]
    assert texts(chat, "AB") == ["red", "blue"]  # where the option is not known, its first line


@pytest.mark.parametrize("packing", ["tree", "plain"])
@pytest.mark.parametrize("bos", [False, True])
def test_states_of_listed_texts_and_of_the_last_context_token_are_those_of_a_plain_pass(
    packing: str, bos: bool
) -> None:
    model = make_model("llama", bos=bos)
    # twice the same question: what they share is computed once, but not their lists, which are read
    questions = [replace(q, id=f"{q.id}{twin}") for q in toy_questions(6) for twin in "ab"]
    prompts = prepare(questions, LETTERS, model, listed=True).prompts
    tokenizer = model.tokenizer
    for question, prompt in zip(questions, prompts, strict=True):
        found = [tokenizer.decode(prompt.contexts[0][start:stop]) for start, stop in prompt.listed]
        assert found == [option.strip() for option in question.options]
    readers = [PooledResidual((1, 3), "listed"), PooledResidual((1, 3), "context")]
    batches = run(model, prompts, packing=packing, readers=readers)  # type: ignore[arg-type]
    spans = [span for prompt in prompts for span in prompt.listed]
    pairs = options(prompts)
    for layer in (1, 3):
        site = Site("residual", layer)
        plain = [plain_states(model, *pair, site) for pair in pairs]
        listed = torch.stack([s[start:stop].mean(0) for s, (start, stop) in zip(plain, spans, strict=True)])
        stems = torch.stack([s[len(context) - 1] for s, (context, _) in zip(plain, pairs, strict=True)])
        for name, expected in ((f"listed.{layer}", listed), (f"context.{layer}", stems)):
            ours = by_option(batches, [scored.readings[name] for scored in batches])
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_list_that_is_read_is_in_no_shared_prefix() -> None:
    context = tuple(range(200))
    twins = [Prompt(name, (context,) * 2, ((1,), (2,)), listed=((150, 152), (170, 175))) for name in "ab"]
    assert plan_for(twins, token_budget=500).batches[0].prefixes == (150,)
    assert plan_for([replace(p, listed=()) for p in twins], token_budget=500).batches[0].prefixes == (199,)


def test_a_cut_context_still_knows_where_its_list_is() -> None:
    model = make_model("llama", max_length=120)
    long = Question("q", "q", "so " * 60 + "?", ("a very long option", "short"), 0)
    (prompt,) = prepare([long], LETTERS, model, listed=True).prompts
    assert prompt.truncated
    assert [model.tokenizer.decode(prompt.contexts[0][a:b]) for a, b in prompt.listed] == list(long.options)


def test_a_list_that_does_not_fit_leaves_its_question_out_by_name() -> None:
    model, short = make_model("llama", max_length=60), Question("fits", "g", "?", ("a", "b"), 0)
    long = Question("too long", "h", "?", ("x" * 50, "y" * 20), 0)
    prepared = prepare([short, long], LETTERS, model, listed=True)
    assert [q.id for q in prepared.questions] == ["fits"]
    assert "listed options do not fit" in prepared.left_out["too long"]


def test_a_tokenizer_that_tells_no_places_is_refused_in_one_sentence(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tiny.tokenizer), "is_fast", False)
    with pytest.raises(CoralError, match="leave the read-out `listed` out"):
        prepare(toy_questions(2), LETTERS, tiny, listed=True)


# ------------------------------------------------------------------------------------------------------------ stores


def test_a_store_keeps_every_place_that_is_asked_for_and_says_which(tiny: Model, tmp_path: Path) -> None:
    questions = toy_questions(8)
    store = extract(tiny, questions, tmp_path / "all", extraction=WHAT)
    assert store.places == PLACES
    assert store.manifest["read"] == "answer listed context"
    own = extract(tiny, questions, tmp_path / "own", extraction=replace(WHAT, read=("answer",)))
    assert "read" not in own.manifest  # as it was before there were places
    np.testing.assert_allclose(store.layer(2), own.layer(2), atol=1e-3)
    memory = score_in_memory(tiny, questions, WHAT)
    for place in PLACES:
        np.testing.assert_allclose(memory.layer(2, place), store.layer(2, place), atol=1e-3)
    context = np.split(store.layer(2, "context"), store.table.options.starts[1:])
    assert all((rows == rows[0]).all() for rows in context)  # options share the token before them
    assert not np.allclose(store.layer(2, "listed"), store.layer(2), atol=0.1)


def test_a_store_of_more_places_serves_who_asks_for_fewer_and_the_reverse_is_refused(
    tiny: Model, tmp_path: Path
) -> None:
    questions = toy_questions(6)
    extract(tiny, questions, tmp_path / "all", extraction=WHAT)
    before = (tmp_path / "all" / "journal.jsonl").read_bytes()
    extract(tiny, questions, tmp_path / "all", extraction=replace(WHAT, read=("listed",), layers=(2,)))
    assert (tmp_path / "all" / "journal.jsonl").read_bytes() == before
    own = extract(tiny, questions, tmp_path / "own", extraction=replace(WHAT, read=("answer",)))
    with pytest.raises(CoralError, match=r"not at listed; make a store that does: .*--read answer,listed"):
        own.layer(2, "listed")
    with pytest.raises(CoralError, match="other tokens"):
        extract(tiny, questions, tmp_path / "own", extraction=WHAT)
    both = JoinedStore([everything(ActivationStore(tmp_path / name)) for name in ("all", "own")])
    assert both.places == ("answer",)


def everything(store: ActivationStore) -> Subset:
    return Subset(store, np.ones(len(store.questions), dtype=bool))


def test_options_that_no_prompt_lists_are_read_at_their_own_tokens(tiny: Model) -> None:
    store = score_in_memory(tiny, toy_questions(6), replace(WHAT, style=Style("text")))
    np.testing.assert_array_equal(store.layer(2, "listed"), store.layer(2))
