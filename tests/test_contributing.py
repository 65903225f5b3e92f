"""CONTRIBUTING.md is true: its list of packages is the order of imports, and its recipes run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import support.models
import transformers
from support.models import make_tokenizer
from support.planted import PlantedStore, brier
from test_architecture import ORDER, ROOT

from coral_lens.engine import architectures
from coral_lens.engine.model import wrap
from coral_lens.engine.self_check import examine
from coral_lens.lens.artefact import load_lens
from coral_lens.lens.fit import fit_store
from coral_lens.lens.probes import registry as lenses
from coral_lens.lens.probes.ridge import LinearProbe
from coral_lens.lens.rules import base_probs
from coral_lens.lens.settings import FitSettings
from coral_lens.methods import registry as methods
from coral_lens.methods.interface import FitContext, QuestionSet

TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
METHOD, METHOD_ENTRY, LENS, LENS_ENTRY, FAMILY, TINY = re.findall(
    r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE
)


def run(code: str, **names: Any) -> dict[str, Any]:
    """The names that a piece of code defines, beside those it is given."""
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names


def entry(code: str, names: dict[str, Any]) -> tuple[str, Any]:
    """The one entry of a dict, as it is written there."""
    ((key, value),) = eval(f"{{{code}}}", names).items()
    return key, value


def test_packages_are_listed_in_the_order_of_imports() -> None:
    rows = re.findall(r"^\| `?(\w+)`? \|", TEXT, re.MULTILINE)
    assert rows == [
        "package",
        *(name for name in ORDER if (ROOT / "src" / "coral_lens" / name).is_dir() or name == "leaves"),
    ]


def test_the_method_is_fitted_and_predicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name, method = entry(METHOD_ENTRY, run(METHOD))
    assert name not in methods.BASELINES
    monkeypatch.setitem(methods.METHODS, name, method)
    store = PlantedStore(200)
    questions = QuestionSet("train", store, lambda: tuple(store.questions))
    context = FitContext(model=pytest.fail, train=questions, common=FitSettings(base="sum"), folder=tmp_path)
    (predictions,) = methods.METHODS[name].fit(context, None)(questions).values()
    base = base_probs(store.table, "sum")
    assert (store.table.options.top(predictions.probs) == store.table.options.top(base)).all()
    assert brier(store, predictions.probs) < brier(store, base)


def test_the_lens_is_fitted_saved_and_finds_the_layer_that_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # of the names in the recipe, the file of the table imports all but this one
    name, kind = entry(LENS_ENTRY, run(LENS, **{**vars(lenses), "LinearProbe": LinearProbe}))
    assert name not in lenses.LENSES
    monkeypatch.setitem(lenses.LENSES, name, kind)
    fitted = fit_store(PlantedStore(300, signal={1: 2.0}), FitSettings(lens=name, base="sum"))
    fitted.save(tmp_path / "lens")
    assert load_lens(tmp_path / "lens").layers == (1,)
    assert fitted.gamma > 0


def test_the_family_is_read_rightly_and_takes_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    name, family = entry(FAMILY, vars(architectures))
    olmo2 = {kind: getattr(transformers, kind) for kind in ("Olmo2Config", "Olmo2ForCausalLM")}
    tiny_name, tiny = entry(TINY, {**vars(support.models), **olmo2})
    assert name not in architectures.FAMILIES
    assert name == tiny_name
    monkeypatch.setitem(architectures.FAMILIES, name, family)
    model = wrap(tiny.make(), make_tokenizer(), name=name)
    assert model.family == family
    assert [finding for finding in examine(model) if not finding.ok] == []
