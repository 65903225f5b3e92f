"""A worker that would compute something else than the store holds is refused, and says what differs."""

from __future__ import annotations

from typing import Any

import pytest

from coral_lens.errors import CoralError
from coral_lens.scale.worker import refuse_other

HERE: dict[str, Any] = {
    "model": {"weights": "aa", "tokenizer": "bb", "dtype": "float32", "config": {"hidden_size": 8}},
    "device": "cpu: AVX2",
    "versions": {"coral-lens": "0.1.0", "torch": "2.13.0"},
}


def refused(manifest: dict[str, Any], *, mixed: bool = False, **installed: str) -> None:
    refuse_other(HERE, HERE | manifest, HERE["versions"] | installed, mixed=mixed)


def test_a_worker_that_is_like_the_store_is_taken() -> None:
    refused({})
    refuse_other(HERE, {"model": HERE["model"]}, {}, mixed=False)  # a store of an earlier version has no device


def test_other_software_is_refused() -> None:
    with pytest.raises(CoralError, match=r"A worker has torch 2\.13\.0, and this process has 2\.12\.0"):
        refused({}, torch="2.12.0")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"weights": "ab"}, "weights ab against aa"),
        ({"tokenizer": "cc"}, "tokenizer cc against bb"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 against float32"),
        ({"config": {"hidden_size": 9}}, "hidden_size 9 against 8"),
    ],
)
def test_another_model_is_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(CoralError, match=said):
        refused({"model": HERE["model"] | model})


def test_another_kind_of_device_is_refused_unless_that_is_wanted() -> None:
    with pytest.raises(CoralError, match=r"\(cpu: AVX2, not cuda: NVIDIA H100\).*--mixed"):
        refused({"device": "cuda: NVIDIA H100"})
    refused({"device": "cuda: NVIDIA H100"}, mixed=True)
