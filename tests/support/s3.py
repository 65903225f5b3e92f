"""A real s3 server on the loopback address of this machine, and what lies under a URL as others see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import fsspec
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "states"


@contextmanager
def s3_server() -> Iterator[str]:
    """Have a server with a bucket while the block runs, and keys for it in the environment; yield the bucket's URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "someone")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            with suppress(FileExistsError):  # servers of one process have the same buckets
                fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
            yield f"s3://{BUCKET}"
    finally:
        server.stop()


def objects_at(url: str) -> dict[str, bytes]:
    """Return all objects under a URL, by the last part of their names."""
    system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    paths: list[str] = []
    with suppress(FileNotFoundError):
        paths = system.ls(root, detail=False)
    return {path.rsplit("/", 1)[-1]: system.cat_file(path) for path in paths}


def put_at(url: str, name: str, data: bytes | None) -> None:
    """Put an object under a URL, whatever is there; None: remove it."""
    system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    if data is None:
        system.rm_file(f"{root}/{name}")
    else:
        system.pipe_file(f"{root}/{name}", data)
