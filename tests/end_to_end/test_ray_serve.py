"""The example of Ray Serve answers over HTTP what the lens does, on a Ray of this machine."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import ray
from support.servers import PATIENCE, open_shop

from coral_lens.records import Question

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray.serve itself
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, in a Ray that is patient with a busy machine, and that is gone afterwards."""
    for name in ("READY_CHECK", "HEALTH_CHECK"):  # read when ray.serve is imported
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", str(2 * PATIENCE))
    spec = importlib.util.spec_from_file_location("ray_serve", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield module
    finally:
        module.serve.shutdown()
        ray.shutdown()


def test_the_example_answers_what_the_lens_does(example: Any, tmp_path: Path) -> None:
    shop = open_shop(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    example.serve.start(http_options={"host": "127.0.0.1", "port": port})
    example.serve.run(example.app({"lens": str(tmp_path / "first"), "model": str(tmp_path / "model")}))
    asked = {"question": "2 + 2?", "options": ["3", "4"]}
    reply = httpx2.post(f"http://127.0.0.1:{port}/v1/predict", json={"questions": asked}, timeout=PATIENCE).json()
    (wanted,) = shop.lens("first").predict(shop.model, [Question("1", "1", "2 + 2?", ("3", "4"))])
    assert reply["lens"] == "first"
    assert reply["answers"][0]["probs"] == pytest.approx(wanted.probs, abs=1e-4)
    assert httpx2.get(f"http://127.0.0.1:{port}/", timeout=PATIENCE).status_code == 200
