"""Bodies that a client has compressed, read no further than a body may be long: a small one may stand for gigabytes.

gzip is read everywhere, zstd where Python has it (3.14) or the package `backports.zstd` is installed. TypeSafe's client
compresses larger bodies by itself where it can.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from coral_lens.serve.complaints import Complaint

GZIP = 31
"""What zlib calls the format of gzip."""
ZSTD_MODULES = ("compression.zstd", "backports.zstd")


def decoded(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body as it was before it was compressed; refuse one that is broken, longer than `most`, or of another kind."""
    if encoding in ("", "identity"):
        return body
    make = DECODERS.get(encoding, lambda: None)()
    if make is None:
        raise Complaint(
            415,
            "A body compressed in this way is not read; send it as it is or by gzip (TypeSafe's client: compression=False).",
        )
    try:
        found = make.decompress(body, most + 1)
    except Exception:  # of zlib or of zstd, whose errors have no common name
        raise Complaint(400, f"The body is not whole: it cannot be read as {encoding}.") from None
    if len(found) > most:
        raise too_long(most)
    if not make.eof:
        raise Complaint(400, f"The body is not whole: its {encoding} has no end.")
    if make.unused_data:
        raise Complaint(400, f"The body is not whole: something follows the end of its {encoding}.")
    return bytes(found)


def too_long(most: int) -> Complaint:
    """Return the refusal of a body that is too long."""
    return Complaint(413, f"The body has more than {most} bytes; ask fewer questions at a time.")


def zstd_decompressor() -> Any | None:
    """Return what reads zstd, where something does."""
    for name in ZSTD_MODULES:
        try:
            return import_module(name).ZstdDecompressor()
        except ImportError:
            continue
    return None


DECODERS: dict[str, Callable[[], Any]] = {"gzip": lambda: zlib.decompressobj(GZIP), "zstd": zstd_decompressor}
"""By the word in `Content-Encoding`, what makes a decompressor; None where there is none."""
