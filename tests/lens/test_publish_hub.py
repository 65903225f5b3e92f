"""Lenses on the hub, without a network: what is asked for, what is sent, and what a person is told when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from support.planted import PlantedStore

from coral_lens.errors import CoralError
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.publish import FILES, OPTIONAL, local_folder, push_to_hub
from coral_lens.lens.settings import FitSettings

HTTP_ERROR = HfHubHTTPError.__bases__[0]
FAILURES = [
    HFValidationError("Repo id must use alphanumeric chars"),
    OfflineModeIsEnabled("offline mode is enabled"),
    HTTP_ERROR("[Errno -2] Name or service not known"),  # what a network that is down raises
    OSError("disk full\nand more"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "lens"
    fit_store(PlantedStore(30, signal={1: 2.0}), FitSettings(lens="ridge", layers=(1,))).save(folder)
    return folder


class Hub:
    """Stands for the hub: keeps what was asked of it, and fails if told to."""

    def __init__(self, folder: Path, failure: Exception | None = None) -> None:
        self.folder, self.failure = folder, failure
        self.asked: list[tuple[Any, ...]] = []

    def snapshot_download(self, repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((repo, revision, tuple(allow_patterns)))
        if self.failure:
            raise self.failure
        return str(self.folder)

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        self.asked.append(("create", repo, private, exist_ok))
        if self.failure:
            raise self.failure

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str) -> str:
        self.asked.append(("upload", repo_id, Path(folder_path), tuple(allow_patterns), commit_message))
        return f"https://hub.example/{repo_id}"


def hub(monkeypatch: pytest.MonkeyPatch, folder: Path, failure: Exception | None = None) -> Hub:
    stand_in = Hub(folder, failure)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("coral_lens.data.hub.is_reachable", lambda _: True)
    return stand_in


# --------------------------------------------------------------------------------------------------------- download


def test_without_a_network_the_reason_is_that(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    hub(monkeypatch, saved, OfflineModeIsEnabled("see the documentation"))
    monkeypatch.setattr("coral_lens.data.hub.is_reachable", lambda _: False)
    with pytest.raises(CoralError, match=r"nor a lens that the hub gives out \(no network, or HF_HUB_OFFLINE is set\)"):
        local_folder("me/lens")


def test_a_folder_wins_over_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: Path) -> None:
    asked = hub(monkeypatch, saved).asked
    (tmp_path / "me" / "lens").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("me/lens") == Path("me/lens")
    assert asked == []


@pytest.mark.parametrize(
    ("source", "repo", "revision"),
    [
        ("me/my-lens", "me/my-lens", None),
        ("me/my.lens_2@v1.0", "me/my.lens_2", "v1.0"),
        ("me/lens@refs/pr/3", "me/lens", "refs/pr/3"),
    ],
)
def test_an_id_is_fetched_at_its_revision_and_its_files_only(
    monkeypatch: pytest.MonkeyPatch, saved: Path, source: str, repo: str, revision: str | None
) -> None:
    asked = hub(monkeypatch, saved).asked
    assert local_folder(source) == saved
    assert asked == [(repo, revision, ("lens.json", "lens.safetensors", "README.md", "layers.safetensors"))]


@pytest.mark.parametrize(
    "source", ["lens", "./lens", "../lens", "a/b/c", "/tmp/none", "me/", "me/..", "me/my lens", "~/lens", "me/lens@"]
)
def test_what_cannot_be_an_id_is_a_path_and_never_asked_for(
    monkeypatch: pytest.MonkeyPatch, saved: Path, tmp_path: Path, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = hub(monkeypatch, saved).asked
    assert local_folder(source) == Path(source)
    assert asked == []


def test_a_lens_is_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    hub(monkeypatch, saved)
    assert load_lens("me/my-lens").record() == load_lens(saved).record()


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: type(f).__name__)
def test_a_failed_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch, saved: Path, failure: Exception) -> None:
    hub(monkeypatch, saved, failure)
    with pytest.raises(
        CoralError, match="me/lens is neither a folder here nor a lens that the hub gives out"
    ) as caught:
        local_folder("me/lens")
    assert "\n" not in str(caught.value)
    assert str(failure).split("\n")[0] in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    hub(monkeypatch, saved, TypeError("unexpected keyword"))
    with pytest.raises(TypeError):
        local_folder("me/lens")


def test_a_missing_folder_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=r"has no lens\.json; make one with `coral fit --out"):
        load_lens(tmp_path / "nothing here")


# ----------------------------------------------------------------------------------------------------------- upload


def test_a_lens_is_sent_privately_and_as_its_files_only(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    asked = hub(monkeypatch, saved).asked
    assert push_to_hub(saved, "me/lens", message="hello") == "https://hub.example/me/lens"
    assert asked == [("create", "me/lens", True, True), ("upload", "me/lens", saved, (*FILES, *OPTIONAL), "hello")]


def test_a_lens_is_public_only_if_asked(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    asked = hub(monkeypatch, saved).asked
    push_to_hub(str(saved), "me/lens", private=False)
    assert asked[0] == ("create", "me/lens", False, True)


@pytest.mark.parametrize("missing", FILES)
def test_a_folder_that_is_no_lens_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    asked = hub(monkeypatch, tmp_path).asked
    for name in FILES:
        if name != missing:
            (tmp_path / name).write_text("x")
    with pytest.raises(CoralError, match=f"is not a lens: it has no {missing}"):
        push_to_hub(tmp_path, "me/lens")
    assert asked == []


@pytest.mark.parametrize("failure", [*FAILURES, LocalTokenNotFoundError("no token")], ids=lambda f: type(f).__name__)
def test_a_failed_upload_is_one_sentence(monkeypatch: pytest.MonkeyPatch, saved: Path, failure: Exception) -> None:
    hub(monkeypatch, saved, failure)
    with pytest.raises(CoralError, match=r"could not be uploaded to me/lens .*hf auth login") as caught:
        push_to_hub(saved, "me/lens")
    assert "\n" not in str(caught.value)
