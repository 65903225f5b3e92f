"""Shared by all tests: shapes are checked at run time, and tiny random models of each family stand in for real ones."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# threads that wait must sleep: on a busy machine spinning makes the real model five times slower
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Ray then listens on the loopback address only; it looks when it is imported
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from collections.abc import Iterator

from support.shapes import begin_test, check_package

check_package("coral_lens")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from faults.kills import Recorder, record_all  # noqa: E402
from faults.workshop import Workshop  # noqa: E402
from hypothesis import settings  # noqa: E402
from support.browsers import CHROMIUM, MISSING  # noqa: E402
from support.commands import quiet  # noqa: E402
from support.models import PLAIN_FAMILIES, TREE_FAMILIES, make_model  # noqa: E402
from support.shared import made_once  # noqa: E402

from coral_lens.engine.loading import load_model  # noqa: E402
from coral_lens.engine.model import Model  # noqa: E402

# the same examples in every run, and no time limit that a busy machine would break
settings.register_profile("coral", deadline=None, derandomize=True)
settings.load_profile("coral")

KILLS = 4
"""Moments of each command, of all its file operations, at which it is killed."""


def pytest_sessionstart() -> None:
    """Wait for no disk: whether it has its bytes after a power cut is nothing that a test could see."""
    os.fsync = lambda number: None


def pytest_collection_finish() -> None:
    """Keep what was imported out of the search for garbage, which otherwise goes through all of torch each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out for want of a browser."""
    if CHROMIUM is None:
        terminalreporter.write_line(MISSING)


def pytest_runtest_setup() -> None:
    """Each test has its own sample of calls whose shapes are checked."""
    begin_test()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models on one thread: their work is too small to share, and waiting for the other threads takes longer."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As many batches or trials are computed side by side."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Every command run once, with what kills leave."""

    def make(home: Path) -> None:
        with quiet():
            record_all(home, Recorder(), large=True, most=KILLS)

    return Workshop.found(made_once(tmp_path_factory, "workshop", make))


@pytest.fixture(scope="session", params=TREE_FAMILIES)
def any_tiny(request: pytest.FixtureRequest) -> Model:
    """Every family that takes the tree, in turn."""
    return make_model(request.param)


@pytest.fixture(scope="session", params=PLAIN_FAMILIES)
def plain_tiny(request: pytest.FixtureRequest) -> Model:
    """Every family that is scored one option a row, in turn."""
    return make_model(request.param)


@pytest.fixture(scope="session")
def tiny() -> Model:
    """A tiny Llama."""
    return make_model("llama")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real embedded model, in the precision that others are compared in."""
    return load_model("smollm2", dtype="float32")
