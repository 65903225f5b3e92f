"""A causal language model as the engine sees it: its parts, ways to run its body and its head, and its fingerprint.

Layers are numbered as in the paper and in Hugging Face: 0 is the embedding output, l the residual stream after block l,
*before* the final norm. (Hugging Face's own last hidden state is after the norm: states are therefore read with hooks.)
What differs between families is in `architectures`; nothing here asks for a family by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coral_lens.engine import _flex
from coral_lens.engine._head import VocabularyHead
from coral_lens.engine._kernels import GROUPED, PRECISE, Block, block_attention
from coral_lens.engine._kernels import NAME as BLOCKS
from coral_lens.engine._seals import devices_of, n_weights, remember
from coral_lens.engine.architectures import Family, MaskForm, family_of, find_parts
from coral_lens.engine.fingerprints import config_facts, tokenizer_digest, weights_digest
from coral_lens.engine.in_use import refuse_changed
from coral_lens.engine.precision import CONVERTED, Precision, precision_of, states_dtype
from coral_lens.errors import CoralError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

    Mask = Tensor | BlockMask

DEFAULT_MAX_LENGTH = 2048
"""The longest input of a model that has no table of positions, as in lm-eval."""
LENGTH_NAMES = ("n_positions", "max_position_embeddings", "n_ctx")
"""What configurations call the longest input, in the order in which lm-eval asks."""
UNLIMITED = int(1e30)
"""What a tokenizer says that knows no longest input."""


@dataclass(frozen=True)
class Model:
    """A frozen model with its tokenizer and the parts that the engine reads and edits."""

    name: str
    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    blocks: tuple[nn.Module, ...]
    norm: nn.Module
    """The final norm."""
    head: nn.Module
    """The vocabulary head."""
    projections: tuple[nn.Module, ...]
    """The attention output projection of each block, whose input holds the outputs of the heads side by side; empty where
    blocks have none (recurrent models)."""
    family: Family
    """What is known of the model's family; the defaults where nothing is."""
    max_length: int
    """Tokens of the longest input."""
    fingerprint: dict[str, str] = field(repr=False)
    """Digests of weights and tokenizer: a lens refuses a model whose fingerprint is not the one it was fitted on."""

    def __repr__(self) -> str:
        kind = self.hf.config.get_text_config().model_type
        return (
            f"<Model {self.name}: {kind}, {self.n_layers} layers of width {self.width}, {n_weights(self.hf):,} weights in "
            f"{self.precision} on {self.device}, reads {self.max_length:,} tokens>"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What is recorded of a model: its fingerprint, and the values of its configuration that change a forward pass.

        And that its logits are scaled, if they are: scores of earlier versions, which left that out, are of something else.
        """
        scaled = {} if self.logit_factor == 1.0 else {"logits": "scaled"}
        return {**self.fingerprint, **scaled, "config": config_facts(self.hf.config)}

    def verify(self) -> None:
        """Refuse weights and buffers that changed since the model was loaded: every number is looked at, where a pass looks at
        some, as it is in memory, also where it was converted or quantised."""
        refuse_changed(self, full=True)

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
    def device_kind(self) -> str:
        """What computes, for people."""
        return kind_of_device(self.device)

    @property
    def precision(self) -> Precision:
        """The arithmetic that it computes in."""
        return precision_of(self.hf)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its states: float32 also where products with its weights are computed in another."""
        return states_dtype(self.precision)

    @property
    def precision_record(self) -> str:
        """How its precision is written into records: `torch.float32`, `torch.bfloat16`, `mixed`, `int8`."""
        return self.precision if self.precision in CONVERTED else str(self.dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        config = self.hf.config.get_text_config()
        n_heads = getattr(config, "num_key_value_heads", None) or self.n_heads
        return 2 * self.n_layers * n_heads * self.head_dim * self.dtype.itemsize

    @property
    def window(self) -> int | None:
        """Tokens that a layer with a sliding window sees; None where no layer has one."""
        return getattr(self.hf.config.get_text_config(), "sliding_window", None)

    @property
    def rope_border(self) -> int | None:
        """The length beyond which LongRoPE changes its factors for the whole batch; None for other models."""
        rope = getattr(self.hf.config.get_text_config(), "rope_parameters", None) or {}
        return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None

    @property
    def _last_position(self) -> int:
        # a prompt cut to the model's length is scored up to its last token but one, so only the state of that last token is
        # read at a position beyond the table of a model with learned positions
        return self.max_length - 1 if self.family.learned_positions else 2**31 - 1

    @property
    def mask_form(self) -> MaskForm:
        """The attention mask of its family; a full one is tried where that is not known."""
        return self.family.mask or "full"

    @property
    def knows_window(self) -> bool:
        """Whether the mask is right at every length: an unlisted family with a sliding window passes a short check only."""
        return self.family.mask is not None or self.window is None

    def takes_gaps(self, length: int) -> bool:
        """Whether masked columns in the midst of a row of this length change nothing; a window is cut by columns."""
        window = self.window
        return self.family.takes_gaps and (window is None or length <= window)

    @property
    def attends_in_blocks(self) -> bool:
        """Whether one row of many questions is best computed question by question: on the CPU, where no window is cut."""
        return (
            self.family.in_blocks
            and self.window is None
            # another thread may have it in use, and attend in blocks or in groups just now
            and self.hf.config.get_text_config()._attn_implementation in ("sdpa", BLOCKS, GROUPED)
            and self.dtype in PRECISE
            and devices_of(self.hf) == {"cpu"}
        )

    @property
    def attends_flexibly(self) -> bool:
        """Whether a mask over a tree is best given in squares, of which the empty ones are skipped: on a GPU."""
        return (
            self.family.mask is not None
            and self.family.flex
            and self.hf.config.get_text_config()._attn_implementation in ("sdpa", "eager", _flex.NAME)
            and _flex.works_with(self.hf, self.device)
        )

    @property
    def joins_rows(self) -> bool:
        """Whether a batch is best laid into one row without padding: what questions do not see of each other costs nothing."""
        return self.attends_in_blocks or self.attends_flexibly

    def plain_body(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the final, normed states [batch, token, width] of ordinary causal rows, padded on the right."""
        positions = {}
        if input_ids.shape[1] > self._last_position + 1:
            spread = torch.arange(input_ids.shape[1], device=input_ids.device).clamp(max=self._last_position)
            positions["position_ids"] = spread.expand(len(input_ids), -1)
        with self._rope_by_row(input_ids.shape[1], lengths):
            return self.hf.base_model(input_ids=input_ids, use_cache=False, **positions).last_hidden_state

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

    def tree_body(
        self, input_ids: Tensor, position_ids: Tensor, allowed: Tensor, prefix: PrefixCache | None = None
    ) -> Tensor:
        """Return the final, normed states of rows in which `allowed` [batch, query, key] says who sees whom.

        The keys of a prefix, if there is one, come before those of the row.
        """
        past = None if prefix is None else prefix.as_cache()
        keys = position_ids if prefix is None else torch.cat([prefix.positions, position_ids], dim=1)
        return self._tree_pass(input_ids, position_ids, self._attention_mask(allowed, position_ids, keys), past)

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

    def prefill(self, prefixes: Sequence[tuple[int, ...]], *, last: int | None = None) -> PrefixCache:
        """Compute the keys and values of token prefixes, padded on the right, to be attended to by rows.

        `last`: those of the blocks up to this layer alone.
        """
        from transformers import DynamicCache

        from coral_lens.engine.hooks import leaving_after

        width = max(len(p) for p in prefixes)
        ids = torch.tensor([[*p, *[0] * (width - len(p))] for p in prefixes], device=self.device)
        # a cache made without the configuration keeps all keys, also in layers with a sliding window
        cache = DynamicCache()
        with leaving_after(self, last):
            self.hf.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        layers: list[Any] = list(cache.layers)
        positions = torch.arange(width, device=self.device).expand(len(prefixes), -1)
        # a block that is skipped (see `rerun`) has no keys
        return PrefixCache([(layer.keys, layer.values) for layer in layers if layer.is_initialized], positions)

    def _tree_pass(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Mask | dict[str, Mask],
        past: DynamicCache | None,
        blocks: tuple[Block, ...] | None = None,
    ) -> Tensor:
        # handed on to the attention function; other models know no such argument
        for_attention: dict[str, Any] = {} if blocks is None else {"blocks": blocks}
        flexibly = not isinstance(mask, Tensor) and self.attends_flexibly
        with _flex.flex_attention(self.hf) if flexibly else nullcontext():
            out = self.hf.base_model(
                input_ids=input_ids,
                position_ids=position_ids.clamp(max=self._last_position),
                attention_mask=mask,
                past_key_values=past,
                use_cache=past is not None,
                **for_attention,
            )
        return out.last_hidden_state

    def _attention_mask(self, allowed: Tensor, queries: Tensor, keys: Tensor) -> Mask | dict[str, Mask]:
        def shaped(seen: Tensor) -> Mask:
            return _flex.block_mask(seen) if self.attends_flexibly else additive(seen, self.dtype)

        full = shaped(allowed)
        form, window = self.mask_form, self.window
        if form == "full" or (form == "sliding" and window is None):
            return full
        sliding = full
        if window is not None:
            # distance in positions, not in row indices: options restart after the context
            near = queries[:, :, None] - keys[:, None, :] < window
            sliding = shaped(allowed & near)
        return sliding if form == "sliding" else {"full_attention": full, "sliding_attention": sliding}

    @property
    def vocabulary(self) -> VocabularyHead:
        """The head as it is computed."""
        cap = getattr(self.hf.config.get_text_config(), "final_logit_softcapping", None)
        return VocabularyHead(self.head, cap, self.logit_factor)

    @property
    def logit_factor(self) -> float:
        """What the output of the head is multiplied by to be the logits; 1 for most families."""
        config = self.hf.config.get_text_config()
        times, over = (
            getattr(config, name or "", None) for name in (self.family.logits_times, self.family.logits_over)
        )
        return float(times or 1.0) / float(over or 1.0)

    def logits(self, states: Tensor) -> Tensor:
        """Return the vocabulary logits of normed states [row, width], in float32."""
        return self.vocabulary.logits(states)

    def log_probs(self, states: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each target token after the normed state of its row, in float32."""
        return self.vocabulary.log_probs(states, rows, targets)

    def needs_chat_template(self) -> None:
        """Refuse to go on if the tokenizer has no chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise CoralError(f"Model {self.name!r} has no chat template; leave --apply-chat-template out.")

    def chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Wrap messages in the tokenizer's chat template, as lm-eval does; a template without a system role drops it."""
        from jinja2 import TemplateError

        self.needs_chat_template()

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

    @property
    def n_bytes(self) -> int:
        """How large it is."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def for_rows(self, row_prefix: Sequence[int], width: int) -> PrefixCache:
        """Return the cache with one entry per row, cut to `width` tokens."""
        which = torch.tensor(row_prefix)
        layers = [(pick_rows(k, which, width), pick_rows(v, which, width)) for k, v in self.layers]
        return PrefixCache(layers, self.positions[which.to(self.positions.device), :width])

    def as_cache(self) -> DynamicCache:
        """Return what transformers takes; it adds the row's own keys to a copy."""
        from transformers import DynamicCache

        return DynamicCache(self.layers)


def kind_of_device(device: torch.device) -> str:
    """Return what computes, for people: devices of one kind round alike, as far as can be known."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type


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


def wrap(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    fingerprint: dict[str, str] | None = None,
) -> Model:
    """Make a Model from a transformers model and tokenizer that are already in memory; neither is changed.

    `fingerprint` holds the digests of both, if they are known already.
    """
    parts = find_parts(hf)
    config = hf.config.get_text_config()
    fingerprint = fingerprint or {"weights": weights_digest(hf), "tokenizer": tokenizer_digest(tokenizer)}
    remember(hf)
    return Model(
        name=name,
        hf=hf,
        tokenizer=tokenizer,
        family=family_of(config.model_type),
        max_length=max_length(config, tokenizer),
        fingerprint=fingerprint,
        **vars(parts),
    )


def untrained_copy(model: Model, *, seed: int) -> Model:
    """Return a model of the same configuration and tokenizer whose weights are initialised anew, under a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = type(model.hf)(deepcopy(model.hf.config))
    hf.to(model.device, model.dtype)  # type: ignore[arg-type]
    return wrap(hf.eval().requires_grad_(False), model.tokenizer, name=f"{model.name} untrained")


def max_length(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the longest input by lm-eval's rule: long prompts are cut where lm-eval cuts them (a test compares the two)."""
    lengths = [getattr(config, name, None) for name in LENGTH_NAMES]
    written = getattr(tokenizer, "model_max_length", None)
    lengths.append(None if written == UNLIMITED else written)
    return int(next((length for length in lengths if length is not None), DEFAULT_MAX_LENGTH))
