"""Load models by name: a hub id, a folder, a GGUF file or the embedded one.

A GGUF file is made dense once and kept in the cache. What cannot be loaded is refused in one sentence; nothing is ever
filled in for weights that are missing.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from coral_lens.data.assets import EMBEDDED, cache_dir, embedded_model
from coral_lens.data.hub import OFFLINE, hub_session
from coral_lens.engine._machine import file_facts, known_digest, remembered
from coral_lens.engine.architectures import family_of, find_parts
from coral_lens.engine.fingerprints import is_quantised, tokenizer_digest, weights_digest
from coral_lens.engine.model import Model, wrap
from coral_lens.engine.precision import (
    CONVERTED,
    ORDINARY,
    PRECISIONS,
    Precision,
    choose_precision,
    default_device,
    set_precision,
)
from coral_lens.errors import CoralError, nearest, need
from coral_lens.storage.bundles import is_intact, seal_files
from coral_lens.storage.files import digest, disk_errors, fresh_folder, versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


JOINS = " + "
"""Stands between the names of a model and of the adapter that was added to it."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The weights of a LoRA adapter; an older form of them is pickled, and is not read."""


def load_model(
    name: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    device_map: str | None = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model by hub id, local folder, `.gguf` file, or `smollm2` (the embedded one).

    `dtype` is a `Precision` or `auto`, the default. On a GPU `auto` takes the checkpoint's own; on the CPU it takes `mixed`
    if that is much faster than float32 on this machine, otherwise float32. A LoRA `adapter`, a folder or hub id, is added to
    the weights; the model is then called `name + adapter`, and can be loaded by that name. Code from the hub is run only if
    `trust_remote_code` is given.
    """
    from transformers import AutoTokenizer

    name, wanted = str(name), dtype or "auto"
    if adapter is None and JOINS in name and not Path(name).exists():
        name, _, adapter = name.partition(JOINS)
    if "meta" in (device, device_map):
        raise CoralError("The device 'meta' holds shapes and no numbers; use cpu, cuda, or --device-map auto.")
    device = device or default_device()
    on_cpu = device == "cpu" and device_map is None
    refuse_precision(wanted, on_cpu=on_cpu)
    source = resolve(name)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with quiet_loading(), loading_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
        # what is converted here is read as it is in the checkpoint: it is rounded once
        own = wanted in ("auto", *CONVERTED)
        settings = {"dtype": "auto" if own else getattr(torch, wanted), "device_map": device_map, **common}
        hf = load_weights(name, source, settings)
        ensure_bos(tokenizer, hf.config)
        if device_map is None and hf.device.type != torch.device(device).type:
            hf.to(torch.device(device))  # type: ignore[arg-type]
        keep_soft_capping(hf)
    if adapter is not None:
        hf, name = with_adapter(hf, str(adapter)), f"{name}{JOINS}{adapter}"
    known = fingerprint_of(hf, tokenizer, model_files(source, revision, adapter))
    if is_quantised(hf):
        run_once(hf)
    if own and on_cpu and not (wanted == "auto" and is_quantised(hf)):
        texts = [tokenizer.encode(text) for text in ORDINARY]
        set_precision(hf, choose_precision(hf) if wanted == "auto" else cast("Precision", wanted), texts)
    return wrap(hf.eval().requires_grad_(False), tokenizer, name=name, fingerprint=known)


def keep_soft_capping(hf: PreTrainedModel) -> None:
    """Let a model that bends its attention scores (Gemma 2) attend in the one way that does so.

    transformers before 5.21 takes another, which leaves the bending out without a word.
    """
    config = hf.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        hf.set_attn_implementation("eager")


@torch.inference_mode()
def run_once(hf: PreTrainedModel) -> None:
    """Let a library that lays out quantised weights anew in their first pass do so before they are looked at."""
    hf.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=hf.device), use_cache=False)


def refuse_precision(name: str, *, on_cpu: bool) -> None:
    """Refuse a precision that does not exist, or not there; warn of one that is slow."""
    if name not in (*PRECISIONS, "auto"):
        raise CoralError(f"Unknown dtype {name!r}; use one of {', '.join(PRECISIONS)}, auto.")
    if name in CONVERTED and not on_cpu:
        raise CoralError(f"{name} is for the CPU; on other devices use bfloat16, float16 or auto.")
    if name == "float16" and on_cpu:
        warnings.warn(
            "float16 is several times slower than float32 on a CPU; bfloat16, mixed or auto are faster and safer.",
            stacklevel=3,
        )


def with_adapter(hf: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """Return the model with the low-rank changes of a LoRA adapter added to its weights; only safetensors are read."""
    need("adapter", by="A LoRA adapter")
    from huggingface_hub import snapshot_download
    from peft import PeftModel

    if is_quantised(hf):
        raise CoralError("An adapter cannot be added to quantised weights here; load the model without quantisation.")
    with quiet_loading(), loading_errors(adapter, kind="adapter"):
        folder = adapter
        if not Path(adapter).is_dir():
            folder = snapshot_download(adapter, allow_patterns=["adapter_config.json", ADAPTER_WEIGHTS])
        if not (Path(folder) / ADAPTER_WEIGHTS).is_file():
            raise FileNotFoundError(f"it has no {ADAPTER_WEIGHTS}")
        peft: Any = PeftModel.from_pretrained(hf, folder)
        return peft.merge_and_unload()


def model_files(source: Path | str, revision: str | None, adapter: str | Path | None) -> list[Path] | None:
    """Return the files that a model and its tokenizer were read from, or None where they are not known."""
    from transformers.utils.hub import cached_file

    folder = source
    if not isinstance(source, Path):
        config = cached_file(source, "config.json", revision=revision, local_files_only=True)
        folder = Path(config).parent if config else source
    folders = [Path(part) for part in (folder, adapter) if part is not None]
    if not all(part.is_dir() for part in folders):
        return None
    return sorted(path for part in folders for path in part.iterdir() if path.is_file())


WEIGHTS = (".safetensors", ".bin", ".gguf")
"""Endings of files with weights."""
AROUND_WEIGHTS = (".json", ".model", ".jinja")
"""Endings of files that say what is made of them."""


def files_digest(name: str, adapter: str | None = None) -> str:
    """Return a digest of the files that a model is read from, and loads nothing; one that is not here yet has another.

    Only what was written since is read again. It is no fingerprint: the same weights in other files have another digest.
    """
    name, _, joined = (name, "", "") if Path(name).exists() else name.partition(JOINS)
    path = embedded_model() if name == EMBEDDED else Path(name).expanduser()
    files = [path] if path is not None and path.is_file() else None
    if files is None:
        with suppress(CoralError, OSError):
            files = model_files(path if path is not None and path.is_dir() else name, None, None)
    for part in (joined, adapter):
        if part and Path(part).is_dir():
            files = [*(files or ()), *Path(part).iterdir()]
    kept = [path for path in files or () if path.suffix in (*WEIGHTS, *AROUND_WEIGHTS)]
    return digest([[path.name, known_digest(path)] for path in sorted(kept)])


def fingerprint_of(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: list[Path] | None) -> dict[str, str]:
    """Return the digests of weights and tokenizer; those of files that were not written since are remembered."""

    def find_out() -> dict[str, str]:
        return {"weights": weights_digest(hf), "tokenizer": tokenizer_digest(tokenizer)}

    if files is None:
        return find_out()
    return remembered("fingerprints", [file_facts(files), str(hf.dtype), versions()], find_out)


@dataclass(frozen=True, slots=True)
class Outline:
    """What can be known of a model before its weights are read."""

    n_layers: int
    width: int
    tokenizer: str
    """The tokenizer's fingerprint, as in `Model.fingerprint`."""
    block_parameters: int
    """Of one block."""
    head_parameters: int
    """Of the vocabulary head."""


def load_outline(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Outline:
    """Read a model's configuration and tokenizer, and none of its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    source = resolve(name)
    with quiet_loading(), loading_errors(name):
        config = AutoConfig.from_pretrained(source, **common)
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
        ensure_bos(tokenizer, config)
        with torch.device("meta"):
            parts = find_parts(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    text = config.get_text_config()
    block, head = (sum(p.numel() for p in m.parameters()) for m in (parts.blocks[0], parts.head))
    return Outline(int(text.num_hidden_layers), int(text.hidden_size), tokenizer_digest(tokenizer), block, head)


def resolve(name: str) -> Path | str:
    """Return the folder to load `name` from, converting a GGUF file on first use, or the hub id itself."""
    if name == EMBEDDED:
        gguf = embedded_model()
        if gguf is None:
            raise CoralError("The embedded model is not installed; run `coral assets` to fetch it.")
        return converted(gguf)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise CoralError(f"Model file {name} does not exist; check the path.")
        return converted(path)
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise CoralError(f"There is no model at {name}: no such file or folder; check the path.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CoralError(f"Folder {name!r} holds no config.json; give the folder of a saved model.")
    if path.is_file():
        raise CoralError(
            f"{name} is a file, and no model: give a hub id, a local folder, a .gguf file or {EMBEDDED!r}."
        )
    return path if path.is_dir() else name


def converted(gguf: Path) -> Path:
    """Return a folder with the dense weights of a GGUF file, made once and kept in the cache under its content's digest."""
    folder = cache_dir() / "models" / known_digest(gguf)[:32]
    if folder.is_dir() and is_known_intact(folder):
        return folder
    if folder.exists():  # in the cache, under a digest: it is ours, and damaged
        with disk_errors(folder):
            shutil.rmtree(folder)
    need("gguf", by="A GGUF file, such as the embedded model,")
    from transformers import AutoTokenizer, GgufConfig

    with quiet_loading(), loading_errors(str(gguf)), fresh_folder(folder) as temporary:
        common = {"gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **common)
        dense = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        hf = load_weights(str(gguf), gguf.parent, {**dense, **common})
        # transformers refuses to save a model that still bears the mark of its quantisation
        hf.hf_quantizer = None  # type: ignore[assignment]
        if hasattr(hf.config, "quantization_config"):
            del hf.config.quantization_config
        hf.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        seal_files(temporary)
    return folder


def is_known_intact(folder: Path) -> bool:
    """Return whether every file of a folder is as it was written; those that were not written since are not read again."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return bool(remembered("intact", file_facts(files), lambda: {"intact": is_intact(folder)})["intact"])


def load_weights(name: str, source: Path | str, settings: dict[str, Any]) -> PreTrainedModel:
    """Load a causal model; one that lacks some of its weights is refused: transformers would fill in random numbers."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **settings)
    hf, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise CoralError(
            f"Model {name!r} lacks {len(missing)} of its weights, first {missing[0]!r}; "
            "its files are incomplete, get them again."
        )
    return hf


@contextmanager
def loading_errors(name: str, kind: str = "model") -> Iterator[None]:
    """Turn what transformers raises for a wrong name, a damaged file or remote code into one sentence.

    The hub is asked only where it can be reached: its client would try again and again for a minute.
    """
    local = Path(name).expanduser().exists() or name == EMBEDDED
    with nullcontext(True) if local else hub_session() as asks:
        try:
            yield
        except CoralError:
            raise
        except Exception as error:  # tokenizers raises Exception itself, safetensors and struct errors of their own
            if not asks:
                raise CoralError(unreachable(name, kind)) from error
            raise CoralError(complaint(name, error, kind)) from error


def unreachable(name: str, kind: str) -> str:
    """Return what is said of a name that is not here, where the hub cannot be asked."""
    return (
        f"Cannot load {kind} {name!r}: it is neither a folder here nor in the hub's cache, and the hub cannot be asked "
        f"({OFFLINE}).{instead_of(name, kind)}"
    )


def instead_of(name: str, kind: str) -> str:
    """Return what can be given instead of a name."""
    if kind != "model":
        return " Give a hub id or a local folder with its files as safetensors."
    hint = nearest(name, [EMBEDDED]) if name != EMBEDDED else ""
    return f"{hint} Give a hub id, a local folder, a .gguf file or {EMBEDDED!r}."


def complaint(name: str, error: Exception, kind: str) -> str:
    """Return the first line of an error, and what can be given instead."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")
    return f"Cannot load {kind} {name!r}: {first}.{instead_of(name, kind)}"


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers' progress bars and advice while a model is loaded, and only then."""
    from transformers.utils import logging

    gguf: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bars, level, bar = logging.is_progress_bar_enabled(), logging.get_verbosity(), gguf.tqdm
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # the bar of a conversion listens to none of these
    gguf.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = bar
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def ensure_bos(tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Make the tokenizer add BOS if the model is lost without it; one read from a GGUF file may not."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    bos = tokenizer.bos_token
    if not family_of(config.model_type).needs_bos or backend is None or not isinstance(bos, str):
        return
    if tokenizer.encode("a")[:1] != [tokenizer.bos_token_id]:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
