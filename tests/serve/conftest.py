"""One tiny model with two lenses, and one server of them, for all tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from support.browsers import CHROMIUM
from support.servers import Running, Shop, open_shop, running

from coral_lens.data.open_questions import OpenQuestion
from coral_lens.engine.settings import Sampling
from coral_lens.lens.asking import fit_open
from coral_lens.lens.settings import FitSettings
from coral_lens.serve.lenses import open_lenses

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


@pytest.fixture(scope="session")
def asker(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a lens for open questions, and of one for questions with options."""
    folder = tmp_path_factory.mktemp("open")
    questions = [OpenQuestion(f"q{i}", f"Toy {i}?", ("x",)) for i in range(40)]
    sampling = Sampling(candidates=8, temperature=1.0, max_tokens=64, examples=0)
    with warnings.catch_warnings():  # to some of them the model writes nothing
        warnings.simplefilter("ignore", UserWarning)
        fit_open(shop.model, questions, FitSettings(layers=(1,)), sampling=sampling, bar=False).save(folder / "open")
    with running(shop.model, open_lenses([str(folder / "open"), f"first={shop.folder / 'first'}"])) as server:
        yield server
