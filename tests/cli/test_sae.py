"""`coral sae ...` from questions to autoencoders and what follows from them, with a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.models import make_model
from support.questions import toy_questions
from typer.testing import CliRunner

from coral_lens.cli import app
from coral_lens.errors import CoralError
from coral_lens.records import Question
from coral_lens.report.figures.features import around_zero
from coral_lens.sae.autoencoder import load_autoencoder
from coral_lens.sae.folder import FeatureStudy
from coral_lens.sae.quality import refuse_dead
from coral_lens.storage.files import read_record, write_record

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("coral_lens.engine.planned.choose_budget", lambda *_: 300)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tiny = tmp_path_factory.mktemp("models") / "tiny", make_model("llama")
    tiny.hf.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


def write(path: Path, questions: Sequence[Question]) -> Path:
    lines = [{"id": q.id, "question": q.text, "options": q.options, "answer": q.answer} for q in questions]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def coral(*arguments: str | Path | int | float) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with questions, and autoencoders of the tiny model."""
    folder = tmp_path_factory.mktemp("sae")
    write(folder / "train.jsonl", toy_questions(60))
    said = coral("sae", "train", folder / "train.jsonl", "--model", model, "--out", folder / "sae", "--layer", 2,
                 "--expansion", 2, "--expansion", 3, "--penalty", 0.3, "--batch-size", 64, "--epochs", 2)  # fmt: skip
    return folder, said


def test_train_makes_autoencoders_that_load_and_says_how_good_they_are(trained: tuple[Path, str]) -> None:
    folder, said = trained
    for expansion in (2, 3):
        sae = load_autoencoder(folder / "sae" / f"{expansion}x")
        assert (sae.layer, sae.width, sae.n_features) == (2, 32, 32 * expansion)
        assert sae.norm_limit is not None, "attention sinks are kept from training unless --massive 0 keeps them in"
    assert "recovered" in said
    assert re.search(r"Trained on [\d,]+ states; measured on", said)
    assert "3x" in said
    quality = json.loads((folder / "sae" / "quality.json").read_text())
    assert set(quality) == {"2x", "3x", "digest"}
    assert quality["2x"]["loss"]["n_questions"] > 0


def test_pooled_states_of_a_store_train_autoencoders_without_a_model(
    trained: tuple[Path, str], model: Path, tmp_path: Path
) -> None:
    source = trained[0] / "train.jsonl"
    coral("extract", source, "--model", model, "--layers", "2", "--out", tmp_path / "store")
    train = ["sae", "train", "--store", tmp_path / "store", "--expansion", 2, "--batch-size", 64]
    said = coral(*train, "--out", tmp_path / "sae", "--layer", 2, "--penalty", 0.3, "--massive", 0)
    assert "0 held-out questions" in said
    found = load_autoencoder(tmp_path / "sae" / "2x")
    assert (found.layer, found.width, found.about["training"]["sampling"]["where"]) == (2, 32, "pooled")
    assert found.norm_limit is None
    with pytest.raises(CoralError, match=r"holds layers \[2\], not 1; extract with --layers 1"):
        coral(*train, "--out", tmp_path / "other", "--layer", 1)
    with pytest.raises(CoralError, match="--model, --where and --tokens mean nothing"):
        coral(*train, "--out", tmp_path / "other", "--layer", 2, "--where", "answer")
    for both_or_none in ([source, *train[2:4]], []):
        with pytest.raises(CoralError, match="Give questions, whose token states are used, or --store"):
            coral("sae", "train", *both_or_none, "--out", tmp_path / "other", "--layer", 2)
    for option in ("--expansion", "--batch-size"):
        with pytest.raises(CoralError, match="GiB of memory, and this machine has"):
            coral(*train[:4], "--out", tmp_path / "other", "--layer", 2, option, 1_000_000_000)
    assert not (tmp_path / "other").exists()


def test_autoencoders_whose_features_are_all_dead_are_refused_after_their_report() -> None:
    refuse_dead({"4x": {"dead": 0.99}})
    with pytest.raises(CoralError, match="All features of 4x and 8x are dead: no held-out state activates one"):
        refuse_dead({"4x": {"dead": 1.0}, "8x": {"dead": 1.0}, "16x": {"dead": 0.5}})


@pytest.fixture(scope="module")
def study(trained: tuple[Path, str], model: Path) -> tuple[Path, str]:
    """The features of an autoencoder, selected on the first 40 questions."""
    folder = trained[0]
    said = coral("sae", "select", folder / "train.jsonl", "--limit", 40, "--model", model, "--sae", folder / "sae" / "3x",
                 "--out", folder / "study", "--k", 6)  # fmt: skip
    return folder / "study", said


def test_a_folder_without_an_autoencoder_is_refused_before_a_model_is_opened(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coral_lens.engine.loading.load_model", lambda *_, **__: pytest.fail("a model was opened"))
    source = write(tmp_path / "train.jsonl", toy_questions(40))
    with pytest.raises(CoralError, match="no-sae"):
        coral("sae", "select", source, "--model", model, "--sae", tmp_path / "no-sae", "--out", tmp_path / "study")


def test_select_and_ablate_use_different_questions_and_say_what_changes(
    trained: tuple[Path, str], study: tuple[Path, str], model: Path
) -> None:
    folder, said = study
    assert "by correlation: " in said
    assert "by impact: " in said
    chosen = json.loads((folder / "selection.json").read_text())
    source = trained[0] / "train.jsonl"
    for where in ("all", "answer"):
        told = coral("sae", "ablate", source, "--study", folder, "--features", 4, "--random", 3, "--where", where)
        assert "by correlation, ece: mean" in told
        assert "less random, ECE" in told
        found = json.loads((folder / f"ablation-correlation-{where}.json").read_text())
        assert not set(found["questions"]) & set(chosen["questions"])
        assert len(found["questions"]) == 20
        assert not set(found["chosen"]) & set(found["random"])


def test_steering_is_chosen_on_validation_and_the_page_shows_everything(
    trained: tuple[Path, str], study: tuple[Path, str], tmp_path: Path
) -> None:
    source, folder = trained[0] / "train.jsonl", study[0]
    coral("sae", "ablate", source, "--study", folder, "--by", "impact", "--features", 6, "--random", 3)
    others = [replace(q, id=f"v{q.id}") for q in toy_questions(10, seed=5)]
    validation = write(tmp_path / "validation.jsonl", others)
    test = write(tmp_path / "test.jsonl", [replace(q, id=f"t{q.id}", text=f"<b>{q.text}") for q in others])
    effects = folder / "ablation-impact-all.json"
    found = json.loads(effects.read_text())
    found["features"][str(found["chosen"][0])]["accuracy"]["value"] = -0.1  # toy questions know no beneficial feature
    write_record(effects, {k: v for k, v in found.items() if k != "digest"})
    steer = ["sae", "steer", "--study", folder, "--ablation", "impact-all", "--validation", validation]
    said = coral(*steer, "--test", test, "--criterion", "cwece")
    assert "unsteered" in said
    steered = json.loads((folder / "steering.json").read_text())
    assert steered["rows"][0]["gamma"] == 0
    assert sum(r["chosen"] for r in steered["rows"]) == 1
    assert len(steered["rows"]) >= 2
    assert all("cwece" in r["test"] for r in steered["rows"])
    renamed = write(tmp_path / "renamed.jsonl", [replace(q, id=f"r{q.id}") for q in others])
    with pytest.raises(CoralError, match="All 10 test questions were used before"):
        coral(*steer, "--test", renamed)
    feature = found["chosen"][0]
    page = Path(coral("sae", "report", folder, "--feature", feature).strip()).read_text()
    assert f"Feature {feature}" in page
    assert "Toy question" in page
    assert page.count("<svg") >= 3
    assert (folder / "figures" / "steering.png").exists()
    assert "Left: change of ECE, mean" in page, "as the paper draws it"
    assert list((folder / "figures").glob("ablation-*-paper.svg"))
    with pytest.raises(CoralError, match="Feature 9999 does not exist: the autoencoder has features 0 to 95"):
        coral("sae", "report", folder, "--feature", 9999)


def test_a_study_that_is_not_there_or_not_its_own_is_refused(
    trained: tuple[Path, str], study: tuple[Path, str], tmp_path: Path
) -> None:
    source = trained[0] / "train.jsonl"
    with pytest.raises(CoralError, match="holds no selection of features"):
        coral("sae", "ablate", source, "--study", tmp_path)
    with pytest.raises(CoralError, match="Unknown by 'size'; use one of correlation, impact"):
        coral("sae", "ablate", source, "--study", study[0], "--by", "size")
    renamed = write(tmp_path / "renamed.jsonl", [replace(q, id=f"r{q.id}") for q in toy_questions(60)])
    for same in (source, renamed):
        with pytest.raises(CoralError, match="were used to select features"):
            coral("sae", "ablate", same, "--study", study[0], "--limit", 40)
    for other in (["--num-fewshot", 2], ["--fixed-shots"]):
        with pytest.raises(CoralError, match="selected with num_fewshot None and fixed_shots False"):
            coral("sae", "ablate", source, "--study", study[0], *other)


def test_a_study_keeps_to_its_model_and_its_selection(study: tuple[Path, str], tmp_path: Path) -> None:
    record = read_record(study[0] / "selection.json")

    def rewrite(**changes: object) -> FeatureStudy:
        write_record(tmp_path / "selection.json", record | changes)
        return FeatureStudy(tmp_path)

    known = rewrite()
    ablation = {"of": known.identity, "keys": [1, 2]}
    (tmp_path / "ablation-correlation-all.json").write_text(json.dumps(ablation))
    assert known.ablation("correlation-all") == ablation
    assert known.seen == {*record["keys"], 1, 2}
    with pytest.raises(CoralError, match=r"'correlation-all' in .* is of another selection"):
        rewrite(base="sum").ablation("correlation-all")
    with pytest.raises(CoralError, match=r"selected on .* and 'tiny-gpt2' is another model: weights"):
        known.check(make_model("gpt2"))
    (tmp_path / "selection.json").write_text(json.dumps({k: v for k, v in record.items() if k != "keys"}))
    with pytest.raises(CoralError, match="says nothing of keys, because an earlier version wrote it"):
        _ = FeatureStudy(tmp_path).record


def test_train_refuses_what_cannot_be_trained(trained: tuple[Path, str], model: Path, tmp_path: Path) -> None:
    source = trained[0] / "train.jsonl"
    with pytest.raises(CoralError, match="Unknown where 'stem'; use one of answer, context, all"):
        coral("sae", "train", source, "--model", model, "--out", tmp_path, "--layer", 2, "--where", "stem")
    with pytest.raises(CoralError, match="Layer 7 does not exist"):
        coral("sae", "train", source, "--model", model, "--out", tmp_path, "--layer", 7)


def test_an_axis_is_drawn_out_around_zero_only_where_most_changes_are_tiny() -> None:
    from matplotlib.figure import Figure

    spread = np.linspace(-1.0, 1.0, 101)
    for values, scale in ((spread, "linear"), (np.zeros(5), "linear"), (spread**7, "symlog")):
        axes = Figure().subplots()
        around_zero(axes, values)
        assert axes.get_xscale() == scale
    low, high = axes.get_xlim()
    assert (low, high) == (-1.0, 1.0)
    assert 0.0 in axes.get_xticks()
