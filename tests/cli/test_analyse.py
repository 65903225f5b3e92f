"""`coral analyse` from a store on the disk to tables and figures, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.models import make_model
from support.plain_passes import plain_states
from support.questions import toy_questions
from typer.testing import CliRunner

from coral_lens.analysis import heads as heads_module
from coral_lens.analysis.heads import HeadShape, shape_of
from coral_lens.cli import app
from coral_lens.cli.analyse import forward_of
from coral_lens.data.settings import Style
from coral_lens.engine.activations import ActivationStore, JoinedStore, first_questions
from coral_lens.engine.extract import extract
from coral_lens.engine.hooks import Site
from coral_lens.engine.planned import Extraction, all_blocks, head_outputs
from coral_lens.engine.prompts import prepare
from coral_lens.errors import CoralError
from coral_lens.lens.probes.mlp import MlpSettings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "toy"
    model = make_model("llama")
    readings = head_outputs(model, (2, 3))
    extraction = Extraction(layers=(0, 1, 2, 3), packing="tree", token_budget=2000, readings=readings)
    extract(model, toy_questions(40), folder, extraction=extraction)
    return folder


def run(*arguments: object) -> str:
    return CliRunner().invoke(app, ["analyse", *map(str, arguments)], catch_exceptions=False).output


def test_layers_and_dimensions_are_analysed_from_a_store(store: Path, tmp_path: Path) -> None:
    said = run("layers", "--store", store, "--out", tmp_path) + run("dimensions", "--store", store, "--out", tmp_path)
    assert "top 4 side by side" in said
    assert "second half adds" in said
    found = json.loads((tmp_path / "layers.json").read_text())
    assert [row["layer"] for row in found["rows"]] == [0, 1, 2, 3]
    assert found["n_questions"] == 40
    assert found["rows"][3]["share"] == 1.0, "without the model's configuration the vocabulary head counts nothing"
    assert {f"{n}.{kind}" for n in ("layers", "dimensions") for kind in ("csv", "json", "png", "svg")} <= {
        f.name for f in tmp_path.iterdir()
    }


def test_heads_are_analysed_from_a_store_and_planned_before(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = MlpSettings(hidden=(4,), max_epochs=1)
    monkeypatch.setattr(heads_module.HeadTraining.__init__, "__defaults__", (small, "cpu"))
    assert "40 networks in stacks of 8" in run("heads", "--store", store, "--dry-run", "--out", tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert "8 heads: mean R2" in run("heads", "--store", store, "--limit", 30, "--out", tmp_path / "a")
    assert json.loads((tmp_path / "a" / "heads.json").read_text())["n_questions"] == 30


def test_heads_of_a_large_model_are_planned_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coral_lens.analysis.heads.time_step", lambda *_: 1e-3)
    said = run("heads", "--dry-run", "--shape", "30x32x128", "--rows", 40_000)
    assert "4,800 networks in stacks of 32: " in said
    assert "8.0 hours" in said
    assert shape_of("2x3x4", 500) == HeadShape(2, 3, 4, 500)
    for wrong in ("30x32", "axbxc", "0x1x1"):
        with pytest.raises(CoralError, match="must look like 30x32x128"):
            shape_of(wrong, 500)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heads"], "Give --store"),
        (["heads", "--shape", "1x1x1"], "stands in for a store"),
        (["layers", "--store", "STORE", "--base", "words"], "Unknown base 'words'"),
        (["dimensions", "--store", "STORE", "--most", "1"], "most must be at least 2. Got 1 instead"),
        (["layers", "--store", "STORE", "--limit", "10"], "at least 20 labelled questions"),
        (["layers", "--store", "nowhere"], "does not exist"),
        (["probes", "--store", "STORE", "--train", "arc"], "No store has questions of 'arc'; the tasks are questions"),
        (["probes", "--store", "STORE", "--grid-depth", "9"], "grid_depth must lie between 0 and 4. Got 9 instead"),
        (["data", "--store", "STORE", "--lens", "rigde"], "Unknown lens 'rigde'"),
    ],
)
def test_mistakes_get_one_sentence(store: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(CoralError, match=said):
        run(*[str(store) if a == "STORE" else a for a in arguments])


def test_a_store_gives_heads_as_the_projection_gets_them_at_the_last_token_and_names_those_it_lacks(
    store: Path,
) -> None:
    model, found = make_model("llama"), ActivationStore(store)
    prompts = prepare(toy_questions(40), Style(), model).prompts
    heads = found.heads(3)
    assert heads.shape == (len(found.table.logprobs), model.n_heads, model.head_dim)
    for i in (0, 7, 39):
        states = plain_states(model, prompts[i].contexts[1], prompts[i].options[1], Site("heads", 3))
        row = heads[found.table.offsets[i] + 1].reshape(-1)
        np.testing.assert_allclose(row, states[-1].numpy(), rtol=2e-3, atol=2e-3)
    with pytest.raises(CoralError, match=r"the heads of blocks \[2, 3\], not those of block 1.*--heads all"):
        found.heads(1)


def test_blocks_that_have_no_heads_are_refused() -> None:
    model = make_model("llama")
    assert all_blocks(model) == (1, 2, 3)
    with pytest.raises(CoralError, match=r"Block 0 has no heads: .* are 1 to 3"):
        head_outputs(model, (0, 1))
    with pytest.raises(CoralError, match="no attention output projection"):
        head_outputs(make_model("mamba"), (1,))


def test_a_store_of_one_task_has_learning_curves_and_no_matrix(store: Path, tmp_path: Path) -> None:
    said = run("data", "--store", store, "--out", tmp_path, "--draws", 1, "--layers", "1-2")
    assert "questions  accuracy" in said
    assert "One task only, questions: nothing is said of transfer; give another --store" in said
    assert (tmp_path / "data-curves.png").exists()
    assert not (tmp_path / "data.json").exists()


def test_several_stores_are_read_as_one(store: Path) -> None:
    one = ActivationStore(store)
    joined = JoinedStore([first_questions(one, 3), first_questions(one, None)])
    assert joined.blocks == (2, 3)
    n = int(one.table.offsets[3])
    assert (joined.heads(2)[:n] == one.heads(2)[:n]).all()
    assert (joined.heads(2)[n:] == one.heads(2)).all()
    assert forward_of(joined) is None


def test_the_real_model_is_counted_without_its_weights() -> None:
    """SmolLM2: a block has 3,540,096 parameters, the head 49,152 times 576."""
    from coral_lens.engine.loading import load_outline

    outline = load_outline("smollm2")
    assert (outline.n_layers, outline.block_parameters, outline.head_parameters) == (30, 3_540_096, 49_152 * 576)
