"""CONTRIBUTING.md is true: its list of packages is the order of imports, and its recipes do what they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support.models
from support.models import make_tokenizer
from support.pages import Reader, blocks_of
from support.planted import PlantedStore, brier
from test_architecture import ORDER, ROOT

from coral_lens.engine import architectures
from coral_lens.engine.model import wrap
from coral_lens.engine.self_check import examine
from coral_lens.lens.fit import fit_store
from coral_lens.lens.folder import load_lens
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods import registry as methods
from coral_lens.methods.interface import FitContext, QuestionSet

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def follow(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the code of a guide where it says, without its commands."""
    reader = Reader(monkeypatch, {})
    for block in blocks_of(ROOT / "docs" / "guides" / guide):
        if block.language == "python":
            reader.do(block)


def test_packages_are_listed_in_the_order_of_imports() -> None:
    rows = re.findall(r"^\| `?(\w+)`? \|", TEXT, re.MULTILINE)
    assert rows == [
        "package",
        *(name for name in ORDER if (ROOT / "src" / "coral_lens" / name).is_dir() or name == "leaves"),
    ]


def test_the_method_is_fitted_and_predicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    follow("adding-a-method.md", monkeypatch)
    store = PlantedStore(200)
    questions = QuestionSet("train", store, lambda: tuple(store.questions))
    context = FitContext(model=pytest.fail, train=questions, common=FitSettings(base="sum"), folder=tmp_path)
    (predictions,) = methods.METHODS["mixing"].fit(context, None)(questions).values()
    base = base_probs(store.table, "sum")
    assert (store.table.options.top(predictions.probs) == store.table.options.top(base)).all()
    assert brier(store, predictions.probs) < brier(store, base)


def test_the_lens_is_fitted_saved_and_finds_the_layer_that_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    follow("adding-a-lens.md", monkeypatch)
    fitted = fit_store(PlantedStore(300, signal={1: 2.0}), FitSettings(lens="covariance", base="sum"))
    fitted.save(tmp_path / "lens")
    assert load_lens(tmp_path / "lens").layers == (1,)
    assert fitted.gamma > 0


def test_the_family_is_read_rightly_and_takes_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    follow("adding-a-family.md", monkeypatch)
    tiny = support.models.FAMILIES["olmo2"]
    model = wrap(tiny.make(), make_tokenizer(), name="olmo2")
    assert model.family == architectures.FAMILIES["olmo2"]
    assert [finding for finding in examine(model) if not finding.ok] == []
