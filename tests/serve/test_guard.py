"""Nobody gets in without the key, from another host's page, or with more than is allowed; every answer has its headers."""

from __future__ import annotations

import pytest
from support.servers import Running, Shop, running, settings

from coral_lens.serve.guard import HEADERS, host_name
from coral_lens.serve.settings import Address

KEY = "a-key-of-the-tests"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/v1/predict"])
def test_every_answer_has_the_headers_of_safety_and_none_that_opens_it_to_pages(server: Running, path: str) -> None:
    with server.client() as client:
        headers = client.get(path, headers={"Origin": "https://elsewhere.example"}).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert "server" not in headers


def test_a_key_is_needed_for_all_but_health_and_readiness(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    address = Address(port=0, api_key_env="TEST_KEY")
    with running(shop.model, shop.lenses, settings(address=address)) as server, server.client() as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            assert client.get(path).status_code == 401
            for wrong in (KEY, f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", "Bearer", f"Basic {KEY}"):
                reply = client.get(path, headers={"Authorization": wrong})
                assert reply.status_code == 401
                assert reply.json()["error"]["type"] == "authentication_error"
            assert client.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code in (200, 404)
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:1", 200), ("[::1]:80", 200), ("evil.example", 421), ("", 421)]
)
def test_without_a_key_the_server_answers_to_the_names_of_its_machine_only(
    server: Running, host: str, status: int
) -> None:
    """Another site could have its own name lead here, and its page would then read answers as its own."""
    with server.client() as client:
        assert client.get("/v1/models", headers={"Host": host}).status_code == status


def test_a_name_is_the_same_in_capitals(shop: Shop) -> None:
    address = Address(port=0, allow_host=("MyBox.Example",))
    with running(shop.model, shop.lenses, settings(address=address)) as server, server.client() as client:
        for host in ("mybox.example", "MyBox.Example:80"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_pages_of_a_named_site_and_of_no_other_may_ask(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    named = "https://app.example"
    address = Address(port=0, api_key_env="TEST_KEY", allow_origin=(named,))
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with running(shop.model, shop.lenses, settings(address=address)) as server, server.client() as client:
        before = client.request("OPTIONS", "/v1/predict", headers=asking | {"Origin": named})
        assert before.status_code == 204
        assert before.headers["Access-Control-Allow-Origin"] == named
        assert before.headers["Access-Control-Allow-Headers"] == "Authorization, Content-Type"
        key = {"Authorization": f"Bearer {KEY}"}
        reply = client.get("/v1/models", headers=key | {"Origin": named})
        assert (reply.status_code, reply.headers["Access-Control-Allow-Origin"]) == (200, named)
        assert client.get("/v1/models", headers={"Origin": named}).status_code == 401
        for other in ("https://elsewhere.example", "https://app.example.evil", "null"):
            refused = client.request("OPTIONS", "/v1/predict", headers=asking | {"Origin": other})
            assert refused.status_code == 401
            assert "Access-Control-Allow-Origin" not in refused.headers
            assert (
                "Access-Control-Allow-Origin" not in client.get("/v1/models", headers=key | {"Origin": other}).headers
            )


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("LocalHost:80", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[FE80::1]", "fe80::1"),
        ("", ""),
    ],
)
def test_the_port_is_no_part_of_a_name(host: str, name: str) -> None:
    assert host_name(host) == name
