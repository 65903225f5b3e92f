"""A model is computed with by one thread at a time, in its own modes, with the weights of its fingerprint, and left as found."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from copy import deepcopy
from threading import Event, Thread

import numpy as np
import pytest
import torch
from support.models import FAMILIES, make_model, make_tokenizer, rewrapped
from support.questions import toy_questions
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from coral_lens.engine import in_use as guard
from coral_lens.engine.batches import Batch, collate
from coral_lens.engine.extract import score_questions
from coral_lens.engine.hooks import Site
from coral_lens.engine.in_use import in_use
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.planned import Extraction
from coral_lens.engine.precision import Precision, set_precision
from coral_lens.engine.scoring import score_batch
from coral_lens.engine.trees import build_tree
from coral_lens.errors import CoralError
from coral_lens.records import Prompt

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def scores(model: Model, seed: int = 0) -> np.ndarray:
    """Log-probabilities and one layer of a few questions."""
    with score_questions(model, toy_questions(6, seed=seed), Extraction(layers=(2,))) as store:
        return np.concatenate([store.table.logprobs, store.layer(2).ravel()])


def plain_logits(model: Model) -> Tensor:
    with torch.inference_mode():
        return model.hf(IDS).logits


# ------------------------------------------------------------------------------------------------------------- threads


def test_threads_get_the_numbers_of_one_thread_and_leave_the_model_as_it_was() -> None:
    model = make_model("llama")
    before, seeds = plain_logits(model), [0, 1, 0, 2, 1, 0, 2, 1]
    alone = {seed: scores(model, seed) for seed in set(seeds)}
    with ThreadPoolExecutor(max_workers=4) as pool:
        together = list(pool.map(lambda seed: scores(model, seed), seeds))
    for seed, numbers in zip(seeds, together, strict=True):
        assert numbers.tobytes() == alone[seed].tobytes()
    assert model.hf.config._attn_implementation == "sdpa"
    assert torch.equal(plain_logits(model), before)


def test_two_wraps_of_one_model_share_its_lock() -> None:
    model = make_model("llama")
    entered, done = Event(), Event()

    def other() -> None:
        with in_use(rewrapped(model)):
            entered.set()
        done.set()

    with in_use(model):
        thread = Thread(target=other)
        thread.start()
        assert not entered.wait(0.2)
    assert done.wait(10)
    thread.join()


class Doubling:
    """Doubles the residual stream, and runs something of somebody else's while it is on the model."""

    sites = (Site("residual", 2),)

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def edit(self, site: Site, states: Tensor, batch: Batch) -> Tensor:
        self._meanwhile()
        return 2 * states


def test_a_pass_of_somebody_else_in_another_thread_does_not_meet_our_hooks_or_our_attention() -> None:
    model = make_model("llama")
    before, seen = plain_logits(model), []

    def meanwhile() -> None:
        thread = Thread(target=lambda: seen.append(plain_logits(model)))
        thread.start()
        thread.join()

    tree = build_tree(Prompt("q", ((1, 2, 3),) * 2, ((4,), (5, 6))))
    batch = collate({0: tree, 1: tree}, [(0, 1)])
    score_batch(model, batch, edits=[Doubling(meanwhile)])
    # norms and gates are fused just then, which changes roundings only
    torch.testing.assert_close(seen[0], before, rtol=1e-4, atol=1e-4)


def test_the_lock_is_free_again_after_an_error() -> None:
    model = make_model("llama")
    with pytest.raises(ZeroDivisionError), in_use(model):
        _ = 1 / 0
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert len(pool.submit(scores, model).result(timeout=30))


# --------------------------------------------------------------------------------------------------------------- modes


def with_dropout() -> Model:
    torch.manual_seed(0)
    config = deepcopy(FAMILIES["llama"].config)
    assert isinstance(config, LlamaConfig)
    config.attention_dropout = 0.5
    return wrap(LlamaForCausalLM(config).eval(), make_tokenizer(), name="dropout")


def test_a_model_in_training_mode_gives_the_same_numbers_and_stays_in_it() -> None:
    model = with_dropout()
    expected = scores(model)
    model.hf.train()
    model.hf.model.norm.eval()
    assert scores(model).tobytes() == expected.tobytes()
    training = {name for name, module in model.hf.named_modules() if module.training}
    assert training == {name for name, _ in model.hf.named_modules()} - {"model.norm"}


def autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("around", [autocast, torch.enable_grad], ids=["autocast", "gradients"])
def test_an_outer_mode_changes_nothing(tiny: Model, around: Callable[[], AbstractContextManager[None]]) -> None:
    expected = scores(tiny)
    with around():
        assert scores(tiny).tobytes() == expected.tobytes()


def test_another_default_dtype_changes_nothing_and_stays(tiny: Model) -> None:
    expected = scores(tiny)
    torch.set_default_dtype(torch.float64)
    try:
        assert scores(tiny).tobytes() == expected.tobytes()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------------------------- weights


def edit_in_place(hf: LlamaForCausalLM) -> None:
    with torch.no_grad():
        hf.model.layers[1].mlp.up_proj.weight[3, 3] += 1.0


def edit_behind_the_back(hf: LlamaForCausalLM) -> None:
    hf.model.layers[1].mlp.up_proj.weight.data.add_(0.5)


def replace_a_weight(hf: LlamaForCausalLM) -> None:
    hf.lm_head.weight = nn.Parameter(hf.lm_head.weight.detach() * 1.1)


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, as libraries of adapters put in its place."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base_layer = inner
        self.adapter = nn.Linear(inner.in_features, inner.out_features, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.base_layer(states) + self.adapter(states)


def add_adapter(hf: LlamaForCausalLM) -> None:
    hf.model.layers[0].self_attn.q_proj = Adapted(hf.model.layers[0].self_attn.q_proj)  # type: ignore[assignment]


@pytest.mark.parametrize("change", [edit_in_place, edit_behind_the_back, replace_a_weight, add_adapter])
def test_weights_that_change_after_loading_are_refused(change: Callable[[LlamaForCausalLM], None]) -> None:
    model = make_model("llama")
    scores(model)
    assert isinstance(model.hf, LlamaForCausalLM)
    change(model.hf)
    with pytest.raises(
        CoralError, match=r"weights of 'tiny-llama' have changed since it was loaded .*coral_lens\.wrap"
    ):
        scores(model)
    assert len(scores(rewrapped(model)))


def test_one_number_that_is_changed_behind_the_back_is_found_when_all_are_looked_at() -> None:
    model = make_model("llama")
    model.verify()
    model.hf.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1.0
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        model.verify()


def test_a_change_that_rounding_to_the_fingerprints_dtype_would_hide_is_found_too() -> None:
    model = make_model("llama")
    model.hf.model.layers[1].mlp.up_proj.weight.data[3, 3] *= 1.0001
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        model.verify()


def test_two_numbers_that_are_swapped_are_found() -> None:
    model = make_model("llama")
    weight = model.hf.model.layers[1].mlp.up_proj.weight.data
    weight[3, 3:5] = weight[3, 3:5].flip(0).clone()
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        model.verify()


def converted_tiny(precision: Precision) -> Model:
    model = make_model("llama")
    set_precision(model.hf, precision, [list(range(60, 100))])
    return rewrapped(model)


UNSEEN = {
    ("mixed", "model.layers.1.mlp.up_proj.weight"): (3, 3),
    ("mixed", "lm_head.weight"): (7, 5),
    ("mixed", "model.rotary_emb.inv_freq"): (1,),
    ("int8", "model.layers.1.mlp.up_proj.weight"): (3, 3),
    ("int8", "model.layers.1.mlp.up_proj.scale"): (37,),
    ("int8", "model.layers.1.mlp.up_proj.smooth"): (17,),
    ("int8", "model.layers.0.input_layernorm.weight"): (17,),
}
"""Places in converted models."""


@pytest.mark.parametrize(("precision", "name"), UNSEEN)
def test_a_number_of_a_converted_model_that_no_pass_looks_at_is_found_when_all_are_looked_at(
    precision: Precision, name: str
) -> None:
    model, place = converted_tiny(precision), UNSEEN[precision, name]
    model.verify()
    tensor = {**dict(model.hf.named_parameters()), **dict(model.hf.named_buffers())}[name].data
    tensor[place] = tensor[place] + 1
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        model.verify()


@pytest.mark.parametrize("name", ["mlp.up_proj.scale", "mlp.up_proj.smooth"])
def test_buffers_that_are_written_to_or_replaced_are_refused_by_a_pass(name: str) -> None:
    for change in (Tensor.mul_, Tensor.__mul__):
        model = converted_tiny("int8")
        layer, _, key = f"model.layers.1.{name}".rpartition(".")
        setattr(model.hf.get_submodule(layer), key, change(model.hf.get_buffer(f"{layer}.{key}"), 2.0))
        with pytest.raises(CoralError, match="have changed since it was loaded"):
            scores(model)


def test_buffers_of_quantised_weights_are_looked_at() -> None:
    model = make_model("llama")
    model.hf.config.quantization_config = {"quant_method": "some"}
    model.hf.model.layers[0].register_buffer("qweight", torch.arange(4000, dtype=torch.int32))
    model = rewrapped(model)
    model.verify()
    model.hf.model.layers[0].qweight.data[1234] += 1
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        model.verify()


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frequencies_that_a_model_sets_anew_by_the_length_of_a_row_are_no_change(rope: str) -> None:
    model = make_model("phi3-longrope") if rope == "longrope" else with_dynamic_rope()
    before = model.hf.model.rotary_emb.inv_freq.clone()
    with in_use(model), torch.inference_mode():
        model.hf(torch.arange(5, 205)[None])
    assert not torch.equal(model.hf.model.rotary_emb.inv_freq, before)
    with in_use(model):
        model.verify()


def with_dynamic_rope() -> Model:
    config = deepcopy(FAMILIES["llama"].config)
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return wrap(LlamaForCausalLM(config).eval(), make_tokenizer(), name="dynamic")


@pytest.mark.parametrize("precision", ["float32", "mixed", "int8"])
def test_the_same_weights_in_other_tensors_are_accepted(precision: Precision) -> None:
    model = converted_tiny(precision)
    expected = scores(model)
    for tensor in (*model.hf.parameters(), *model.hf.buffers()):
        tensor.data = tensor.data.clone()
    assert scores(model).tobytes() == expected.tobytes()


def test_weights_that_were_cast_are_those_of_the_fingerprint_but_other_frequencies_are_not() -> None:
    model = make_model("llama")
    for parameter in model.hf.parameters():
        parameter.data = parameter.data.bfloat16()
    model.verify()
    model.hf.bfloat16()  # the frequencies too, which no checkpoint that is loaded in bfloat16 has
    with pytest.raises(CoralError, match="have changed since it was loaded"):
        model.verify()


# --------------------------------------------------------------------------------------------------------------- forks


def test_a_fork_of_a_process_that_computed_with_threads_is_refused(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard._Process, "computed", os.getpid() + 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(CoralError, match=r"was forked from one that has computed with 2 threads.*spawn"):
        scores(tiny)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert len(scores(tiny))


def test_a_fork_in_the_midst_of_another_threads_pass_says_so_and_its_parent_goes_on() -> None:
    model, held, done = make_model("llama"), Event(), Event()
    expected = scores(model)

    def hold() -> None:
        with in_use(model):
            held.set()
            done.wait()

    thread = Thread(target=hold)
    thread.start()
    held.wait()
    receiving, sending = os.pipe()
    if (child := os.fork()) == 0:
        try:
            scores(model)
        except CoralError as error:
            os.write(sending, str(error).encode())
        os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    done.set()
    thread.join()
    assert said.startswith("This process was forked while another thread computed with 'tiny-llama'")
    assert scores(model).tobytes() == expected.tobytes()
