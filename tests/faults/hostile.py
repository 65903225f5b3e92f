"""Hostile values, and records in which something was replaced by one. Made from a seed: a case can be made again."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

TEXTS = (
    "", " ", "\n", "\x00", "\x1b[31mred", "﻿", " ", "﷽" * 50, "\u202eright to left", "e\u0301" * 3, "x" * 5000,
    "[/b]", "[bold]", "[red", "$x", r"$\frac$", r"\input{x}", "%s%n", "{0}", "{{ 7 * 7 }}", "<script>alert(1)</script>",
    '"onload="alert(1)', "</style>", "javascript:alert(1)", "=1+1", "@SUM(A1)", "-1+1", "../../etc/passwd", "/dev/null",
    "a/b", "..", ".", "CON", "nul\x00byte", "|", "||", "a|b", "NaN", "inf", "null", "true", "1e999", "0x10", "١", "½", "-0",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 7, 10**6, 10**18, 2**63, 10**400, -(2**63), 0.5, -0.0, 1e308, 5e-324)
CONSTANTS = (None, True, False, [], {}, [[]], [None], {"": ""}, float("nan"), float("inf"), -float("inf"))


def deep(depth: int) -> Any:
    """Return lists inside lists."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def hostile_value(rng: random.Random) -> Any:
    """Return a value that nobody would write on purpose."""
    return rng.choice([rng.choice(TEXTS), rng.choice(NUMBERS), copy.deepcopy(rng.choice(CONSTANTS)), deep(50)])


def places_in(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value inside a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, one in inner for p in ((*above, key), *places_in(one, (*above, key)))]


def spoiled(record: Any, rng: random.Random) -> Any:
    """Return a record of which one value was replaced, taken away or given another name."""
    record = copy.deepcopy(record)
    path = rng.choice(places_in(record))
    owner = record
    for key in path[:-1]:
        owner = owner[key]
    match rng.randrange(6):
        case 0:
            del owner[path[-1]]
        case 1 if isinstance(owner, dict):
            owner[rng.choice(TEXTS)] = owner.pop(path[-1])
        case 2 if isinstance(owner, list):
            owner.append(copy.deepcopy(owner[path[-1]]))
        case _:
            owner[path[-1]] = hostile_value(rng)
    return record


def spoiled_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes of which some were changed, doubled, or cut off."""
    at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    noise = rng.choice([b"\x00", b"\xff\xfe", b"\r", b'"', b"\xed\xa0\x80", b"," * 40, b"[" * 100_000, b"\n\n"])
    flipped = data[:at] + bytes(byte ^ rng.randint(1, 255) for byte in data[at : at + 1]) + data[at + 1 :]
    return rng.choice([data[:at] + noise + data[at:], data[:at], data[:at] + data[end:], data + data[at:end], flipped])


def as_json(record: Any) -> str:
    """Return JSON as Python writes it: NaN and Infinity are let through."""
    return json.dumps(record, ensure_ascii=bool(len(str(record)) % 2))
