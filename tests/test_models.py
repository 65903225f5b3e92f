"""Models are loaded from anywhere, their parts are found by structure, and what cannot be used is refused in a sentence."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from conftest import FAMILIES, PLAIN_FAMILIES, SIZES, WINDOW, make_hflm, make_model, make_tokenizer, paths_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from coral_lens import models
from coral_lens.assets import embedded_model
from coral_lens.errors import CoralError
from coral_lens.models import (
    Model,
    ensure_bos,
    load_model,
    load_outline,
    resolve,
    tokenizer_digest,
    weights_digest,
    wrap,
)
from coral_lens.prompts import prepare
from coral_lens.records import Question, Style


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, with a tokenizer that adds BOS. Tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    save(make_model("llama", bos=True), folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(model: Model, folder: Path) -> None:
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


def refusal(name: str | Path, **settings: str) -> str:
    """The sentence with which a model is refused: one line that names it."""
    with pytest.raises(CoralError) as error:
        load_model(str(name), **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


# ----------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_every_family_are_found(family: str) -> None:
    model = make_model(family)
    part, paths = model.hf.get_submodule, paths_of(model.hf)
    assert model.blocks == tuple(part(paths.blocks))
    assert model.norm is part(paths.norm)
    assert model.head is model.hf.lm_head
    blocks = part(paths.blocks) if paths.projection else ()
    assert model.projections == tuple(block.get_submodule(str(paths.projection)) for block in blocks)
    assert (model.n_layers, model.width) == (3, 32)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PLAIN_FAMILIES])
def test_the_longest_input_is_that_of_the_positions(family: str) -> None:
    assert make_model(family).max_length == SIZES["max_position_embeddings"] == 256


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_a_model_without_positions_reads_2048_tokens_as_in_lm_eval(family: str) -> None:
    model = make_model(family)
    assert model.max_length == make_hflm(model).max_length == 2048


FORMS = {
    "llama": "full",
    "gpt2": "full",
    "gpt_neox": "full",
    "mistral": "sliding",
    "mistral-window": "sliding",
    "phi3": "sliding",
    "phi3-longrope": "sliding",
    "qwen2": "by_layer",
    "qwen3": "by_layer",
    "gemma2": "by_layer",
    "gemma3": "by_layer",
    "bloom": "full",
    "mamba": "full",
}


@pytest.mark.parametrize(("family", "form"), FORMS.items())
def test_each_family_has_its_form_of_mask(family: str, form: str) -> None:
    assert make_model(family).mask_form == form


def test_a_wrapped_model_is_frozen_and_in_evaluation_mode() -> None:
    hf = FAMILIES["llama"]().train()
    model = wrap(hf, make_tokenizer(), name="tiny")
    assert not model.hf.training
    assert not any(p.requires_grad for p in model.hf.parameters())


def tiny_opt() -> PreTrainedModel:
    """Its blocks lie one module deeper than is looked for."""
    size = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
    return OPTForCausalLM(OPTConfig(**size, num_hidden_layers=2, num_attention_heads=2, vocab_size=258))


def tiny_bert(kind: Callable[[BertConfig], PreTrainedModel]) -> PreTrainedModel:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return kind(BertConfig(**size, vocab_size=258))


@pytest.mark.parametrize(
    ("make", "architecture", "looked_for"),
    [
        (tiny_opt, "OPTForCausalLM", ["one list of 2 blocks", "a final norm named norm"]),
        (lambda: tiny_bert(BertForMaskedLM), "BertForMaskedLM", ["one list of 2 blocks", "a final norm named norm"]),
        (lambda: tiny_bert(BertModel), "BertModel", ["an output embedding"]),
    ],
)
def test_an_unknown_architecture_is_told_what_was_looked_for(
    make: Callable[[], PreTrainedModel], architecture: str, looked_for: list[str]
) -> None:
    with pytest.raises(CoralError) as error:
        wrap(make(), make_tokenizer(), name="other")
    assert f"The architecture {architecture}" in str(error.value)
    for part in looked_for:
        assert part in str(error.value)


def test_a_model_that_lacks_one_projection_has_none() -> None:
    hf = FAMILIES["llama"]()
    attention = hf.model.layers[1].self_attn
    attention.mix, attention.o_proj = attention.o_proj, None
    assert wrap(hf, make_tokenizer(), name="odd").projections == ()


# ------------------------------------------------------------------------------------------------- cached prefixes


def test_a_prefix_keeps_all_its_keys_also_in_layers_with_a_window(any_tiny: Model) -> None:
    long, short = tuple(range(3 * WINDOW)), (7, 8)
    cache = any_tiny.prefill([long, short])
    assert len(cache.layers) == 3
    for keys, values in cache.layers:
        assert keys.shape[0] == values.shape[0] == 2
        assert keys.shape[2] == values.shape[2] == len(long)
    assert cache.positions.tolist() == [list(range(len(long)))] * 2


def test_rows_take_the_keys_of_their_prefixes_cut_to_the_longest(tiny: Model) -> None:
    cache = tiny.prefill([(1, 2, 3), (4, 5)])
    mixed, same = cache.for_rows([1, 0, 1], 2), cache.for_rows([1, 1], 3)
    assert mixed.positions.tolist() == [[0, 1]] * 3
    for whole, some, both in zip(cache.layers, mixed.layers, same.layers, strict=True):
        for states, of_rows, of_one in zip(whole, some, both, strict=True):
            assert torch.equal(of_rows, torch.stack([states[i, :, :2] for i in (1, 0, 1)]))
            assert torch.equal(of_one, torch.stack([states[1]] * 2))
            assert of_one.data_ptr() == states[1].data_ptr(), "rows of one prefix need no copies"


def test_reading_a_cache_leaves_it_as_it_was(tiny: Model) -> None:
    cache = tiny.prefill([(1, 2, 3)])
    before = [(keys.clone(), values.clone()) for keys, values in cache.layers]
    tokens, allowed = torch.tensor([[4, 5]]), torch.tensor([[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]).bool()
    for _ in range(2):
        tiny.tree_body(tokens, torch.tensor([[3, 4]]), allowed, cache)
    for (keys, values), (old_keys, old_values) in zip(cache.layers, before, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)


# ------------------------------------------------------------------------------------------------------------- BOS


def test_a_gemma_tokenizer_that_does_not_add_bos_is_made_to() -> None:
    tokenizer, config = make_tokenizer(), FAMILIES["gemma2"]().config
    plain = tokenizer.encode("a word")
    for _ in range(2):  # once is enough
        ensure_bos(tokenizer, config)
        assert tokenizer.encode("a word") == [256, *plain]
    assert tokenizer(["a word", "b"])["input_ids"] == [[256, *plain], [256, *tokenizer.encode("b")[1:]]]
    assert tokenizer.encode("a word", add_special_tokens=False) == plain
    assert tokenizer.encode("a", "b") == [256, *plain[:1], 256, *tokenizer.encode("b")[1:]]
    assert tokenizer_digest(tokenizer) != tokenizer_digest(make_tokenizer())


@pytest.mark.parametrize(
    ("family", "tokenizer"),
    [("llama", make_tokenizer()), ("qwen3", make_tokenizer()), ("gemma3", make_tokenizer(bos=True))],
    ids=["llama without BOS", "qwen3 without BOS", "gemma3 with BOS"],
)
def test_other_tokenizers_stay_as_they_are(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    before = tokenizer.backend_tokenizer.to_str()
    ensure_bos(tokenizer, FAMILIES[family]().config)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_gemma_tokenizer_without_any_bos_token_stays_as_it_is() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="</s>")
    before = bare.backend_tokenizer.to_str()
    ensure_bos(bare, FAMILIES["gemma3"]().config)
    assert bare.backend_tokenizer.to_str() == before


@pytest.mark.parametrize(("family", "adds"), [("gemma2", True), ("gemma3", True), ("llama", False)])
def test_a_loaded_gemma_begins_its_prompts_with_one_bos(family: str, adds: bool, tmp_path: Path) -> None:
    save(make_model(family), tmp_path)
    model = load_model(str(tmp_path))
    question = Question("q", "q", "Which?", ("a", "b"))
    (prompt,) = prepare([question], Style(), model).prompts
    assert (prompt.contexts[0].count(256), prompt.contexts[0][0] == 256) == (int(adds), adds)
    assert all(256 not in option for option in prompt.options)


# --------------------------------------------------------------------------------------------------------- loading


def test_a_local_folder_is_loaded_in_float32_with_its_tokenizers_bos(saved: Path) -> None:
    model = load_model(str(saved))
    original = make_model("llama", bos=True)
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    assert model.fingerprint == original.fingerprint
    assert model.tokenizer.encode("a")[0] == model.tokenizer.bos_token_id


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_the_dtype_asked_for_is_the_dtype_of_every_weight(saved: Path, name: str, dtype: torch.dtype) -> None:
    model = load_model(str(saved), dtype=name)
    assert {p.dtype for p in model.hf.parameters()} == {dtype}


def test_auto_is_the_checkpoints_own_dtype(tmp_path: Path) -> None:
    model = make_model("llama")
    model.hf.to(torch.bfloat16)
    save(model, tmp_path / "half")
    assert load_model(str(tmp_path / "half"), dtype="auto").dtype == torch.bfloat16
    assert load_model(str(tmp_path / "half")).dtype == torch.float32


def test_a_device_map_places_the_model(saved: Path) -> None:
    assert load_model(str(saved), device_map="cpu").fingerprint == make_model("llama", bos=True).fingerprint


def test_loading_leaves_transformers_logging_as_it_was(saved: Path) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(str(saved))
    refusal("no-such-model")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_an_unknown_name_is_refused() -> None:
    sentence = refusal("nobody/no-such-model")
    assert sentence.startswith("Cannot load model 'nobody/no-such-model'")
    assert sentence.endswith("Give a hub id, a local folder, a .gguf file or 'smollm2'.")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"Folder '{tmp_path}' holds no config.json; give the folder of a saved model."


def test_an_unknown_dtype_is_refused(saved: Path) -> None:
    assert refusal(saved, dtype="int3") == "Unknown dtype 'int3'; use one of float32, bfloat16, float16, auto."


def test_a_device_that_does_not_exist_is_refused(saved: Path) -> None:
    assert "at start of device string: banana" in refusal(saved, device="banana")
    assert str(saved) in refusal(saved, device="cuda:99")


@pytest.mark.parametrize("keep", [0, 4, 1000, 20_000])
def test_truncated_weights_are_refused(copied: Path, keep: int) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert f"Cannot load model '{copied}'" in refusal(copied)


def test_missing_weights_are_refused_and_not_made_up(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"], weights["lm_head.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 2 of its weights, first 'lm_head.weight'" in refusal(copied)


def test_weights_of_another_shape_are_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    assert f"Cannot load model '{copied}'" in refusal(copied)


@pytest.mark.parametrize("damage", [lambda text: text[:500], lambda text: text.replace('"BPE"', '"XYZ"')])
def test_a_damaged_tokenizer_is_refused(copied: Path, damage: Callable[[str], str]) -> None:
    file = copied / "tokenizer.json"
    file.write_text(damage(file.read_text()))
    assert f"Cannot load model '{copied}'" in refusal(copied)


def test_an_unsupported_folder_is_told_what_was_looked_for(tmp_path: Path) -> None:
    tiny_opt().save_pretrained(tmp_path / "opt")
    make_tokenizer().save_pretrained(tmp_path / "opt")
    assert "The architecture OPTForCausalLM (model type 'opt') is not supported" in refusal(tmp_path / "opt")


# ------------------------------------------------------------------------------------------------------------ GGUF


def write_gguf(path: Path, model: Model) -> Path:
    """Write a tiny Llama as llama.cpp would: other tensor names, and queries and keys with their halves interleaved."""
    writer, config = gguf.GGUFWriter(path, "llama"), model.hf.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    vocab = model.tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_scores([0.0] * len(vocab))
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.hf.state_dict().items():
        array = weight.numpy()
        for projection, n in heads.items():
            if projection in name:
                array = array.reshape(n, 2, len(array) // n // 2, -1).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def forbid_conversion(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(models, "load_weights", lambda *_: pytest.fail("the weights were converted again"))


def test_a_gguf_file_gives_the_weights_it_was_made_from(own_cache: Path, tmp_path: Path) -> None:
    original = make_model("llama")
    loaded = load_model(str(write_gguf(tmp_path / "tiny.gguf", original)))
    expected = original.hf.state_dict()
    assert loaded.hf.state_dict().keys() == expected.keys()
    for name, weight in loaded.hf.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert loaded.fingerprint["weights"] == original.fingerprint["weights"]
    assert loaded.tokenizer.encode("hello, wörld") == original.tokenizer.encode("hello, wörld")


def test_a_conversion_is_kept_under_its_contents_digest_and_nothing_else_is_left(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(str(write_gguf(tmp_path / "tiny.gguf", make_model("llama"))))
    assert isinstance(folder, Path)
    assert list((own_cache / "models").iterdir()) == [folder]
    (tmp_path / "tiny.gguf").rename(tmp_path / "renamed.gguf")
    forbid_conversion(monkeypatch)
    assert resolve(str(tmp_path / "renamed.gguf")) == folder


def test_other_weights_in_a_gguf_file_of_the_same_name_are_converted_anew(own_cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    digests = [
        load_model(str(write_gguf(path, make_model("llama", seed=seed)))).fingerprint["weights"] for seed in (0, 1)
    ]
    assert digests[0] != digests[1]
    assert len(list((own_cache / "models").iterdir())) == 2


def test_a_conversion_that_fails_leaves_nothing(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_model("llama"))

    def break_off(*_: object) -> PreTrainedModel:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "load_weights", break_off)
        with pytest.raises(KeyboardInterrupt):
            resolve(str(path))
    assert list((own_cache / "models").iterdir()) == []
    assert load_model(str(path)).n_layers == 3


def test_a_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    assert refusal(path) == f"Model file {path} does not exist; check the path."


def damaged_gguf(kind: str, path: Path) -> bytes:
    whole = write_gguf(path, make_model("llama")).read_bytes()
    return {
        "empty": b"",
        "text": b"this is no model\n" * 20,
        "header only": whole[:8],
        "half of the metadata": whole[:1000],
        "half of the weights": whole[: len(whole) - 40_000],
        "an unknown version": whole[:4] + struct.pack("<I", 99) + whole[8:],
    }[kind]


@pytest.mark.parametrize(
    "kind", ["empty", "text", "header only", "half of the metadata", "half of the weights", "an unknown version"]
)
def test_a_damaged_gguf_file_is_refused_and_leaves_nothing(own_cache: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damaged_gguf(kind, path))
    assert f"Cannot load model '{path}'" in refusal(path)
    assert list((own_cache / "models").iterdir()) == []


def test_a_gguf_file_without_some_weights_is_refused_and_leaves_nothing(own_cache: Path, tmp_path: Path) -> None:
    model = make_model("llama")
    model.hf.model.layers[2].mlp.up_proj = nn.Identity()
    path = write_gguf(tmp_path / "tiny.gguf", model)
    assert "lacks 1 of its weights, first 'model.layers.2.mlp.up_proj.weight'" in refusal(path)
    assert list((own_cache / "models").iterdir()) == []


def test_the_embedded_model_is_smollm2_and_is_converted_only_once(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_conversion(monkeypatch)
    assert (smollm2.n_layers, smollm2.width, smollm2.max_length) == (30, 576, 8192)
    folder = resolve("smollm2")
    assert isinstance(folder, Path)
    assert folder == resolve(str(embedded_model()))
    assert (folder / "config.json").is_file()


def test_without_the_embedded_model_the_user_is_told_how_to_fetch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "embedded_model", lambda: None)
    assert refusal("smollm2") == "The embedded model is not installed; run `coral assets` to fetch it."


# --------------------------------------------------------------------------------------------------- fingerprints


def test_the_weights_digest_is_the_same_in_float32_and_bfloat16(saved: Path) -> None:
    digests = {load_model(str(saved), dtype=dtype).fingerprint["weights"] for dtype in ("float32", "bfloat16")}
    assert len(digests) == 1


def test_the_weights_digest_changes_with_one_weight(any_tiny: Model) -> None:
    hf = deepcopy(any_tiny.hf)
    assert weights_digest(hf) == any_tiny.fingerprint["weights"]
    weight = [p for p in hf.get_submodule(paths_of(hf).blocks)[2].parameters() if p.ndim == 2][-1]
    weight[5, 7] *= 1.01
    assert weights_digest(hf) != any_tiny.fingerprint["weights"]


def test_the_weights_digest_changes_when_two_weights_are_swapped(tiny: Model) -> None:
    hf = deepcopy(tiny.hf)
    first, second = hf.model.layers[0].mlp, hf.model.layers[1].mlp
    first.up_proj, second.up_proj = second.up_proj, first.up_proj
    assert weights_digest(hf) != tiny.fingerprint["weights"]


def test_the_tokenizer_digest_tells_vocabularies_and_bos_rules_apart() -> None:
    plain, with_bos, other = make_tokenizer(), make_tokenizer(bos=True), make_tokenizer()
    other.add_tokens(["coral"])
    assert len({tokenizer_digest(t) for t in (plain, with_bos, other)}) == 3
    assert tokenizer_digest(make_tokenizer()) == tokenizer_digest(plain)


def test_the_tokenizer_digest_does_not_depend_on_what_the_tokenizer_was_used_for(tiny: Model) -> None:
    tokenizer = make_hflm(tiny).tokenizer  # lm-eval gives it a padding token
    tokenizer(["a", "long text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_digest(tokenizer) == tiny.fingerprint["tokenizer"]


# ------------------------------------------------------------------------------------------------------------ chat

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def chat_model(template: str | None) -> Model:
    model = make_model("llama")
    model.tokenizer.chat_template = template
    return model


def test_a_model_without_a_chat_template_is_told_so(tiny: Model) -> None:
    with pytest.raises(CoralError, match=r"'tiny-llama' has no chat template; leave --apply-chat-template out"):
        tiny.chat_template(MESSAGES)


@pytest.mark.parametrize("template", [TURNS, NO_SYSTEM + TURNS])
def test_the_chat_template_is_applied_as_lm_eval_applies_it(template: str) -> None:
    model = chat_model(template + "{% if add_generation_prompt %}<assistant>{% endif %}")
    assert model.chat_template(MESSAGES) == make_hflm(model).apply_chat_template(MESSAGES)


def test_a_template_without_a_system_role_drops_the_system_message() -> None:
    assert chat_model(TURNS).chat_template(MESSAGES) == "<system>Be brief.<user>Hello"
    assert chat_model(NO_SYSTEM + TURNS).chat_template(MESSAGES) == "<user>Hello"


def test_the_last_message_is_left_open_where_no_answer_is_asked_for() -> None:
    model = chat_model(TURNS + "</s>")
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I think"}]
    assert model.chat_template(history, add_generation_prompt=False) == "<user>Hello<assistant>I think"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_outline_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    made = make_model(family)
    made.hf.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    outline, model = load_outline(str(tmp_path)), load_model(str(tmp_path))
    assert (outline.n_layers, outline.width) == (model.n_layers, model.width)
    assert outline.tokenizer == model.fingerprint["tokenizer"]
