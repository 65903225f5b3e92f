"""What the requests of all formats are made of, and the texts of parts, messages and any JSON in them. Images are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from coral_lens.serve.complaints import Complaint


class Strict(BaseModel):
    """A part of a request: what is unknown in it is refused. What stands under a field here stands in /openapi.json.

    Lists of it fail fast: what is wrong with the first of a hundred thousand values is all that a client is told.
    """

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Given(BaseModel):
    """A part of a reply."""

    model_config = ConfigDict(use_attribute_docstrings=True)


DEEPEST = 100
"""Lists and objects inside each other."""
NO_IMAGES = "Images cannot be read here; leave them out, or describe them in words."


def text_of_json(value: Any) -> str:
    """Return a text as it is, and any other JSON written out; what could not be given back in a reply is refused."""
    if isinstance(value, str):
        return value
    layer, depth = [value], 0
    while layer := [inner for outer in layer for inner in inside(outer)]:
        depth += 1
        if depth > DEEPEST:
            raise Complaint(422, f"JSON that lies more than {DEEPEST} deep in itself is not read.")
    return json.dumps(value, ensure_ascii=False)


def inside(value: Any) -> Iterable[Any]:
    """Return what lies in a value of JSON."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def is_torn(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, which JSON can name and no model reads."""
    try:
        text.encode()  # a loop over the characters of a long text would keep everybody waiting
    except UnicodeEncodeError:
        return True
    return False


def text_of_parts(content: Any, *, field: str) -> str:
    """Return the text of a content of OpenAI's: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    return "\n".join(part_text(part, field=field) for part in content)


def part_text(part: Any, *, field: str) -> str:
    """Return the text of one part."""
    part = part if isinstance(part, dict) else {}
    kind = part.get("type")
    if kind == "input_image":
        raise Complaint(422, NO_IMAGES, field=field)
    if kind == "input_json" and isinstance(part.get("data"), dict | list):
        return text_of_json(part["data"])
    name = "refusal" if kind == "refusal" else "text"
    if kind in ("input_text", "output_text", "refusal") and isinstance(part.get(name), str):
        return str(part[name])
    raise Complaint(
        422, f"{field} has a part that is no input_text with a text, nor input_json with data.", field=field
    )


def text_of_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a list of messages and calls; several are told apart by who says them."""
    texts = [message_text(message) for message in messages]
    return texts[0][1] if len(texts) == 1 else "\n\n".join(f"{who}: {text}" for who, text in texts)


CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ROLES = ("user", "developer", "system", "assistant")


def message_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return who says a message, and what."""
    kind = str(message.get("type", "message"))
    if kind in CALLS and isinstance(message.get(CALLS[kind]), str):
        return f"call of {message.get('name', 'a tool')}", str(message[CALLS[kind]])
    if kind in OUTPUTS and isinstance(message.get("output"), str | list):
        return "output", text_of_parts(message["output"], field="input")
    if kind == "message" and message.get("role") in ROLES and isinstance(message.get("content"), str | list):
        return str(message["role"]), text_of_parts(message["content"], field="input")
    raise Complaint(
        422,
        f"input has a message that cannot be read: it needs a role ({', '.join(ROLES)}) and content, or the type of a call.",
        field="input",
    )
