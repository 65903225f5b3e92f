"""lm-eval's own evaluator gets HFLM's numbers from the engine, and with a lens those of `coral eval`."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from support.lm_eval_runs import definitions_of, evaluate, requests_of, write_task
from support.models import make_hflm, make_llama, make_model, make_tokenizer
from support.questions import toy_questions

import coral_lens
from coral_lens.data.settings import Style, TaskOptions
from coral_lens.data.tasks import load_task
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.readers import FinalStates
from coral_lens.engine.scoring import TOKEN_BUDGET
from coral_lens.errors import CoralError
from coral_lens.harness import model as lm_eval_model
from coral_lens.harness.data import local_data
from coral_lens.harness.model import LENGTHS_WARNING, CoralLM
from coral_lens.harness.scoring import Shape
from coral_lens.lens.artefact import Lens
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions, Question

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = toy_questions(14, seed=3)
LENGTHS = "ignore:With a lens, log-likelihoods:UserWarning"


@pytest.fixture(scope="module")
def lens(tiny: Model) -> Lens:
    """A lens that does something: on a random model, choosing gamma would mostly choose 0."""
    return replace(fit(tiny, toy_questions(40), FitSettings(layers=(1, 2))), gamma=1.5)


@pytest.fixture(scope="module")
def paper(tiny: Model) -> Lens:
    """The paper's rule, so strong that it clips options to 0."""
    return replace(fit(tiny, toy_questions(40), FitSettings(lens="ridge", layers=(1,), base="char")), gamma=50.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("tasks"), ASKED)


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[Instance]:
    return requests_of(folder)


def ours(lens: Lens, model: Model, questions: Sequence[Question] = ASKED) -> Predictions:
    """What `coral eval` measures."""
    return lens.predictions(model, questions)[lens.method]


def logprobs(answers: Sequence[tuple[float, bool]]) -> np.ndarray:
    return np.array([logprob for logprob, _ in answers])


# --------------------------------------------------------------------------------------------------- without a lens


def test_log_likelihoods_and_greedy_flags_are_hflms_in_every_family(any_tiny: Model, requests: list[Instance]) -> None:
    hooks = len(any_tiny.norm._forward_hooks)
    found = CoralLM(any_tiny).loglikelihood(requests, disable_tqdm=True)
    expected = make_hflm(any_tiny, batch_size=8).loglikelihood(requests, disable_tqdm=True)
    assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert len(any_tiny.norm._forward_hooks) == hooks


def writer() -> Model:
    """A model that writes letters only, so that what it would write is text."""
    torch.manual_seed(0)
    hf, tokenizer = make_llama(), make_tokenizer()
    letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
    with torch.no_grad():
        hf.lm_head.weight.normal_(std=0.2)
        hf.lm_head.weight[[i for i in range(258) if i not in letters]] = 0.0
    return wrap(hf, tokenizer, name="writer")


def test_what_the_model_itself_would_write_is_greedy_and_nothing_else_is() -> None:
    model = writer()
    pairs = []
    for i in range(6):
        context = f"Toy {i}"
        ids = model.tokenizer.encode(context)
        for _ in range(3):
            ids.append(int(model.hf(torch.tensor([ids])).logits[0, -1].argmax()))
        written = model.tokenizer.decode(ids)[len(context) :]
        other = written[:-1] + ("a" if written[-1] != "a" else "b")
        pairs += [(context, o) for o in (written, written[:1], written[:2], other, "Q" + written[1:])]
    asked = [Instance("loglikelihood", {}, pair, i % 5, ("toy", i // 5, 1)) for i, pair in enumerate(pairs)]
    found = [greedy for _, greedy in CoralLM(model).loglikelihood(asked, disable_tqdm=True)]
    assert found == [True, True, True, False, False] * 6
    assert found == [greedy for _, greedy in make_hflm(model).loglikelihood(asked, disable_tqdm=True)]


def test_lm_evals_accuracies_are_hflms(tiny: Model, folder: Path) -> None:
    (expected,) = evaluate(make_hflm(tiny), folder)["results"].values()
    (found,) = evaluate(CoralLM(tiny), folder)["results"].values()
    assert found == expected
    assert 0 < found["acc,none"] < 1
    assert found["acc,none"] != found["acc_norm,none"]


def test_gamma_0_is_the_unsteered_run_to_the_bit(tiny: Model, lens: Lens, requests: list[Instance]) -> None:
    raw = CoralLM(tiny).loglikelihood(requests, disable_tqdm=True)
    assert CoralLM(tiny, lens=lens, gamma=0).loglikelihood(requests, disable_tqdm=True) == raw


def test_single_continuations_need_no_lens_and_no_document(tiny: Model) -> None:
    pairs = [("a", " b"), ("", " b"), ("a", " c"), ("a", " b"), ("x ", "y")]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = CoralLM(tiny).loglikelihood(asked, disable_tqdm=True)
    assert logprobs(found) == pytest.approx(logprobs(make_hflm(tiny).loglikelihood(asked, disable_tqdm=True)), abs=1e-3)


@pytest.mark.parametrize("with_lens", [False, True])
def test_generation_and_perplexity_are_hflms(tiny: Model, lens: Lens, with_lens: bool) -> None:
    texts = [Instance("generate_until", {}, (t, {"until": ["\n"], "max_gen_toks": 6}), 0) for t in ("Say a", "And b")]
    rolling = [Instance("loglikelihood_rolling", {}, (f"{i} words. " * 40,), 0) for i in range(2)]
    hflm, coral = make_hflm(tiny), CoralLM(tiny, lens=lens if with_lens else None)
    if with_lens:
        with pytest.warns(UserWarning, match="text and perplexity are the model's own"):
            found = coral.generate_until(texts, disable_tqdm=True)
    else:
        found = coral.generate_until(texts, disable_tqdm=True)
    assert found == hflm.generate_until(texts, disable_tqdm=True)
    assert coral.loglikelihood_rolling(rolling, disable_tqdm=True) == hflm.loglikelihood_rolling(rolling, True)


def test_prompts_beyond_the_models_length_are_cut_as_hflm_cuts_them_and_counted(tiny: Model, tmp_path: Path) -> None:
    long = [replace(q, text="many words " * 40 + q.text) for q in ASKED[:3]]
    asked = requests_of(write_task(tmp_path, long))
    with pytest.warns(UserWarning, match="3 of 3 prompts were longer"):
        found = CoralLM(tiny).loglikelihood(asked, disable_tqdm=True)
    assert logprobs(found) == pytest.approx(logprobs(make_hflm(tiny).loglikelihood(asked, True)), abs=1e-3)


# ------------------------------------------------------------------------------------------------------ with a lens


@pytest.mark.filterwarnings(LENGTHS)
@pytest.mark.parametrize("kind", ["lens", "paper"])
def test_answers_are_the_logs_of_the_probabilities_of_coral_eval(
    kind: str, tiny: Model, folder: Path, requests: list[Instance], request: pytest.FixtureRequest
) -> None:
    lens = request.getfixturevalue(kind)
    found = logprobs(CoralLM(tiny, lens=lens).loglikelihood(requests, disable_tqdm=True))
    expected = ours(lens, tiny)
    assert np.isfinite(found).all()
    assert np.exp(found) == pytest.approx(expected.probs, abs=2e-12)
    assert (kind == "paper") == bool((expected.probs == 0).any()), "the paper's rule clips"
    (results,) = evaluate(CoralLM(tiny, lens=lens), folder)["results"].values()
    assert results["acc,none"] == score(expected, "accuracy")
    assert not np.allclose(expected.probs, lens.predictions(tiny, ASKED)["base"].probs, atol=0.05)


@pytest.mark.filterwarnings(LENGTHS)
def test_lm_evals_own_brier_score_is_the_steered_one(tiny: Model, lens: Lens, tmp_path: Path) -> None:
    equal = [replace(q, options=q.options[:2], answer=q.answer % 2) for q in ASKED]
    metrics = [{"metric": "brier_score", "aggregation": "brier_score", "higher_is_better": False}]
    write_task(tmp_path, equal, metric_list=metrics)
    (results,) = evaluate(CoralLM(tiny, lens=lens), tmp_path)["results"].values()
    assert results["brier_score,none"] == pytest.approx(score(ours(lens, tiny, equal), "brier"), abs=1e-9)


@pytest.mark.filterwarnings(LENGTHS)
def test_order_repeats_and_company_of_requests_change_nothing(
    tiny: Model, lens: Lens, requests: list[Instance], tmp_path: Path
) -> None:
    lm = CoralLM(tiny, lens=lens)
    plain = dict(zip(map(id, requests), lm.loglikelihood(requests, disable_tqdm=True), strict=True))
    others = requests_of(write_task(tmp_path, toy_questions(5, seed=9), task="other"), "other")
    mixed = [*requests, *requests[:7], *others]
    random.Random(0).shuffle(mixed)
    found = lm.loglikelihood(mixed, disable_tqdm=True)
    assert all(answer == plain[id(r)] for r, answer in zip(mixed, found, strict=True) if r.task_name == "toy")


@pytest.mark.filterwarnings(LENGTHS)
def test_documents_that_share_a_context_keep_their_own_options(tiny: Model, lens: Lens, tmp_path: Path) -> None:
    first = replace(ASKED[0], options=("red", "a blue whale"), answer=0)
    second = replace(first, id="again", options=("red", "seven", "no"), answer=2)
    third = replace(first, id="twice")
    asked = requests_of(write_task(tmp_path, [first, second, third]))
    found = np.exp(logprobs(CoralLM(tiny, lens=lens).loglikelihood(asked[::-1], disable_tqdm=True)[::-1]))
    assert found == pytest.approx(ours(lens, tiny, [first, second, third]).probs, abs=1e-6)
    assert np.add.reduceat(found, [0, 2, 5]) == pytest.approx(np.ones(3))


@pytest.mark.filterwarnings(LENGTHS)
def test_a_limit_keeps_whole_documents(tiny: Model, lens: Lens, folder: Path) -> None:
    (results,) = evaluate(CoralLM(tiny, lens=lens), folder, limit=5)["results"].values()
    assert results["acc,none"] == score(ours(lens, tiny, ASKED[:5]), "accuracy")


@pytest.mark.filterwarnings(LENGTHS)
def test_unconditional_requests_of_mutual_information_are_no_options(tiny: Model, lens: Lens, tmp_path: Path) -> None:
    write_task(tmp_path, ASKED, metrics=["acc", "acc_mutual_info"])
    asked = requests_of(tmp_path)
    found = CoralLM(tiny, lens=lens).loglikelihood(asked, disable_tqdm=True)
    raw = make_hflm(tiny).loglikelihood(asked, disable_tqdm=True)
    conditional = [bool(r.args[0]) for r in asked]
    probs = [np.exp(x) for (x, _), c in zip(found, conditional, strict=True) if c]
    assert probs == pytest.approx(ours(lens, tiny).probs, abs=1e-6)
    rest = [(x, y) for (x, _), (y, _), c in zip(found, raw, conditional, strict=True) if not c]
    assert [x for x, _ in rest] == pytest.approx([y for _, y in rest], abs=1e-3)
    (plain,) = evaluate(CoralLM(tiny), tmp_path)["results"].values()
    assert plain == evaluate(make_hflm(tiny), tmp_path)["results"]["toy"]


def test_acc_norm_is_warned_of_once_and_only_where_lengths_differ(
    tiny: Model, lens: Lens, requests: list[Instance], tmp_path: Path
) -> None:
    lm = CoralLM(tiny, lens=lens)
    with pytest.warns(UserWarning, match="With a lens") as caught:
        lm.loglikelihood(requests, disable_tqdm=True)
    assert [str(w.message) for w in caught] == [LENGTHS_WARNING]
    lm.loglikelihood(requests, disable_tqdm=True)  # a warning would be an error
    letters = [replace(q, options=tuple("ABCDE"[: len(q.options)])) for q in ASKED]
    asked = requests_of(write_task(tmp_path, letters))
    CoralLM(tiny, lens=lens).loglikelihood(asked, disable_tqdm=True)


@pytest.mark.filterwarnings(LENGTHS)
def test_a_task_that_the_lens_was_fitted_on_is_named(tiny: Model, lens: Lens, requests: list[Instance]) -> None:
    trained = replace(lens, training=replace(lens.training, tasks={"toy:train": 30, "arc": 10}))
    lm = CoralLM(tiny, lens=trained)
    with pytest.warns(UserWarning, match=r"fitted on questions of toy\.") as caught:
        lm.loglikelihood(requests, disable_tqdm=True)
    assert [w.message for w in caught if "fitted on" in str(w.message)] == [caught[-1].message]


def test_results_say_which_lens_was_used(tiny: Model, lens: Lens) -> None:
    info = CoralLM(tiny, lens=lens, gamma=2).get_model_info()
    assert info["lens"]["gamma"] == 2
    assert info["lens"]["layers"] == list(lens.layers)
    assert info["lens"]["fitted_on"]["weights"] == tiny.fingerprint["weights"] == info["model_fingerprint"]["weights"]
    assert CoralLM(tiny).get_model_info()["lens"] is None


def test_a_chat_lens_corrects_chat_prompts_only(tiny: Model, lens: Lens, folder: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    model = wrap(tiny.hf, tokenizer, name="tiny-chat")
    chatty = replace(lens, style=Style(chat=True), model={"name": "c", **model.identity})
    with pytest.raises(CoralError, match="without the chat template, but the lens was fitted with it; add --apply"):
        evaluate(CoralLM(model, lens=chatty), folder)
    with pytest.warns(UserWarning, match="With a lens"):
        assert evaluate(CoralLM(model, lens=chatty), folder, apply_chat_template=True)["results"]
    plain = replace(chatty, style=Style())
    with pytest.raises(
        CoralError, match="with the chat template, but the lens was fitted without it; leave out --apply"
    ):
        evaluate(CoralLM(model, lens=plain), folder, apply_chat_template=True)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def saved(tiny: Model, lens: Lens, tmp_path: Path) -> Path:
    tiny.hf.save_pretrained(tmp_path / "tiny")
    tiny.tokenizer.save_pretrained(tmp_path / "tiny")
    replace(lens, model={**lens.model, "name": str(tmp_path / "tiny")}).save(tmp_path / "lens")
    return tmp_path


def make(**arguments: Any) -> CoralLM:
    return CoralLM.create_from_arg_obj(arguments, {"batch_size": 1, "device": "cuda:0", "max_batch_size": None})


def test_the_model_of_the_lens_is_the_default_and_lm_evals_absent_gpu_is_no_error(saved: Path, lens: Lens) -> None:
    lm = CoralLM.create_from_arg_string(f"lens={saved / 'lens'},gamma=0.5", {"device": "cuda:0"})
    assert (lm.coral.name, lm.coral.device.type) == (str(saved / "tiny"), "cpu")
    assert lm.lens is not None
    assert lm.lens.gamma == 0.5
    assert make(pretrained=str(saved / "tiny"), max_length=64).max_length == 64


def test_a_lens_of_another_model_is_refused_before_its_weights_are_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow = make_llama()
    shallow.config.num_hidden_layers = 1
    shallow.config.save_pretrained(saved / "shallow")
    make_tokenizer().save_pretrained(saved / "shallow")
    make_llama().config.save_pretrained(saved / "bos")
    make_tokenizer(bos=True).save_pretrained(saved / "bos")
    monkeypatch.setattr(lm_eval_model, "load_model", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(CoralError, match=r"layer \d of width 32, but .*shallow' has 1 layers"):
        make(pretrained=str(saved / "shallow"), lens=str(saved / "lens"), other_model=True)
    with pytest.raises(CoralError, match="whose tokenizer is another"):
        make(pretrained=str(saved / "bos"), lens=str(saved / "lens"))


def test_a_lens_of_other_weights_is_refused_unless_overridden_which_is_recorded(saved: Path) -> None:
    other = make_model("llama", seed=1)
    other.hf.save_pretrained(saved / "other")
    other.tokenizer.save_pretrained(saved / "other")
    with pytest.raises(
        CoralError, match=r"fitted on .*tiny', and .* is another model .weights \w+ against .*other_model=True"
    ):
        make(pretrained=str(saved / "other"), lens=str(saved / "lens"))
    lm = make(pretrained=str(saved / "other"), lens=str(saved / "lens"), other_model=True)
    assert "in spite of other weights" in lm.get_model_info()["lens"]["overrides"][0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"pretraind": "x"}, "'pretraind' is not an argument of the model `coral`. Did you mean 'pretrained'"),
        ({"pretrained": "x", "peft": "y"}, "'peft' is not an argument"),
        ({}, "must name a model"),
        ({"pretrained": "x", "gamma": 1}, "give lens="),
        ({"pretrained": "x", "lens": "no/such/lens"}, "no/such/lens"),
        ({"pretrained": "no/such/model"}, "no/such/model"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CoralError, match=complaint.replace("(", r"\(")) as error:
        make(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("gamma", ["strong", -1, float("nan"), True])
def test_gamma_must_be_a_number_of_at_least_0(gamma: Any, tiny: Model, lens: Lens) -> None:
    with pytest.raises(CoralError, match="gamma must be a number of at least 0"):
        CoralLM(tiny, lens=lens, gamma=gamma)


def instance(pair: tuple[str, str], at: int, document: int | None) -> Instance:
    return Instance("loglikelihood", {}, pair, at, ("toy", document, 1))


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ([instance(("a", " b"), 0, 0)], "one continuation per document; a lens corrects multiple-choice tasks only"),
        ([instance(("a", " b"), 0, None), instance(("a", " c"), 1, None)], "must name their task and document"),
        ([instance(("a", " b"), 0, 4), instance(("a", " c"), 2, 4)], r"numbered \[0, 2\] do not make up document 4"),
        ([instance(("a", " b"), 0, 4), instance(("x", " c"), 0, 4)], r"numbered \[0, 0\] do not make up document 4"),
    ],
)
def test_requests_that_are_no_question_are_refused_with_a_lens(
    asked: list[Instance], complaint: str, tiny: Model, lens: Lens
) -> None:
    with pytest.raises(CoralError, match=complaint):
        CoralLM(tiny, lens=lens).loglikelihood(asked, disable_tqdm=True)
    assert len(CoralLM(tiny).loglikelihood(asked, disable_tqdm=True)) == len(asked)


def test_a_lens_that_counts_characters_refuses_options_in_the_context(tiny: Model, lens: Lens, paper: Lens) -> None:
    asked = [instance((f"The {o} is", " here"), i, 0) for i, o in enumerate(("cat", "dog", "horse"))]
    with pytest.raises(CoralError, match="puts its options into the context"):
        CoralLM(tiny, lens=paper).loglikelihood(asked, disable_tqdm=True)
    with pytest.warns(UserWarning, match="With a lens"):
        found = logprobs(CoralLM(tiny, lens=lens).loglikelihood(asked, disable_tqdm=True))
    assert np.exp(found).sum() == pytest.approx(1.0)


def test_lm_evals_cache_is_refused_with_a_lens_and_works_without(
    tiny: Model, lens: Lens, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CoralError, match="--use_cache keeps answers by their text alone"):
        evaluate(CoralLM(tiny, lens=lens), folder, use_cache=str(tmp_path / "kept"))
    first = evaluate(CoralLM(tiny), folder, use_cache=str(tmp_path / "kept"))
    second = evaluate(CoralLM(tiny), folder, use_cache=str(tmp_path / "kept"))
    assert first["results"] == second["results"] == evaluate(CoralLM(tiny), folder)["results"]


# ------------------------------------------------------------------------------------------------- where it is known


def test_lm_eval_knows_the_model_by_name_and_the_package_has_its_entry_point() -> None:
    assert get_model("coral") is CoralLM
    project = Path(coral_lens.__file__).parents[2] / "pyproject.toml"
    points = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"]["lm_eval.models"]
    assert points == {"coral": f"{CoralLM.__module__}:{CoralLM.__name__}"}


def test_the_real_model_answers_real_questions_as_hflm_does(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval_model, "choose_shape", lambda _: Shape("tree", TOKEN_BUDGET))  # without a timing
    asked_for: dict[str, Any] = {"folder": definitions_of("arc"), "tasks": ["arc_easy"], "limit": 8}
    with local_data(split="validation"):
        (expected,) = evaluate(make_hflm(smollm2, batch_size=8), **asked_for)["results"].values()
        coral = evaluate(CoralLM(smollm2), **asked_for)
    (found,) = coral["results"].values()
    assert found == expected
    asked = [q.rendered for q in load_task("arc_easy", TaskOptions(split="validation", limit=8))]
    logged = [[tuple(arguments) for arguments in s["arguments"]] for s in coral["samples"]["arc_easy"]]
    assert logged == [list(zip(r.contexts, r.continuations, strict=True)) for r in asked if r is not None]


def test_no_hook_stays_on_the_model_after_an_error(
    tiny: Model, lens: Lens, requests: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = (tiny.norm, *tiny.blocks)
    before = [len(m._forward_hooks) for m in modules]
    lm = CoralLM(tiny, lens=lens)
    monkeypatch.setattr(FinalStates, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="With a lens"):
        lm.loglikelihood(requests, disable_tqdm=True)
    assert [len(m._forward_hooks) for m in modules] == before
