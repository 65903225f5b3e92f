"""Tiny random models of each family, and how transformers names their parts. A new family is one line of FAMILIES."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from coral_lens.engine.architectures import MaskForm
from coral_lens.engine.model import Model, wrap

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "tie_word_embeddings": False,
}


def make_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token a byte, and BOS in front where asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENS = {name: SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
OLD_SIZES = {**TOKENS, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False}
"""Of families whose configuration uses the older names."""
WINDOW = 16
GEMMA_SIZES = {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
ROPE_BORDER = 128
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}


class Paths(NamedTuple):
    """Where transformers keeps the parts of a family."""

    blocks: str = "model.layers"
    norm: str = "model.norm"
    projection: str | None = "self_attn.o_proj"
    """Within a block."""


class Tiny(NamedTuple):
    """How a tiny model of a family is made, and what is true of it."""

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    paths: Paths = Paths()
    takes_tree: bool = True
    """False where every option is scored in a row of its own."""

    def make(self) -> PreTrainedModel:
        return self.kind(deepcopy(self.config)).eval().requires_grad_(False)


FAMILIES = {
    "llama": Tiny(LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral": Tiny(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "mistral-window": Tiny(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=WINDOW)),
    "qwen2": Tiny(Qwen2ForCausalLM, Qwen2Config(**SIZES, use_sliding_window=False)),
    "qwen2-window": Tiny(
        Qwen2ForCausalLM, Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "qwen3": Tiny(Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "qwen3-window": Tiny(
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED_LAYERS),
    ),
    # transformers before 5.21 would take attention that leaves its soft-capping out
    "gemma2": Tiny(Gemma2ForCausalLM, Gemma2Config(**GEMMA_SIZES, attn_implementation="eager")),
    "gemma3": Tiny(Gemma3ForCausalLM, Gemma3TextConfig(**GEMMA_SIZES, layer_types=MIXED_LAYERS)),
    "phi3": Tiny(Phi3ForCausalLM, Phi3Config(**SIZES)),
    "phi3-window": Tiny(Phi3ForCausalLM, Phi3Config(**SIZES, sliding_window=WINDOW)),
    "phi3-longrope": Tiny(
        Phi3ForCausalLM, Phi3Config(**SIZES, original_max_position_embeddings=ROPE_BORDER, rope_parameters=LONGROPE)
    ),
    "gpt_neox": Tiny(
        GPTNeoXForCausalLM,
        GPTNeoXConfig(**{name: value for name, value in SIZES.items() if name != "num_key_value_heads"}),
        Paths("gpt_neox.layers", "gpt_neox.final_layer_norm", "attention.dense"),
    ),
    "gpt2": Tiny(
        GPT2LMHeadModel,
        GPT2Config(**OLD_SIZES, n_embd=32, n_positions=256),
        Paths("transformer.h", "transformer.ln_f", "attn.c_proj"),
    ),
    # what its head gives is not yet its logits
    "granite": Tiny(GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=4.0, residual_multiplier=0.5)),
    # ALiBi counts distance along the row, and a recurrent model has no attention mask at all
    "bloom": Tiny(
        BloomForCausalLM,
        BloomConfig(**OLD_SIZES, hidden_size=32),
        Paths("transformer.h", "transformer.ln_f", "self_attention.dense"),
        takes_tree=False,
    ),
    "mamba": Tiny(
        MambaForCausalLM,
        MambaConfig(**TOKENS, hidden_size=32, num_hidden_layers=3, state_size=4, tie_word_embeddings=False),
        Paths("backbone.layers", "backbone.norm_f", None),
        takes_tree=False,
    ),
}
TREE_FAMILIES = [name for name, tiny in FAMILIES.items() if tiny.takes_tree]
PLAIN_FAMILIES = [name for name, tiny in FAMILIES.items() if not tiny.takes_tree]
WINDOW_FAMILIES = [name for name, tiny in FAMILIES.items() if getattr(tiny.config, "sliding_window", None)]


def paths_of(hf: PreTrainedModel) -> Paths:
    return next((tiny.paths for tiny in FAMILIES.values() if isinstance(hf, tiny.kind)), Paths())


def make_llama() -> PreTrainedModel:
    return FAMILIES["llama"].make()


def cast_weights(model: Model, dtype: torch.dtype) -> None:
    """Put the weights of a model into another dtype in place, and leave its buffers, without which positions would blur."""
    for parameter in model.hf.parameters():
        parameter.data = parameter.data.to(dtype)


def make_model(family: str, *, bos: bool = False, seed: int = 0, max_length: int | None = None) -> Model:
    """A tiny random model whose weights are large enough that states differ between layers and tokens."""
    torch.manual_seed(seed)
    tiny = FAMILIES[family]
    config = deepcopy(tiny.config)
    if max_length is not None:
        config.max_position_embeddings = max_length
    hf = tiny._replace(config=config).make()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return wrap(hf, make_tokenizer(bos=bos), name=f"tiny-{family}")


def with_mask(model: Model, mask: MaskForm) -> Model:
    """The model as if its family took another form of mask."""
    return replace(model, family=replace(model.family, mask=mask))


def make_hflm(model: Model, *, batch_size: int = 1, kind: type[HFLM] | None = None) -> HFLM:
    """lm-eval's own wrapper of the same weights; the tokenizer is copied because HFLM gives it a padding token."""
    from lm_eval.models.huggingface import HFLM

    return (kind or HFLM)(pretrained=model.hf, tokenizer=deepcopy(model.tokenizer), batch_size=batch_size)


def rewrapped(model: Model) -> Model:
    """The model again after its weights were changed on purpose: the old one would be refused."""
    return wrap(model.hf, model.tokenizer, name=model.name)
