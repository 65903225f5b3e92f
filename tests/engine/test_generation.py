"""Answers are those of transformers' own generate; samples depend on their prompt, number and seed, and on nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.models import make_model
from torch import nn

from coral_lens.engine.architectures import family_of
from coral_lens.engine.draws import NextToken, stream_of
from coral_lens.engine.generation import Generated, batches, generate_answers
from coral_lens.engine.model import Model
from coral_lens.engine.settings import GenerationSettings
from coral_lens.errors import CoralError

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = (
    "Once",
    "A much longer prompt, of many more tokens than the window",
    "x",
    "Two plus two is",
    "Once upon a time",
)


def answers(model: Model, texts: Sequence[str] = TEXTS, **settings: float) -> list[list[Generated]]:
    return generate_answers(model, texts, settings=GenerationSettings(**{"max_new_tokens": 20} | settings))


@torch.no_grad()
def transformers_answer(model: Model, text: str) -> tuple[int, ...]:
    """One prompt on its own, without padding."""
    ids = torch.tensor([model.tokenizer.encode(text)])
    out = model.hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    return tuple(token for token in out[0, ids.shape[1] :].tolist() if token != model.tokenizer.eos_token_id)


# ------------------------------------------------------------------------------------------------------------- greedy


def test_greedy_answers_are_those_of_transformers_token_for_token(any_tiny: Model) -> None:
    expected = [transformers_answer(any_tiny, text) for text in TEXTS]
    for batch_size in (2, 8):
        found = answers(any_tiny, batch_size=batch_size)
        assert [[answer.tokens for answer in some] for some in found] == [[tokens] for tokens in expected]


def test_a_family_that_counts_positions_itself_is_read_with_padding_too() -> None:
    model = make_model("bloom")
    for texts in (TEXTS, ("Tell me: how", "Tell me: what is two plus two")):
        assert [some[0].tokens for some in answers(model, texts)] == [transformers_answer(model, t) for t in texts]


def test_what_all_prompts_begin_with_is_read_once_and_changes_no_answer(any_tiny: Model) -> None:
    texts = ["Tell me: how", "Tell me: what is two plus two", "Tell me: no"]
    read: list[tuple[int, int]] = []
    handle = any_tiny.blocks[0].register_forward_pre_hook(lambda _, args: read.append(tuple(args[0].shape[:2])))
    found = answers(any_tiny, texts)
    handle.remove()
    assert [some[0].tokens for some in found] == [transformers_answer(any_tiny, text) for text in texts]
    window = getattr(any_tiny.hf.config.get_text_config(), "sliding_window", None)
    longest = max(len(any_tiny.tokenizer.encode(text)) for text in texts)
    if window is None or longest + 20 <= window:
        assert read[0][0] == 1
        assert read[1] == (3, longest - read[0][1])
    else:
        assert read[0] == (3, longest)


def test_a_window_is_no_hindrance_where_all_fits_into_it() -> None:
    model = make_model("mistral-window")
    window = model.hf.config.sliding_window
    ids = model.tokenizer.encode("ab cd ef gh ij")
    for room, gaps in ((window - len(ids), True), (window - len(ids) + 1, False)):
        assert model.takes_gaps(len(ids) + room) is gaps
    texts, room = ["ab cd", "ab cd ef"], 4
    read: list[int] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: read.append(len(args[0])))
    found = answers(model, texts, max_new_tokens=room)
    handle.remove()
    assert read[:2] == [1, 2]
    assert [some[0].tokens for some in found] == [transformers_answer(model, text)[:room] for text in texts]


def test_families_that_may_count_columns_share_nothing(tiny: Model) -> None:
    assert tiny.takes_gaps(1000)
    assert not replace(tiny, family=family_of("mpt")).takes_gaps(10)


def test_samples_share_what_prompts_begin_with(tiny: Model) -> None:
    texts = ["Tell me: how", "Tell me: what is two plus two"]
    both = answers(tiny, texts, temperature=1.0, n_samples=3)
    assert both == [answers(tiny, [text], temperature=1.0, n_samples=3)[0] for text in texts]


def test_the_last_samples_are_the_same_without_the_first(tiny: Model) -> None:
    texts = ["Tell me: how", "Tell me: what is two plus two"]
    whole = answers(tiny, texts, temperature=1.0, n_samples=3)
    assert answers(tiny, texts, temperature=1.0, n_samples=2, first_sample=1) == [some[1:] for some in whole]


def test_fewer_answers_are_written_at_a_time_where_memory_is_short(tiny: Model) -> None:
    ids = [(1,) * n for n in (30, 10, 10, 10)]
    how = GenerationSettings(max_new_tokens=10, temperature=1.0, n_samples=2, batch_size=8)
    assert list(batches(ids, how)) == [[0, 1, 2, 3]]
    assert list(batches(ids, how, tokens=80)) == [[0], [1, 2], [3]]
    assert list(batches(ids, how, tokens=1)) == [[0], [1], [2], [3]], "one prompt at least"
    config = tiny.hf.config
    keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert tiny.cache_bytes == 2 * 4 * keys


def test_a_prompt_that_begins_another_keeps_a_token_of_its_own(tiny: Model) -> None:
    texts = ["Once upon", "Once upon a time", "Once upon"]
    assert [some[0].tokens for some in answers(tiny, texts)] == [transformers_answer(tiny, text) for text in texts]


def test_an_answer_that_never_ends_is_cut_and_marked(tiny: Model) -> None:
    (answer,) = answers(tiny, ["Once"], max_new_tokens=7)[0]
    assert (answer.n_tokens, answer.finished) == (7, False)
    assert answer.text == tiny.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)


@contextmanager
def preferring(model: Model, token: int, after: int) -> Iterator[None]:
    """Let the head prefer one token from the n-th call on."""
    calls: list[int] = []

    def push(_: nn.Module, __: object, logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        logits[..., token] += 1e4 if len(calls) > after else 0.0
        return logits

    handle = model.head.register_forward_hook(push)
    try:
        yield
    finally:
        handle.remove()


def test_an_end_token_finishes_an_answer_and_is_not_part_of_it(tiny: Model) -> None:
    whole = answers(tiny, ["Once"])[0][0]
    with preferring(tiny, 257, after=3):
        (answer,) = answers(tiny, ["Once"])[0]
    assert (answer.tokens, answer.finished) == (whole.tokens[:3], True)


def test_an_answer_ends_at_the_first_stop_string(tiny: Model) -> None:
    with preferring(tiny, tiny.tokenizer.encode("z")[0], after=2):
        settings = GenerationSettings(max_new_tokens=20)
        (answer,) = generate_answers(tiny, ["Once"], settings=settings, stop=("zzz", "zzzz", "?"))[0]
    assert answer.finished
    assert answer.n_tokens == 5
    assert answer.text == tiny.tokenizer.decode(list(answer.tokens[:2]))


# ----------------------------------------------------------------------------------------------------------- sampling


def test_samples_depend_on_prompt_number_and_seed_alone(any_tiny: Model) -> None:
    sampled = {"temperature": 0.7, "n_samples": 3, "max_new_tokens": 8}
    found = answers(any_tiny, **sampled)
    assert answers(any_tiny, **sampled) == found
    assert answers(any_tiny, TEXTS[::-1], batch_size=2, **sampled) == found[::-1]
    assert [answers(any_tiny, [text], batch_size=1, **sampled)[0] for text in TEXTS] == found
    assert answers(any_tiny, **sampled | {"n_samples": 2}) == [some[:2] for some in found]
    assert len({answer.tokens for some in found for answer in some}) == 3 * len(TEXTS)
    other = answers(any_tiny, seed=1, **sampled)
    assert all(a != b for some, others in zip(found, other, strict=True) for a, b in zip(some, others, strict=True))


def test_tokens_are_drawn_with_their_probabilities(tiny: Model) -> None:
    n = 3000
    (found,) = answers(tiny, ["Once"], temperature=2.0, n_samples=n, max_new_tokens=1, batch_size=n)
    counts = Counter(answer.tokens[0] if answer.tokens else 257 for answer in found)
    with torch.no_grad():
        probs = (tiny.hf(torch.tensor([tiny.tokenizer.encode("Once")])).logits[0, -1] / 2.0).softmax(dim=-1)
    for token in probs.topk(8).indices.tolist():
        p = float(probs[token])
        assert abs(counts[token] / n - p) < 4 * (p * (1 - p) / n) ** 0.5


@contextmanager
def rows_read(model: Model) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of every pass."""
    read: list[tuple[int, int]] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: read.append(tuple(args[0].shape[:2])))
    try:
        yield read
    finally:
        handle.remove()


def test_what_samples_of_a_prompt_have_in_common_is_read_once(tiny: Model) -> None:
    with rows_read(tiny) as read:
        found = answers(tiny, ["Once", "Twice upon"], temperature=0.3, n_samples=8, max_new_tokens=4)
    begun = [len({(i, a.tokens[:n]) for i, some in enumerate(found) for a in some}) for n in (1, 2, 3)]
    assert read == [(2, 10), *((n, 1) for n in begun)]
    assert begun[0] < 16, "some samples begin alike"


def test_samples_that_part_later_are_those_of_samples_that_were_never_together(tiny: Model) -> None:
    how = {"temperature": 0.3, "max_new_tokens": 6}
    (together,) = answers(tiny, ["Once"], n_samples=6, **how)
    assert [a.tokens for a in together] == [alone_tokens(tiny, "Once", sample, **how) for sample in range(6)]


def alone_tokens(model: Model, text: str, sample: int, *, temperature: float, max_new_tokens: int) -> tuple[int, ...]:
    """A sample whose every token is drawn after a whole pass over all before it."""
    ids, tokens = model.tokenizer.encode(text), []
    for step in range(max_new_tokens):
        with torch.no_grad():
            logits = model.hf(torch.tensor([[*ids, *tokens]])).logits[0, -1]
        token = NextToken.after(logits, temperature).draw(stream_of(text, sample, 0), step)
        if token == model.tokenizer.eos_token_id:
            break
        tokens.append(token)
    return tuple(tokens)


# --------------------------------------------------------------------------------------------------------- afterwards


def test_the_tokenizer_and_the_model_are_left_as_they_were(tiny: Model) -> None:
    def state() -> tuple[object, ...]:
        tokenizer, hooks = tiny.tokenizer, [len(m._forward_hooks) for m in tiny.hf.modules()]
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        return tokenizer.padding_side, tokenizer.pad_token, tokenizer.truncation_side, backend, hooks

    before = state()
    answers(tiny, temperature=1.0, n_samples=2)
    assert state() == before


def test_progress_is_told_of_every_prompt(tiny: Model) -> None:
    done: list[int] = []
    settings = GenerationSettings(max_new_tokens=2, batch_size=2)
    generate_answers(tiny, TEXTS, settings=settings, progress=done.append)
    assert done == [2, 2, 1]


# -------------------------------------------------------------------------------------------------------------- input


def test_no_text_and_empty_texts_are_answered(tiny: Model) -> None:
    assert answers(tiny, []) == []
    assert answers(tiny, [""])[0][0].n_tokens == 20


def test_a_prompt_without_room_for_an_answer_loses_its_beginning(tiny: Model) -> None:
    long = "ab" * 200
    with pytest.warns(UserWarning, match=r"1 of 2 prompts are longer than 236 tokens and lost their beginning"):
        found = answers(tiny, [long, "Once"])
    assert found[0] == answers(tiny, [long[-236:]])[0]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1. Got 0 instead"),
        ({"n_samples": 0}, "n_samples must be at least 1"),
        ({"batch_size": -1}, "batch_size must be at least 1"),
        ({"temperature": -0.1}, "temperature must be at least 0. Got -0.1 instead"),
        ({"n_samples": 2}, "At temperature 0 all samples are alike"),
        ({"max_new_tokens": 256}, "max_new_tokens must be below the model's length, 256"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tiny: Model, settings: dict[str, float], problem: str) -> None:
    with pytest.raises(CoralError, match=problem):
        answers(tiny, **settings)


def test_a_recurrent_model_is_refused() -> None:
    with pytest.raises(CoralError, match="'tiny-mamba' has no attention"):
        answers(make_model("mamba"))
