"""Whatever the description of the routes allows is answered as it says, and nothing is an error of ours (schemathesis)."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.servers import GOOD, Running

N_REQUESTS = 30
"""Requests to each route."""
ASKED = (*GOOD, "/v1/ask")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("route", [*ASKED, "/v1/models", "/health", "/ready"])
def test_a_request_that_the_description_allows_is_answered_as_it_says(route: str, server: Running) -> None:
    with server.client() as client:
        described = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    operation = described[route]["POST" if route in ASKED else "GET"]
    statuses: set[int] = set()

    @settings(
        max_examples=N_REQUESTS if route in ASKED else 1, deadline=None, phases=[Phase.generate], derandomize=True,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):  # else hardly any request would get to the questions
            case.body["lens" if route in ("/v1/predict", "/v1/ask") else "model"] = "first"
            if route in GOOD and case.body.get("questions") and len(str(case.body)) % 2:
                case.body["questions"] = GOOD[route]["questions"]  # drawn ones are nearly all empty, or ask nothing
        reply = case.call(base_url=server.address)
        case.validate_response(reply, checks=CHECKS)
        statuses.add(reply.status_code)
        if reply.status_code >= 400:
            assert reply.json()["error"]["message"].endswith((".", "?"))

    ask()
    assert route == "/v1/ask" or 200 in statuses  # the lens is none for open questions, and says so
    assert statuses <= {200, 404, 413, 422}
