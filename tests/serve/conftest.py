"""One tiny model with two lenses, and one server of them, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.browsers import CHROMIUM
from support.servers import Running, Shop, open_shop, running

collect_ignore = [] if CHROMIUM else ["test_page_browser.py"]


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return open_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="session")
def server(shop: Shop) -> Iterator[Running]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with running(shop.model, shop.lenses) as server:
        yield server
    torch.set_num_threads(n_threads)
