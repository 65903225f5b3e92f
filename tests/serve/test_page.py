"""The pages are small, hold nothing of other sites, and are given to everybody, unlike answers."""

from __future__ import annotations

import re

import pytest
from support.servers import Running, Shop, running

from coral_lens.serve.page import page_files
from coral_lens.serve.settings import Address, ServeSettings

LARGEST = 100_000
"""Bytes of a page with all that it loads."""


def test_a_page_is_small_and_holds_neither_scripts_nor_styles_nor_addresses_of_others(server: Running) -> None:
    with server.client() as client:
        replies = {path: client.get(path) for path in page_files()}
    assert sum(len(reply.content) for reply in replies.values()) < LARGEST
    for path, reply in replies.items():
        assert reply.status_code == 200, path
        policy = reply.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        text = reply.text.replace("http://www.w3.org/", "")
        assert not re.search(r"https?://|<script>|<style| style=| on[a-z]+=", text), path


def test_the_pages_are_given_without_a_key_and_answers_are_not(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGE_KEY", "secret")
    settings = ServeSettings(address=Address(port=0, api_key_env="PAGE_KEY"))
    with running(shop.model, shop.lenses, settings) as server, server.client() as client:
        assert [client.get(path).status_code for path in ("/", "/docs", "/page/page.js")] == [200, 200, 200]
        assert [client.get(path).status_code for path in ("/v1/models", "/openapi.json")] == [401, 401]
