"""What a client is told where it gets no answer: a status, and one sentence that repeats nothing but names."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""What OpenAI's clients call the errors of a status; all others below 500 are `invalid_request_error`."""


STATUSES = {
    400: "The body is not whole.",
    401: "The key is missing or wrong.",
    404: "There is no such lens.",
    413: "The body, the number of questions or that of options is above its limit.",
    415: "The body is compressed in a way that is not read.",
    422: "A field is missing, unknown or of the wrong kind.",
    429: "Too many questions wait; `Retry-After` says when to come again.",
    500: "The server failed on this request.",
    503: "There was no answer in time.",
}
"""Why there may be no answer, for the description of the routes."""


FAILED = "The server failed on this request; its log says where."


class ErrorDetails(BaseModel):
    """What is wrong."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    message: str
    """In one sentence."""
    type: str
    """As OpenAI's clients call it."""
    param: str | None
    """The field at fault, if it is one."""
    code: None


class ErrorReply(BaseModel):
    """What a client gets in place of an answer."""

    error: ErrorDetails


class Complaint(Exception):  # noqa: N818  (it is for the client)
    """One sentence for a client, with the status of HTTP that belongs to it."""

    def __init__(self, status: int, message: str, *, field: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.retry_after = status, message, field, retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer, in the form that the clients of all routes read."""
        kind = "server_error" if self.status >= 500 else KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": None}}


def validation_sentence(errors: list[Any]) -> tuple[str, str]:
    """Return the field that a body is refused for, and the sentence that says why; pydantic's list has the rest."""
    # a misspelt field is both unknown and missing: name the spelling
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    place = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(place) or "the body"
    if first["type"] == "missing":
        return field, f"{field} is missing."
    if first["type"] == "extra_forbidden":
        return field, f"{field} is unknown here; check its spelling or leave it out."
    if first["type"] == "json_invalid":
        return "the body", f"The body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}."
    message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return field, f"{field} cannot be used: {message}."
