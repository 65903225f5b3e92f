"""Models are loaded from anywhere, and what cannot be loaded is refused in a sentence."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.models import FAMILIES, make_model, make_tokenizer
from torch import nn
from transformers import (
    AutoTokenizer,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from coral_lens.data import hub
from coral_lens.data.assets import embedded_model
from coral_lens.data.settings import Style
from coral_lens.engine import loading
from coral_lens.engine.fingerprints import tokenizer_digest, weights_digest
from coral_lens.engine.loading import ensure_bos, load_model, load_outline, resolve
from coral_lens.engine.model import Model
from coral_lens.engine.prompts import prepare
from coral_lens.errors import CoralError
from coral_lens.records import Question


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


def test_a_model_that_bends_its_attention_scores_is_loaded_with_attention_that_does(tmp_path: Path) -> None:
    """transformers before 5.21 would take attention that leaves the bending out."""
    save(make_model("gemma2"), tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "config.json").read_text("utf-8"))
    changed = config | {"attn_logit_softcapping": 0.05}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(changed), "utf-8")
    model = load_model(str(tmp_path / "tiny"), dtype="float32")
    assert model.hf.config._attn_implementation == "eager"
    ids = torch.arange(5, 25)[None]
    bent = model.hf(input_ids=ids).logits
    for layer in model.hf.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert not torch.allclose(bent, model.hf(input_ids=ids).logits, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- BOS


def test_a_gemma_tokenizer_that_does_not_add_bos_is_made_to() -> None:
    tokenizer, config = make_tokenizer(), FAMILIES["gemma2"].config
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
    ensure_bos(tokenizer, FAMILIES[family].config)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_gemma_tokenizer_without_any_bos_token_stays_as_it_is() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="</s>")
    before = bare.backend_tokenizer.to_str()
    ensure_bos(bare, FAMILIES["gemma3"].config)
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


@pytest.mark.filterwarnings("default:float16 is several times slower:UserWarning")
@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_the_dtype_asked_for_is_the_dtype_of_every_weight(saved: Path, name: str, dtype: torch.dtype) -> None:
    model = load_model(str(saved), dtype=name)
    assert {p.dtype for p in model.hf.parameters()} == {dtype}


def test_on_the_cpu_a_tiny_model_is_loaded_in_float32_whatever_its_checkpoint_has(tmp_path: Path) -> None:
    model = make_model("llama")
    model.hf.to(torch.bfloat16)
    save(model, tmp_path / "half")
    for wanted in (None, "auto"):
        assert load_model(str(tmp_path / "half"), dtype=wanted).precision == "float32"


@pytest.mark.parametrize("place", [{"device": "meta"}, {"device_map": "meta"}])
def test_a_device_without_numbers_is_refused(saved: Path, place: dict[str, str]) -> None:
    with pytest.raises(CoralError, match="holds shapes and no numbers"):
        load_model(str(saved), **place)


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


def test_without_a_network_the_hub_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_network(host: str, *_: Any) -> None:
        asked.append(host)
        raise OSError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.socket, "getaddrinfo", no_network)
    monkeypatch.setattr(hub, "getproxies", dict)
    sentence = refusal("smolm2")
    assert "the hub cannot be asked (no network, or HF_HUB_OFFLINE is set). Did you mean 'smollm2'?" in sentence
    assert len(asked) == 1, "the name is looked up once"
    assert not constants.HF_HUB_OFFLINE, "the setting is as it was"


@pytest.mark.parametrize("name", ["./no-such-folder", "~/no-such-folder", "/no/such/folder", "a/b/c"])
def test_a_path_that_leads_nowhere_is_not_taken_for_a_hub_id(name: str) -> None:
    assert refusal(name) == f"There is no model at {name}: no such file or folder; check the path."


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"Folder '{tmp_path}' holds no config.json; give the folder of a saved model."


def test_an_unknown_dtype_is_refused(saved: Path) -> None:
    assert (
        refusal(saved, dtype="int3")
        == "Unknown dtype 'int3'; use one of float32, bfloat16, float16, mixed, int8, auto."
    )


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
    config = OPTConfig(vocab_size=258, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2)
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    make_tokenizer().save_pretrained(tmp_path / "opt")
    assert "The architecture OPTForCausalLM (model type 'opt') is not supported" in refusal(tmp_path / "opt")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_outline_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    made = make_model(family)
    made.hf.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    outline, model = load_outline(str(tmp_path)), load_model(str(tmp_path))
    assert (outline.n_layers, outline.width) == (model.n_layers, model.width)
    assert outline.tokenizer == model.fingerprint["tokenizer"]


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
    patch.setattr(loading, "load_weights", lambda *_: pytest.fail("the weights were converted again"))


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
        patch.setattr(loading, "load_weights", break_off)
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


def test_every_allowed_transformers_reads_the_embedded_tokenizer_alike() -> None:
    """Release 5.17 takes another token for the end of a text, and lenses of other releases refuse the model."""
    gguf = embedded_model()
    assert gguf is not None
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer_digest(tokenizer).startswith("d6f7ac3c91b4d072")


def test_without_the_embedded_model_the_user_is_told_how_to_fetch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "embedded_model", lambda: None)
    assert refusal("smollm2") == "The embedded model is not installed; run `coral assets` to fetch it."


# -------------------------------------------------------------------------------------------- adapters, quantised weights


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A LoRA adapter of the tiny Llama that changes what it says."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    changed = get_peft_model(make_model("llama", bos=True).hf, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    for name, weight in changed.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight)
    changed.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_added_to_the_weights_and_named(saved: Path, adapter: Path) -> None:
    plain, adapted = load_model(saved), load_model(saved, adapter=adapter)
    assert adapted.fingerprint["weights"] != plain.fingerprint["weights"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    (a,) = (t for n, t in tensors.items() if "layers.1.self_attn.q_proj.lora_A" in n)
    (b,) = (t for n, t in tensors.items() if "layers.1.self_attn.q_proj.lora_B" in n)
    change = adapted.hf.model.layers[1].self_attn.q_proj.weight - plain.hf.model.layers[1].self_attn.q_proj.weight
    torch.testing.assert_close(change, 8 / 2 * b @ a)  # alpha is 8 where nothing else is said
    again = load_model(adapted.name)
    assert (again.name, again.fingerprint) == (f"{saved} + {adapter}", adapted.fingerprint)


def test_an_adapter_that_is_none_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refusal(saved, adapter=str(tmp_path / "empty")).startswith(f"Cannot load adapter '{tmp_path / 'empty'}': ")


def test_an_adapter_that_is_pickled_is_refused(saved: Path, adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    assert "adapter_model.safetensors" in refusal(saved, adapter=str(adapter))


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
    ],
)
def test_quantised_weights_without_their_package_are_refused_with_its_name(
    copied: Path, settings: dict[str, Any], package: str
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert "pip install" in (sentence := refusal(copied))
    assert package in sentence


def test_quantised_weights_are_in_the_fingerprint_wherever_their_library_keeps_them() -> None:
    hf = make_model("llama").hf
    hf.config.quantization_config = {"quant_method": "some"}
    hf.model.layers[0].register_buffer("qweight", torch.arange(6, dtype=torch.int32))
    one = weights_digest(hf)
    hf.model.layers[0].qweight[5] += 1 << 20
    assert weights_digest(hf) != one


# --------------------------------------------------------------------------------------------------- what is remembered


def test_digests_of_files_that_were_not_written_since_are_remembered(
    copied: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model(copied).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(loading, "weights_digest", lambda _: pytest.fail("the weights were read again"))
        assert load_model(copied).fingerprint == first
        assert load_model(copied, dtype="int8").fingerprint == first
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert load_model(copied).fingerprint["weights"] != first["weights"]


def test_a_converted_model_is_checked_whole_once_and_again_when_it_was_written(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_model("llama"))
    folder = resolve(str(path))
    assert resolve(str(path)) == folder
    monkeypatch.setattr(loading, "is_intact", lambda _: pytest.fail("was read again"))
    assert resolve(str(path)) == folder
    monkeypatch.undo()
    monkeypatch.setenv("CORAL_CACHE", str(own_cache))
    damaged = Path(folder) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    load_model(path)  # which converts it again
    assert damaged.read_bytes()[-1:] != b"!"
