"""Lenses on the Hugging Face hub: a few files, nothing executable. The hub is asked only for what is not a folder here."""

from __future__ import annotations

import re
from pathlib import Path

from coral_lens.errors import CoralError

FILES = ("lens.json", "lens.safetensors", "README.md")
OPTIONAL = ("layers.safetensors",)


def local_folder(source: str | Path) -> Path:
    """Return the folder of a lens: the source itself, or a download if it is a hub id, `owner/name` or `owner/name@revision`."""
    folder = Path(source)
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", str(source)):
        return folder
    if any(part in ("", ".", "..") for part in str(source).split("@")[0].split("/")):
        return folder
    from huggingface_hub import snapshot_download

    repo, _, revision = str(source).partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=[*FILES, *OPTIONAL]))
    except hub_errors() as error:
        reason = str(error).strip().split("\n")[0]
        raise CoralError(
            f"{source} is neither a folder here nor a lens that the hub gives out ({reason}); check the name, or make a lens "
            "with `coral fit --out FOLDER`."
        ) from None


def push_to_hub(folder: str | Path, repo: str, *, private: bool = True, message: str = "A CORAL lens") -> str:
    """Upload a saved lens and return its address. Private unless asked otherwise: a lens says what data it learned from."""
    source = Path(folder)
    missing = [name for name in FILES if not (source / name).exists()]
    if missing:
        raise CoralError(f"{source} is not a lens: it has no {missing[0]}; make one with `coral fit --out {source}`.")
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repo, folder_path=source, allow_patterns=[*FILES, *OPTIONAL], commit_message=message
            )
        )
    except hub_errors() as error:
        reason = str(error).strip().split("\n")[0]
        raise CoralError(
            f"{source} could not be uploaded to {repo} ({reason}); log in with `hf auth login` and check the name."
        ) from None


def hub_errors() -> tuple[type[BaseException], ...]:
    """Return all that the hub's client raises for a wrong name, a missing login or a network that is down.

    A connection that fails is an error of the HTTP library, whose name has changed from release to release: it is the
    base of the hub's own errors.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return HfHubHTTPError.__bases__[0], HFValidationError, OSError
