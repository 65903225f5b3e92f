"""Name the parts of a causal language model and run them. All knowledge of architectures is here, and nowhere else.

Layers are numbered as in the paper and in Hugging Face: 0 is the embedding output, l the residual stream after block l,
*before* the final norm. (Hugging Face's own last hidden state is after the norm: states are therefore read with hooks.)

Digests that tell whether a model and a tokenizer are the ones that something was made with. Never loads either."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from coral_lens.engine._kernels import Block, block_attention
from coral_lens.errors import CoralError
from coral_lens.storage.files import digest, digest_bytes

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


DEFAULT_MAX_LENGTH = 2048
HEAD_BLOCK = 2048
"""Words of the vocabulary whose logits are computed at a time."""

MaskForm = Literal["full", "sliding", "by_layer"]
MASK_FORMS: dict[str, MaskForm] = {
    "llama": "full",
    "gpt2": "full",
    "gpt_neox": "full",
    "mistral": "sliding",
    "phi3": "sliding",
    "qwen2": "by_layer",
    "qwen3": "by_layer",
    "gemma2": "by_layer",
    "gemma3_text": "by_layer",
}
"""Which attention mask a family takes: one causal mask; one mask cut to a window of *positions*; a dict of both kinds.

A full mask on a sliding family is silently wrong, and a family that takes one mask refuses a dict. A family that is not
listed is tried with a full mask; the engine's self-check decides whether it is scored that way.
"""

MASK_COUNTERS = ("bloom", "falcon")
"""Families without position ids that count the attention mask instead."""

BLOCK_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Families whose attention is softmax(q k / scale) v through transformers' attention functions, and nothing more."""

NORM_NAMES = ("norm", "final_layernorm", "ln_f", "norm_f", "final_layer_norm")
PROJECTION_NAMES = ("o_proj", "out_proj", "dense", "c_proj")


@dataclass(frozen=True)
class Model:
    """A frozen model with its tokenizer and the parts that the engine reads and edits."""

    name: str
    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: tuple[nn.Module, ...]
    norm: nn.Module
    head: nn.Module
    projections: tuple[nn.Module, ...]
    """The attention output projection of each block, whose input holds the outputs of the heads side by side; empty where
    blocks have none (recurrent models)."""
    mask_form: MaskForm
    max_length: int
    fingerprint: dict[str, str] = field(repr=False)
    """Digests of weights and tokenizer: a lens refuses a model whose fingerprint is not the one it was fitted on."""

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def width(self) -> int:
        return int(self.hf.config.get_text_config().hidden_size)

    @property
    def n_heads(self) -> int:
        """Query heads of a block: what the input of its output projection is made of."""
        return int(self.hf.config.get_text_config().num_attention_heads)

    @property
    def head_dim(self) -> int:
        """Columns of one head's output; not always the width over the number of heads."""
        # a linear layer and GPT-2's Conv1D keep their weights the other way round, but as many of them
        return self.projections[0].get_parameter("weight").numel() // self.width // self.n_heads

    @property
    def device(self) -> torch.device:
        return next(self.hf.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def plain_body(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the final, normed states [batch, token, width] of ordinary causal rows, padded on the right."""
        positions = {}
        if input_ids.shape[1] > self._last_position + 1:
            spread = torch.arange(input_ids.shape[1], device=input_ids.device).clamp(max=self._last_position)
            positions["position_ids"] = spread.expand(len(input_ids), -1)
        with self._rope_by_row(input_ids.shape[1], lengths):
            return self.hf.base_model(input_ids=input_ids, use_cache=False, **positions).last_hidden_state

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        config = self.hf.config.get_text_config()
        n_heads = getattr(config, "num_key_value_heads", None) or self.n_heads
        return 2 * self.n_layers * n_heads * self.head_dim * self.dtype.itemsize

    def takes_gaps(self, length: int) -> bool:
        """Whether masked columns in the midst of a row of this length change nothing.

        They do where a window is cut by columns, and in families (MPT, those with a recurrent state) that count columns.
        """
        config = self.hf.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        known = config.model_type in MASK_FORMS or config.model_type in MASK_COUNTERS
        return known and (window is None or length <= window)

    @property
    def attends_in_blocks(self) -> bool:
        """Whether one row of many questions is best computed question by question: on the CPU, where no window is cut."""
        config = self.hf.config.get_text_config()
        return (
            config.model_type in BLOCK_FAMILIES
            and getattr(config, "sliding_window", None) is None
            and config._attn_implementation == "sdpa"
            and self.dtype == torch.float32
            and {p.device.type for p in self.hf.parameters()} == {"cpu"}
        )

    def block_body(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        blocks: tuple[Block, ...],
        prefix: PrefixCache | None = None,
    ) -> Tensor:
        """Return what `tree_body` does for one row, whose mask is given as blocks."""
        past = None if prefix is None else prefix.as_cache()
        # a mask of four dimensions is handed on as it is; the attention function has no use for it
        unused = torch.zeros(1, 1, 1, 1)
        with block_attention(self.hf):
            return self._tree_pass(input_ids, position_ids, unused, past, blocks=blocks)

    def tree_body(
        self, input_ids: Tensor, position_ids: Tensor, allowed: Tensor, prefix: PrefixCache | None = None
    ) -> Tensor:
        """Return the final, normed states of rows in which `allowed` [batch, query, key] says who sees whom.

        The keys of a prefix, if there is one, come before those of the row.
        """
        past = None if prefix is None else prefix.as_cache()
        keys = position_ids if prefix is None else torch.cat([prefix.positions, position_ids], dim=1)
        return self._tree_pass(input_ids, position_ids, self._attention_mask(allowed, position_ids, keys), past)

    def tree_keys(
        self, input_ids: Tensor, position_ids: Tensor, allowed: Tensor, prefix: PrefixCache | None = None
    ) -> tuple[Tensor, PrefixCache]:
        """Return what `tree_body` does, and the keys and values of all tokens, those of the prefix first."""
        from transformers import DynamicCache

        past = DynamicCache() if prefix is None else prefix.as_cache()
        keys = position_ids if prefix is None else torch.cat([prefix.positions, position_ids], dim=1)
        states = self._tree_pass(input_ids, position_ids, self._attention_mask(allowed, position_ids, keys), past)
        layers: list[Any] = list(past.layers)
        return states, PrefixCache([(layer.keys, layer.values) for layer in layers], keys)

    def _tree_pass(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | dict[str, Tensor],
        past: DynamicCache | None,
        blocks: tuple[Block, ...] | None = None,
    ) -> Tensor:
        # handed on to the attention function; other models know no such argument
        for_attention: dict[str, Any] = {} if blocks is None else {"blocks": blocks}
        out = self.hf.base_model(
            input_ids=input_ids,
            position_ids=position_ids.clamp(max=self._last_position),
            attention_mask=mask,
            past_key_values=past,
            use_cache=past is not None,
            **for_attention,
        )
        return out.last_hidden_state

    def prefill(self, prefixes: Sequence[tuple[int, ...]]) -> PrefixCache:
        """Compute the keys and values of token prefixes, padded on the right, to be attended to by rows."""
        from transformers import DynamicCache

        width = max(len(p) for p in prefixes)
        ids = torch.tensor([[*p, *[0] * (width - len(p))] for p in prefixes], device=self.device)
        # a cache made without the configuration keeps all keys, also in layers with a sliding window
        cache = DynamicCache()
        self.hf.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        layers: list[Any] = list(cache.layers)
        positions = torch.arange(width, device=self.device).expand(len(prefixes), -1)
        # a block that is skipped (see `resume`) has no keys
        return PrefixCache([(layer.keys, layer.values) for layer in layers if layer.is_initialized], positions)

    def logits(self, states: Tensor) -> Tensor:
        """Return the vocabulary logits of normed states [row, width], in float32."""
        return self._capped(self.head(states).float())

    def log_probs(self, states: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each target token after the normed state of its row, in float32.

        The head is multiplied in blocks of the vocabulary, so that logits are summed up while they are in the cache and
        never exist as a whole.
        """
        if not isinstance(self.head, nn.Linear):
            logits = self.logits(states)
            return logits[rows, targets] - logits.logsumexp(dim=-1)[rows]
        weight, bias = self.head.weight, self.head.bias
        parts = []
        for start in range(0, weight.shape[0], HEAD_BLOCK):
            block = slice(start, start + HEAD_BLOCK)
            logits = nn.functional.linear(states, weight[block], None if bias is None else bias[block])
            parts.append(self._capped(logits.float()).logsumexp(dim=-1))
        norm = torch.stack(parts).logsumexp(dim=0)
        # rounded as the head rounds, so that no probability exceeds 1
        picked = (states[rows].float() * weight[targets].float()).sum(dim=-1).to(weight.dtype)
        picked = picked if bias is None else picked + bias[targets]
        return self._capped(picked.float()) - norm[rows]

    def _capped(self, logits: Tensor) -> Tensor:
        cap = getattr(self.hf.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def rope_border(self) -> int | None:
        """The length beyond which LongRoPE changes its factors for the whole batch; None for other models."""
        rope = getattr(self.hf.config.get_text_config(), "rope_parameters", None) or {}
        return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None

    @contextmanager
    def _rope_by_row(self, width: int, lengths: Tensor) -> Iterator[None]:
        """Let LongRoPE choose its factors by the length of each row, not by the longest row of the batch."""
        border = self.rope_border
        if border is None or width <= border or int(lengths.min()) > border:
            yield
            return

        def hook(rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], far: tuple[Tensor, Tensor]) -> Any:
            # asked for no position beyond the border, it gives the short factors; what lies beyond is padding
            states, positions = (*args, *kwargs.values())
            near = rope.forward(states, positions.clamp(max=border - 1))
            long = (lengths > border).to(far[0].device)[:, None, None]
            return tuple(torch.where(long, f, n) for f, n in zip(far, near, strict=True))

        handle = self.hf.base_model.get_submodule("rotary_emb").register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @property
    def knows_window(self) -> bool:
        """Whether the mask is right at every length: an unlisted family with a sliding window passes a short check only."""
        config = self.hf.config.get_text_config()
        return config.model_type in MASK_FORMS or getattr(config, "sliding_window", None) is None

    @property
    def _last_position(self) -> int:
        # a prompt cut to the model's length is scored up to its last token but one, so that only the state of that last
        # token is read at a position beyond the table of a model with learned positions
        learned = self.hf.config.model_type in ("gpt2",)
        return self.max_length - 1 if learned else 2**31 - 1

    def _attention_mask(self, allowed: Tensor, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
        full = additive(allowed, self.dtype)
        window = getattr(self.hf.config.get_text_config(), "sliding_window", None)
        if self.mask_form == "full" or (self.mask_form == "sliding" and window is None):
            return full
        sliding = full
        if window is not None:
            # distance in positions, not in row indices: options restart after the context
            near = queries[:, :, None] - keys[:, None, :] < window
            sliding = additive(allowed & near, self.dtype)
        return sliding if self.mask_form == "sliding" else {"full_attention": full, "sliding_attention": sliding}

    def chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Wrap messages in the tokenizer's chat template, as lm-eval does; a template without a system role drops it."""
        from jinja2 import TemplateError

        if not getattr(self.tokenizer, "chat_template", None):
            raise CoralError(f"Model {self.name!r} has no chat template; leave --apply-chat-template out.")

        def apply(history: list[dict[str, str]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        try:
            return apply(messages)
        except TemplateError:
            return apply([m for m in messages if m["role"] != "system"])


@dataclass(frozen=True)
class PrefixCache:
    """Keys and values of token prefixes at every layer, [prefix, head, token, feature]."""

    layers: list[tuple[Tensor, Tensor]]
    positions: Tensor
    """Position ids of the tokens, [prefix, token]."""

    def for_rows(self, row_prefix: Sequence[int], width: int) -> PrefixCache:
        """Return the cache with one entry per row, cut to `width` tokens."""
        which = torch.tensor(row_prefix)
        layers = [(pick_rows(k, which, width), pick_rows(v, which, width)) for k, v in self.layers]
        return PrefixCache(layers, self.positions[which.to(self.positions.device), :width])

    def as_cache(self) -> DynamicCache:
        """Return what transformers takes; it adds the row's own keys to a copy."""
        from transformers import DynamicCache

        return DynamicCache(self.layers)


def pick_rows(states: Tensor, which: Tensor, width: int) -> Tensor:
    """Return the entries of `which`, without a copy where all rows have the same prefix."""
    states = states[:, :, :width]
    if bool((which == which[0]).all()):
        return states[int(which[0])].expand(len(which), -1, -1, -1)
    return states[which.to(states.device)]


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask [batch, query, key] into the additive [batch, 1, query, key] that attention kernels take."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


# ------------------------------------------------------------------------------------------------------ structure


def wrap(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str) -> Model:
    """Make a Model of a transformers model and tokenizer that are already in memory."""
    hf.eval().requires_grad_(False)
    parts = find_parts(hf)
    config = hf.config.get_text_config()
    fingerprint = {"weights": weights_digest(hf), "tokenizer": tokenizer_digest(tokenizer)}
    return Model(
        name=name,
        hf=hf,
        tokenizer=tokenizer,
        mask_form=MASK_FORMS.get(config.model_type, "full"),
        max_length=max_length(config, tokenizer),
        fingerprint=fingerprint,
        **parts,
    )


def untrained_copy(model: Model, *, seed: int) -> Model:
    """Return a model of the same configuration and tokenizer whose weights are initialised anew, under a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = type(model.hf)(deepcopy(model.hf.config))
    hf.to(model.device, model.dtype)  # type: ignore[arg-type]
    return wrap(hf, model.tokenizer, name=f"{model.name} untrained")


def find_parts(hf: PreTrainedModel) -> dict[str, Any]:
    """Find blocks, final norm, head and attention output projections by structure."""
    base, config = hf.base_model, hf.config.get_text_config()
    lists = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers]
    norm = first_child(base, NORM_NAMES)
    head = hf.get_output_embeddings()
    projections = [p for block in (lists[0] if lists else ()) if (p := output_projection(block)) is not None]
    every = bool(lists) and len(projections) == len(lists[0])
    missing = [
        what
        for what, found in {
            f"one list of {config.num_hidden_layers} blocks": len(lists) == 1,
            f"a final norm named {', '.join(NORM_NAMES)}": norm is not None,
            "an output embedding": head is not None,
        }.items()
        if not found
    ]
    if missing:
        raise CoralError(
            f"The architecture {type(hf).__name__} (model type {config.model_type!r}) is not supported: "
            f"looked for {'; '.join(missing)}."
        )
    return {"blocks": tuple(lists[0]), "norm": norm, "head": head, "projections": tuple(projections) if every else ()}


def first_child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """Return the first direct child that bears one of the names."""
    children = dict(module.named_children())
    return next((children[n] for n in names if n in children), None)


def output_projection(block: nn.Module) -> nn.Module | None:
    """Return the linear layer that mixes the heads of a block's attention."""
    for child in block.children():
        if "Attention" in type(child).__name__:
            return first_child(child, PROJECTION_NAMES)
    return None


def mlp_of(block: nn.Module) -> nn.Module | None:
    """Return the part of a block that works on each position by itself, or None where it has no known name."""
    return next((child for child in block.children() if type(child).__name__.endswith("MLP")), None)


def max_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the longest input, by lm-eval's own rule, so that long prompts are cut where lm-eval cuts them."""
    from lm_eval.models.utils import resolve_max_length

    return int(resolve_max_length(config, tokenizer, default=DEFAULT_MAX_LENGTH))


# ---------------------------------------------------------------------------------------------------- fingerprints


def weights_digest(hf: PreTrainedModel) -> str:
    """Return a digest of the weights that does not depend on the dtype or device they were loaded in.

    Every weight is rounded to bfloat16 first: a checkpoint has the same digest in float32 and in bfloat16.
    """

    def one(item: tuple[str, Tensor]) -> str:
        name, weight = item
        if weight.is_meta:
            return f"{name}:{tuple(weight.shape)}:offloaded"
        raw = weight.detach().to(torch.bfloat16).contiguous().cpu().view(torch.uint8).numpy()
        return f"{name}:{tuple(weight.shape)}:{digest_bytes(raw.data)}"

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return digest(sorted(pool.map(one, hf.named_parameters())))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the tokenizer's vocabulary, rules and special tokens.

    Padding and truncation do not count: they change with every use of a tokenizer, and never reach a score.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = sorted(tokenizer.get_vocab().items())
    if backend is not None:
        rules = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return digest({"rules": rules, "special": special})
