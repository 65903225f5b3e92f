"""Questions become lm-eval's strings, and strings become exactly the token ids that lm-eval's HFLM would feed."""

from __future__ import annotations

import string
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support.models import make_hflm, make_llama, make_model, make_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from coral_lens.data.settings import Style
from coral_lens.engine import prompts
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.packing import plan_for
from coral_lens.engine.prompts import fit_length, prepare, render, shift_space, tokenize
from coral_lens.engine.scoring import score
from coral_lens.errors import CoralError
from coral_lens.records import Prompt, Question, Rendered

SKY = Question("sky", "sky", " Which colour is the sky? ", ("blue", " deep red "), 0)
CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


# ------------------------------------------------------------------------------------------------------- rendering


def test_the_text_style_scores_the_option_texts(tiny: Model) -> None:
    rendered = render(SKY, Style("text"), tiny)
    assert rendered.contexts == ("Question: Which colour is the sky?\nAnswer:",) * 2
    assert rendered.continuations == (" blue", "  deep red ")
    assert rendered.choices == ("blue", " deep red ")
    assert not rendered.chat


def test_the_letters_style_lists_the_options_and_scores_their_letters(tiny: Model) -> None:
    rendered = render(SKY, Style("letters"), tiny)
    assert rendered.contexts == ("Question: Which colour is the sky?\nA. blue\nB. deep red\nAnswer:",) * 2
    assert rendered.continuations == (" A", " B")
    assert rendered.choices == ("A", "B")


@pytest.mark.parametrize("kind", ["text", "letters"])
def test_a_passage_comes_first_and_is_set_off_by_an_empty_line(tiny: Model, kind: Any) -> None:
    with_passage = Question("sky", "sky", SKY.text, SKY.options, 0, passage=" It was noon.\n")
    bare = render(SKY, Style(kind), tiny)
    assert render(with_passage, Style(kind), tiny).contexts == tuple("It was noon.\n\n" + c for c in bare.contexts)


def test_the_chat_template_is_wrapped_around_the_prompt_and_takes_the_delimiters_place() -> None:
    model = make_model("llama")
    model.tokenizer.chat_template = CHAT
    rendered = render(SKY, Style("letters", chat=True), model)
    turn = "[user] Question: Which colour is the sky?\nA. blue\nB. deep red\nAnswer:\n[assistant] "
    assert rendered.contexts == (turn,) * 2
    assert rendered.continuations == ("A", "B")
    assert rendered.chat


def test_a_task_with_its_own_template_keeps_it_in_every_style(tiny: Model) -> None:
    own = Rendered(("a", "b"), (" x", " y"), ("x", "y"))
    question = Question("own", "own", "?", ("x", "y"), rendered=own)
    assert render(question, Style("letters", chat=True), tiny) is own


def test_more_options_than_letters_are_refused_in_the_letters_style_only(tiny: Model) -> None:
    full = Question("full", "full", "?", tuple(f"option {i}" for i in range(26)))
    over = Question("over", "over", "?", tuple(f"option {i}" for i in range(27)))
    assert render(full, Style("letters"), tiny).choices == tuple(string.ascii_uppercase)
    assert len(render(over, Style("text"), tiny).choices) == 27
    with pytest.raises(CoralError, match=r"'over' has 27 options, more than there are letters"):
        render(over, Style("letters"), tiny)


# ---------------------------------------------------------------------------------------------------- tokenization


def merging_tokenizer(*, bos: bool) -> PreTrainedTokenizerFast:
    """Merges letters across the border between context and option, so that `whole` is not `context` + `option`."""
    merges = [("a", "b"), ("Ġ", "a"), ("Ġa", "b"), (":", "Ġ"), ("b", "b"), ("Ċ", "Ċ")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<s>", "</s>", *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Writes spaces as part of words and puts one in front of the text, as Llama's tokenizer does."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁"]
    merges = [("▁", "a"), ("▁", "b"), ("▁", "▁")]
    names = [*alphabet, "<s>", "</s>", "<unk>", *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    bos = names.index("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


def eos_only_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")


TOKENIZERS = {
    "bytes": make_tokenizer,
    "bytes with BOS": lambda: make_tokenizer(bos=True),
    "merging": lambda: merging_tokenizer(bos=False),
    "merging with BOS": lambda: merging_tokenizer(bos=True),
    "spaced with BOS": spaced_tokenizer,
    "EOS only": eos_only_tokenizer,
}


class EncodingOnly(HFLM):
    """HFLM up to the point where it has token ids; these are returned instead of log-likelihoods."""

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
        return [(tuple(context), tuple(continuation)) for _, context, continuation in requests]


class Pair:
    """Our model and lm-eval's, with the same tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = wrap(make_llama(), tokenizer, name="tiny")
        self.hflm = make_hflm(self.model, kind=EncodingOnly)

    def theirs(self, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        request = Instance("loglikelihood", {}, (context, continuation), 0)
        (pair,) = self.hflm.loglikelihood([request], disable_tqdm=True)
        return pair  # type: ignore[return-value]

    def ours(self, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        prompt = tokenized(self.model, [(context, continuation), (context, " other")])
        return prompt.contexts[0], prompt.options[0]


def tokenized(model: Model, pairs: list[tuple[str, str]]) -> Prompt:
    contexts, continuations = zip(*pairs, strict=True)
    question = Question("q", "q", "?", tuple(f"option {i}" for i in range(len(pairs))))
    (prompt,) = tokenize([question], [Rendered(contexts, continuations, continuations)], model)
    return prompt


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(TOKENIZERS[request.param]())


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("Question: a?\nAnswer:", " ab"),
        ("trailing space ", "ab"),
        ("trailing lines \n\t\n", " ab"),
        ("", "ab bb"),
        ("", " ab"),
        ("", "<s>ab"),
        ("<s>already begun", " ab"),
        ("<s>", " ab"),
        ("</s>ended", " ab"),
        ("wörld", " ä"),
        ("no space", "between"),
    ],
)
def test_a_request_is_encoded_as_lm_eval_encodes_it(pair: Pair, context: str, continuation: str) -> None:
    assert pair.ours(context, continuation) == pair.theirs(context, continuation)


letters = st.text(alphabet="ab :\n", max_size=8)
marks = st.sampled_from(["", "<s>", "</s>"])


@given(st.tuples(marks, letters), st.tuples(marks, letters))
def test_any_request_is_encoded_as_lm_eval_encodes_it(
    every_pair: list[Pair], context_parts: tuple[str, str], option_parts: tuple[str, str]
) -> None:
    context, continuation = "".join(context_parts), "".join(option_parts)
    # lm-eval itself stops at a context of white space only, and at an empty option
    assume(not context or context.strip())
    assume(continuation)
    for pair in every_pair:
        context_ids, option_ids = pair.theirs(context, continuation)
        if option_ids:
            assert pair.ours(context, continuation) == (context_ids, option_ids)
        else:
            with pytest.raises(CoralError, match="no tokens of its own"):
                pair.ours(context, continuation)


@pytest.fixture(scope="module")
def every_pair() -> list[Pair]:
    return [Pair(make()) for make in TOKENIZERS.values()]


def test_white_space_at_the_contexts_end_moves_to_the_option() -> None:
    assert shift_space("Answer: \n", "x") == ("Answer:", " \nx")
    assert shift_space("Answer:", " x") == ("Answer:", " x")


def test_a_context_of_white_space_only_is_an_empty_one(pair: Pair) -> None:
    assert pair.ours(" \n", "a") == pair.ours("", " \na")


def test_bos_follows_the_tokenizer_and_is_never_doubled() -> None:
    bare, with_bos = (Pair(make_tokenizer(bos=bos)) for bos in (False, True))
    x, y = make_tokenizer().encode("xy")
    assert bare.ours("x", "y") == ((x,), (y,))
    assert with_bos.ours("x", "y") == ((256, x), (y,))
    assert bare.ours("<s>x", "y") == with_bos.ours("<s>x", "y") == ((256, x), (y,))
    assert bare.ours("", "y") == with_bos.ours("", "y") == ((256,), (y,))


def test_options_of_one_question_share_one_context_object(tiny: Model) -> None:
    prompt = tokenized(tiny, [("Answer:", " a"), ("Answer:", " bb")])
    assert prompt.contexts[0] is prompt.contexts[1]
    assert not prompt.truncated


def test_many_questions_are_tokenized_as_each_alone(tiny: Model) -> None:
    questions = [Question(str(i), str(i), f"Number {i % 3}?", ("one", "two", f"{i}")) for i in range(7)]
    rendered = [render(q, Style(), tiny) for q in questions]
    alone = [tokenize([q], [r], tiny)[0] for q, r in zip(questions, rendered, strict=True)]
    assert tokenize(questions, rendered, tiny) == alone


def test_how_many_questions_are_encoded_at_a_time_changes_nothing(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [Question(f"q{i}", f"q{i}", f"What is {i // 2}?", (f"{i}", "none of these")) for i in range(7)]
    together = prepare(questions, Style(), tiny)
    monkeypatch.setattr(prompts, "QUESTIONS_AT_A_TIME", 3)
    assert prepare(questions, Style(), tiny) == together


def test_tokenizing_leaves_the_tokenizer_as_it_was(tiny: Model) -> None:
    before = deepcopy(tiny.tokenizer).backend_tokenizer.to_str()
    tokenized(tiny, [("x" * 600, " a"), ("", " bb")])
    assert tiny.tokenizer.backend_tokenizer.to_str() == before


# ------------------------------------------------------------------------------------------------------- too long


def test_the_cut_worked_by_hand() -> None:
    question = Question("q", "q", "?", ("a", "b"))
    # five are read and a sixth is only predicted: the first option just fits, the second loses one on the left
    prompt = fit_length(question.id, [((1, 2, 3, 4), (8, 9)), ((1, 2, 3, 4), (7, 8, 9))], 5)
    assert prompt.contexts == ((1, 2, 3, 4), (2, 3, 4))
    assert prompt.options == ((8, 9), (7, 8, 9))
    assert prompt.truncated


some_ids = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(tuple)


@given(st.lists(st.tuples(some_ids, some_ids), min_size=2, max_size=4), st.integers(12, 20))
def test_what_stays_is_the_end_that_lm_eval_keeps(pairs: list[Any], limit: int) -> None:
    prompt = fit_length("q", pairs, limit)
    for j, (context, option) in enumerate(pairs):
        assert prompt.contexts[j] + prompt.options[j] == (context + option)[-(limit + 1) :]
        assert prompt.options[j] == option
    assert prompt.truncated == any(len(context + option) > limit + 1 for context, option in pairs)


class Recording(HFLM):
    """HFLM that keeps the rows it feeds."""

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.fed = [*getattr(self, "fed", []), *(tuple(row.tolist()) for row in inps)]
        return super()._model_call(inps, *args, **kwargs)


# GPT-2 has a table of 256 positions: the 257th token of a cut prompt is predicted, and must not be looked up
@pytest.mark.parametrize(("family", "bos"), [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True)])
def test_long_prompts_are_cut_where_lm_eval_cuts_them_and_score_the_same(family: str, bos: bool) -> None:
    model = make_model(family, bos=bos)
    hflm = make_hflm(model, kind=Recording)
    assert model.max_length == hflm.max_length == 256
    context = "Which of these words is the longest?" * 8
    pairs = [(context, " no"), (context, " a much longer option"), (context, " " + "long " * 50)]
    prompt = tokenized(model, pairs)
    assert prompt.truncated
    (scored,) = score(model, [prompt], plan_for([prompt], token_budget=2048))
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    theirs = torch.tensor([ll for ll, _ in hflm.loglikelihood(requests, disable_tqdm=True)], dtype=torch.float64)
    # the last token of a row is predicted but never fed
    ours_fed = {(c + o)[:-1] for c, o in zip(prompt.contexts, prompt.options, strict=True)}
    assert ours_fed == set(hflm.fed)
    assert {len(row) for row in ours_fed} == {256}
    torch.testing.assert_close(scored.logprobs, theirs, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_cut_prompts_of_options_of_one_length_share_their_context_and_score_as_lm_evals(family: str) -> None:
    model = make_model(family)
    shots = "".join(f"Question: {i} and {i}? Answer: {i + i}. " for i in range(20))
    pairs = [[(f"{shots} {word}?", f" {letter}") for letter in "ABC"] for word in ("one", "two", "ten")]
    prompts = [tokenized(model, some) for some in pairs]
    assert [len(p.contexts[0]) for p in prompts] == [255] * 3
    plan = plan_for(prompts, token_budget=2048)
    assert plan.batches[0].prefixes[0] > 200, "what is left of the shots is shared"
    (scored,) = score(model, prompts, plan)
    requests = [Instance("loglikelihood", {}, pair, 0) for q in scored.batch.questions for pair in pairs[q]]
    theirs = make_hflm(model).loglikelihood(requests, disable_tqdm=True)
    expected = torch.tensor([ll for ll, _ in theirs], dtype=torch.float64)
    torch.testing.assert_close(scored.logprobs, expected, atol=1e-3, rtol=1e-5)


# ------------------------------------------------------------------------------------- questions that cannot be asked

LONG = Question("long option", "g", "Which?", ("no", "y" * 300))
MANY = Question("many options", "g", "Which?", tuple(f"{i}" for i in range(27)))
GOOD = [Question(f"good {i}", "g", f"Number {i}?", ("one", "two", "three"), i) for i in range(3)]


def test_a_question_that_cannot_be_asked_is_left_out_by_name_and_the_others_stay(tiny: Model) -> None:
    asked = prepare([GOOD[0], LONG, GOOD[1], GOOD[2]], Style(), tiny)
    assert asked.questions == tuple(GOOD)
    assert asked.left_out == {
        "long option": "Question 'long option': option 2 has 301 tokens, but the model reads 256 at most."
    }
    assert [p.id for p in asked.prompts] == [q.id for q in GOOD]
    alone = prepare(GOOD, Style(), tiny)
    assert (asked.rendered, asked.prompts) == (alone.rendered, alone.prompts)
    assert alone.left_out == {}


def test_questions_are_left_out_for_their_strings_and_for_their_tokens(tiny: Model) -> None:
    asked = prepare([MANY, GOOD[0], Question("x", "g", "?", ("a", "b"), passage="x" * 900)], Style("letters"), tiny)
    # the passage is cut on the left, so that question can be asked
    assert [q.id for q in asked.questions] == ["good 0", "x"]
    assert [p.truncated for p in asked.prompts] == [False, True]
    assert list(asked.left_out) == ["many options"]
    assert "more than there are letters" in asked.left_out["many options"]


def test_an_option_without_tokens_leaves_its_question_out() -> None:
    model = wrap(make_llama(), merging_tokenizer(bos=False), name="tiny")
    nothing, something = (Rendered(("a", "a"), (" a", end), ("a", "b")) for end in ("b", " b"))
    questions = [Question(r.continuations[1], "g", "?", ("a", "b"), rendered=r) for r in (nothing, something)]
    asked = prepare(questions, Style(), model)
    assert [q.id for q in asked.questions] == [" b"]
    assert asked.left_out == {"b": "Question 'b': option 2 has no tokens of its own; change its text."}


def test_an_empty_context_is_no_reason_to_leave_a_question_out(tiny: Model) -> None:
    empty = Question("empty", "g", "?", ("a", "b"), rendered=Rendered(("", ""), ("a", "b"), ("a", "b")))
    asked = prepare([empty], Style(), tiny)
    assert (asked.prompts[0].contexts, asked.left_out) == (((256,),) * 2, {})


def test_if_no_question_can_be_asked_the_first_reason_is_the_error(tiny: Model) -> None:
    with pytest.raises(CoralError, match=r"no questions to score: Question 'long option': option 2 has 301 tokens"):
        prepare([LONG], Style(), tiny)
    with pytest.raises(CoralError, match="no questions to score: check the file, the split and the limit"):
        prepare([], Style(), tiny)


def test_questions_of_the_same_id_keep_their_own_strings(tiny: Model) -> None:
    first, second = (Question("same", "g", text, ("a", "b")) for text in ("First?", "Second?"))
    assert [r.contexts[0] for r in prepare([first, second], Style(), tiny).rendered] == [
        "Question: First?\nAnswer:",
        "Question: Second?\nAnswer:",
    ]


# ---------------------------------------------------------------------------------------------------------- errors


def test_an_option_without_tokens_is_refused() -> None:
    model = wrap(make_llama(), merging_tokenizer(bos=False), name="tiny")
    # the whole text is the one token `ab`: nothing is left for the option
    with pytest.raises(CoralError, match=r"Question 'q': option 2 has no tokens of its own; change its text"):
        tokenized(model, [("a", " a"), ("a", "b")])


def test_an_option_longer_than_the_model_is_refused(tiny: Model) -> None:
    assert len(tokenized(tiny, [("x", "y" * 256), ("x", "y")]).contexts[0]) == 1
    with pytest.raises(CoralError, match=r"option 1 has 257 tokens, but the model reads 256 at most"):
        tokenized(tiny, [("x", "y" * 257), ("x", "y")])


def test_a_tokenizer_without_bos_and_eos_is_refused() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer().backend_tokenizer)
    with pytest.raises(CoralError, match="neither a BOS nor an EOS token"):
        tokenized(wrap(make_llama(), bare, name="tiny"), [("x", "y"), ("x", "z")])
