"""README, tutorial, guides and notebooks do what they say: every block runs in its order, without a network, on a tiny model.

A new block is run by default. One that cannot run here stands in CANNOT_RUN with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lm_eval.__main__
import lm_eval.evaluator
import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager
from support.commands import DRAWN
from support.lm_eval_runs import definitions_of
from support.models import make_model
from support.pages import ROOT, Block, Reader, blocks_of
from support.questions import toy_questions

from coral_lens.data import task_data
from coral_lens.engine import loading
from coral_lens.records import Question
from coral_lens.report.figures.style import Picture

pytestmark = pytest.mark.usefixtures("one_thread")

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
CANNOT_RUN = {
    "make demo": "installs everything, then runs the real model for minutes; tests/study/test_demo.py runs a short demo",
    "pip install coral-lens": "installs packages",
    "pip install coral-lens[all]": "installs packages",
    "coral assets": "downloads the embedded model and data",
    "coral push my-lens me/my-lens": "uploads to the hub",
    "coral serve": "serves until it is stopped; tests/serve/test_server.py runs it",
    "coral predict --questions new.csv --out first.jsonl": "needs the real model; tests/serve/test_predict.py has it answer",
    "coral serve --lens my-lens": "serves until it is stopped; tests/serve/test_server.py runs it",
    "coral serve --lens my-lens --host 0.0.0.0 --api-key-env CORAL_KEY": "serves until it is stopped",
    'curl http://127.0.0.1:8000/v1/predict --json {"questions": {"question": "2 + 2?", "options": ["3", "4"]}}': "asks a "
    "server; tests/serve/test_predict.py does so",
    "coral run probe1-small --data DIR --work states": "takes 23 minutes, and needs data that is not embedded",
    "coral run transfer-small --data DIR --work states": "takes 22 minutes, and needs data that is not embedded",
    "coral run probe2 --check": "needs data that is not embedded",
    "coral reproduce --model smollm2 --data DIR --check": "needs data that is not embedded; tests/study/test_reproduce.py plans",
    "coral reproduce --model smollm2 --data DIR": "takes hours; tests/study/test_reproduce.py runs all parts of a tiny scale",
    "coral extract train.jsonl --out states/mine --part 1/2": "needs more than one shard; tests/engine/test_parts.py has them",
    "coral extract train.jsonl --out states/mine --part 2/2": "needs more than one shard; tests/engine/test_parts.py has them",
    "coral extract train.jsonl --out s3://bucket/states --part 1/2": "needs a server; tests/engine/test_parts_remote.py has one",
    "coral extract train.jsonl --out s3://bucket/states --part 2/2": "needs a server; tests/engine/test_parts_remote.py has one",
    "coral extract --out s3://bucket/states --finish": "needs a server; tests/engine/test_parts_remote.py has one",
    "coral analyse layers --store s3://bucket/states --out analysis": "needs a server; tests/cli/test_extract.py reads one",
    "coral extract train.jsonl --out states/ray --ray local --workers 2": "starts Ray; tests/scale/test_extract.py has a cluster",
    "python -m pytest tests/engine -k olmo2": "runs tests, whose families come from the file itself",
}
"""Each command with the reason; each stands in a page."""
QUESTIONS = 100
"""So many of each split of a benchmark are read here."""


# ------------------------------------------------------------------------------------------------------------ the world


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads long passages, saved as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = make_model("llama", max_length=4096)
    model.hf.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def reader(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """A reader in an empty folder with questions of their own, whose benchmarks are short and whose `smollm2` is tiny."""
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    resolve = loading.resolve
    monkeypatch.setattr(loading, "resolve", lambda name: tiny_folder if name == loading.EMBEDDED else resolve(name))
    for name in ("_read_arrow", "_read_file"):
        monkeypatch.setattr(task_data, name, shortened(getattr(task_data, name)))
    for name, drawn in DRAWN.items():  # the tests of reports draw
        monkeypatch.setattr(Picture, name, drawn)
    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    for module in (lm_eval.tasks, lm_eval.evaluator):
        monkeypatch.setattr(module, "TaskManager", arc_only)
    # its log handlers would outlive the captured streams of a test
    monkeypatch.setattr(lm_eval.__main__, "setup_logging", lambda: None)
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_own_questions(folder)
    return Reader(monkeypatch, CANNOT_RUN)


def shortened(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def read_few(place: Path) -> Any:
        dataset = read(place)
        return dataset.select(range(min(QUESTIONS, len(dataset))))

    return read_few


def no_hub(*_: Any, **__: Any) -> None:
    raise ConnectionError("no network here")


def arc_only(*_: Any, include_path: str | None = None, **__: Any) -> TaskManager:
    """lm-eval's own, with the definitions of one folder: it would read 14,000 files otherwise."""
    return TaskManager(include_defaults=False, include_path=include_path or str(definitions_of("arc")))


def write_own_questions(folder: Path) -> None:
    """Write the files that pages call the reader's own: train, test, held-out and few with answers, new without."""
    for seed, (name, n) in enumerate({"train": 40, "test": 20, "held-out": 60, "new": 6, "few": 30}.items()):
        questions = toy_questions(n, seed=seed, labelled=name != "new")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(q)) + "\n" for q in questions), "utf-8")


def row(question: Question) -> dict[str, Any]:
    fields = {"question": f"{question.text} {question.id}", "options": list(question.options)}
    return fields | ({} if question.answer < 0 else {"answer": question.answer})


# ------------------------------------------------------------------------------------------------------------ the pages

every_page = pytest.mark.parametrize("page", [*DOCUMENTS, *NOTEBOOKS], ids=lambda p: p.relative_to(ROOT).as_posix())


@every_page
@pytest.mark.filterwarnings("default:With a lens:UserWarning", "default:.*left out:UserWarning")
def test_a_page_does_what_it_says(page: Path, reader: Reader) -> None:
    reader.follow(page)


def test_what_cannot_run_stands_in_a_page() -> None:
    said = {
        " ".join(words) for page in DOCUMENTS for b in blocks_of(page) if b.language == "sh" for words in b.commands
    }
    assert sorted(set(CANNOT_RUN) - said) == []


def test_a_block_that_nobody_runs_is_refused(reader: Reader) -> None:
    for block in (Block("x", "", "coral fit"), Block("x", "sh", "curl example.org"), Block("x", "sh", "coral fti")):
        with pytest.raises(AssertionError):
            reader.do(block)


# -------------------------------------------------------------------------------------------------------- the notebooks


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["inside_a_model", "own_questions", "study"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_has_the_format_4_and_stores_no_outputs(path: Path) -> None:
    book = json.loads(path.read_text("utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) >= (4, 5)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        assert re.fullmatch(r"[a-z0-9-]{1,64}", cell["id"])
        assert isinstance(cell["source"], list)
        assert isinstance(cell["metadata"], dict)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            assert not re.search(r"^[!%]", "".join(cell["source"]), re.MULTILINE), "plain Python runs everywhere"
        else:
            assert cell["cell_type"] == "markdown"
