"""The whole paper on a tiny model: every part, a page in the paper's order, a part that fails, a run that is killed."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import ROOT
from support.models import make_llama, make_model, make_tokenizer
from support.planted import one_network
from support.questions import toy_questions
from typer.testing import CliRunner

from coral_lens.analysis.settings import DimensionSettings, LayerPlan, ProbePlan
from coral_lens.cli import app
from coral_lens.engine import reckoning
from coral_lens.engine.model import Model
from coral_lens.engine.reckoning import shared_beginning
from coral_lens.errors import CoralError
from coral_lens.lens.settings import NetworkSearch
from coral_lens.methods.registry import read_method
from coral_lens.report.figures.style import Picture
from coral_lens.report.pages.reproduction import PaperSection, Reproduction
from coral_lens.sae.settings import AblationPlan, SteerPlan, TrainingSettings
from coral_lens.storage.files import read_record, write_record
from coral_lens.study import plan as plan_module
from coral_lens.study.config import Source, Study, load_study
from coral_lens.study.folders import Folders
from coral_lens.study.reproduce import run as run_module
from coral_lens.study.reproduce.page import markdown_of
from coral_lens.study.reproduce.parts import PARTS, Part, drawn_apart
from coral_lens.study.reproduce.plan import plan_parts
from coral_lens.study.reproduce.run import Undertaking, parts_of, reproduce
from coral_lens.study.reproduce.scale import SCALES, SaeScale, Scale, limited, smaller_study
from coral_lens.study.reproduce.settings import PARTS as NAMES

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

MLP = {
    "kind": "mlp",
    "name": "coral",
    "hidden": (8,),
    "epochs": 2,
    "weight_decay": (1.0, 45.0),
    "output_penalty": (0.0,),
}
NETWORK = one_network(hidden=(8,), epochs=2)


def questions_file(folder: Path, name: str, n: int, seed: int) -> Path:
    """Toy questions with ids of their own."""
    path = folder / f"{name}.jsonl"
    lines = [
        json.dumps(
            {
                "id": f"{name}-{q.id}",
                "group": f"{name}-{q.group}",
                "question": f"{name}: {q.text}",
                "options": q.options,
                "answer": q.answer,
            }
        )
        for q in toy_questions(n, seed=seed)
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Figures are drawn elsewhere, and nobody times batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Picture, "png", lambda self: b"\x89PNG")
        patch.setattr(Picture, "svg", lambda self: "<svg></svg>")
        patch.setattr("coral_lens.engine.planned.choose_budget", lambda *_: 600)
        for name in ("DECAYS", "PENALTIES", "DROPOUTS"):  # one network is as good as thirty
            patch.setattr(f"coral_lens.analysis.probes.{name}", (0.0,))
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("questions")
    sizes = {"train": 140, "home": 60, "away": 40, "asked": 90, "csqa": 30, "race": 30, "mmlu": 80, "arc": 30}
    return {name: questions_file(folder, name, n, seed) for seed, (name, n) in enumerate(sizes.items())}


def tiny_scale(files: dict[str, Path]) -> Scale:
    """Every part, as small as it can be."""

    def source(name: str) -> Source:
        return Source(task=str(files[name]), shots=0)

    def test(name: str, called: str) -> dict[str, Any]:
        return {"task": str(files[name]), "name": called, "shots": 0}

    def study(part: str, model: str) -> Study:
        mixture: dict[str, Any] = {"name": "mix", "sources": (source("train").model_dump(),)}
        tests: tuple[dict[str, Any], ...] = (test("csqa", "CommonsenseQA"), test("race", "RACE"))
        methods: tuple[dict[str, Any], ...] = (MLP,)
        if part == "probe2":
            mixture = {"name": "mmlu", "sources": (source("mmlu").model_dump(),), "held_out": 0.3}
            tests = ({"rest": "mmlu", "name": "MMLU"},)
        elif part == "transfer":
            tests = (test("arc", "ARC-Challenge"),)
        elif part == "corrsteer":
            tests = tests[:1]
            methods = ({"kind": "corrsteer", "sae": "none", "features": (1,), "alphas": (0.0, 1.0), "questions": 5},)
        content = {"name": part, "models": (model,), "mixture": (mixture,), "test": tests, "method": methods}
        return Study.model_validate(content)

    sae = SaeScale(
        sources=(source("asked"),),
        asked=source("asked"),
        tested=source("csqa"),
        tokens=500,
        selecting=40,
        ablating=25,
        choosing=20,
        testing=30,
        training=TrainingSettings(expansions=(4,), batch_size=64, massive=0.0),
        ablation=AblationPlan(features=4, random=2),
        steering=SteerPlan(top=(2, 4), gammas=(0.0, 30.0)),
        features=6,
        expansion=4,
    )
    return Scale(
        name="tiny",
        about="For tests.",
        weights=(0, 10**9),
        study=study,
        home=source("home"),
        away=source("away"),
        n_heads=40,
        sae=sae,
        layers=LayerPlan(lens="mlp", tested_folds=1, network=NETWORK),
        probes=ProbePlan(depths=(0, 1), seeds=1, grid_depth=1, epochs=1),
        dimensions=DimensionSettings(most=4, embedding=False),
        left_out={"SteerConf": "it writes"},
    )


class Opening:
    """Gives one model, and counts."""

    def __init__(self, model: Model) -> None:
        self.model, self.names = model, list[str]()

    def __call__(self, name: str, *, dtype: str | None = None) -> Model:
        self.names.append(name)
        return self.model


def nobody(name: str, *, dtype: str | None = None) -> Model:
    """Opens no model."""
    pytest.fail(f"{name} was loaded in {dtype}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in a folder: its configuration can then be read before it is loaded."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def undertaking(saved: Path, scale: Scale, root: Path, opening: Any, **more: Any) -> Undertaking:
    folders = Folders(out=root / "out", work=root / "work")
    return Undertaking((str(saved),), scale, folders, more.pop("parts", ()), opening, **more)


@pytest.fixture(scope="module")
def whole(files: dict[str, Path], saved: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Opening, Scale]:
    """All of it, once."""
    root = tmp_path_factory.mktemp("whole")
    opening, scale = Opening(replace_name(make_model("llama"), saved)), tiny_scale(files)
    reproduce(undertaking(saved, scale, root, opening))
    return root, opening, scale


def replace_name(model: Model, saved: Path) -> Model:
    """The model under the name of its folder, as loading would call it."""
    return replace(model, name=str(saved))


def test_every_part_leaves_a_record_and_the_page_reads_in_the_order_of_the_paper(
    whole: tuple[Path, Opening, Scale], saved: Path
) -> None:
    root, opening, _ = whole
    assert opening.names == [str(saved)], "the parts of a model share it"
    out = root / "out" / saved.name
    folder = next((root / "out").glob("*/probe1")).parent
    kept = {part: read_record(folder / part / "part.json") for part in PARTS}
    assert [part for part, one in kept.items() if "failed" in one] == [], out
    page = (root / "out" / "reproduction.html").read_text("utf-8")
    order = [m for m in re.findall(r'<section id="(\w+)"', page) if m != "provenance"]
    assert order == ["abstract", "steering", "probe", "layers", "transfer", "features", "heads", "dimensions"]
    assert "Missing." not in page
    assert page.count("<svg") >= 4
    for words in ("CORAL steering results", "4.1, Table 1", "Mistral-7B-Instruct-v0.3", "64.22", "the best 48 hold"):
        assert words in page
    assert (root / "out" / "tables.tex").read_text("utf-8").count(r"\begin{tabular}") == 3 * 4 + 4 * 4
    markdown = (root / "out" / "tables.md").read_text("utf-8")
    assert "| 0-shot |" in markdown
    assert len(list((root / "out" / "figures").glob("*.svg"))) == 4


def test_the_page_of_files_names_what_lies_beside_the_page(whole: tuple[Path, Opening, Scale]) -> None:
    words = (
        (ROOT / "docs" / "reference" / "files.md").read_text("utf-8").split("## A reproduction")[1].split("\n## ")[0]
    )
    out = whole[0] / "out"
    named = set(re.findall(r"`([a-z]+\.[a-z]+)`", words)) - {"failure.txt", "part.json"}
    assert {p.name for p in out.iterdir() if p.is_file() and p.suffix != ".lock"} == named
    assert {p.suffix for p in (out / "figures").iterdir()} == {".svg", ".png"}
    (folder,) = (p for p in out.iterdir() if p.is_dir() and p.name != "figures")
    assert sorted(p.name for p in folder.iterdir()) == sorted(PARTS)
    assert all(
        (folder / part / "study" / "report.html").exists() for part in ("probe1", "probe2", "transfer", "corrsteer")
    )


def test_every_claim_has_the_papers_number_ours_and_a_sentence(whole: tuple[Path, Opening, Scale]) -> None:
    markdown = (whole[0] / "out" / "tables.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (?!the paper|---)([^|]+) \| ([^|]+) \| ([^|]+) \| (agrees|does not agree|cannot be told) \|$",
        markdown,
        re.M,
    )
    assert len(rows) >= 14
    sentences = re.findall(r"^- (Agrees|Does not agree|Cannot be told): .+\.$", markdown, re.M)
    assert len(sentences) == len(rows)
    head = markdown.split("\n\n")[1]
    counted = [int(n) for n in re.findall(r"\d+", head)]
    assert counted[0] == len(rows) == sum(counted[1:4])


def test_a_second_run_does_nothing_but_the_page(
    whole: tuple[Path, Opening, Scale], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, scale = whole
    before = {p: p.stat().st_mtime_ns for p in (root / "work").rglob("*.safetensors")}
    told: list[str] = []
    page = reproduce(undertaking(saved, scale, root, nobody), tell=told.append)
    assert told == []
    assert page.exists()
    assert {p: p.stat().st_mtime_ns for p in (root / "work").rglob("*.safetensors")} == before


def test_a_figure_is_drawn_once_and_again_only_where_its_part_has_changed(
    whole: tuple[Path, Opening, Scale], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, shown, usual, parts = list[str](), list[int](), Picture.files, ("layers", "heads", "dimensions")
    known = run_module.records_of(undertaking(saved, whole[2], whole[0], nobody), str(saved))
    page = tmp_path / "out" / "reproduction.html"

    def n_figures() -> int:
        return page.read_text("utf-8").count("<figure")

    def leaving(part: str) -> Any:
        def run(_: Any) -> dict[str, Any]:
            shown.append(n_figures())
            return known[part]

        return run

    monkeypatch.setattr(Picture, "files", lambda self: (drawn.append(self.name), usual(self))[1])
    monkeypatch.setattr(Picture, "svg", lambda self: pytest.fail(f"{self.name} is drawn once more for the page"))
    patched(monkeypatch, {part: replace(PARTS[part], run=leaving(part)) for part in parts})
    asked = undertaking(saved, whole[2], tmp_path, nobody, parts=parts)
    reproduce(asked)
    assert drawn == [f"{part}-tiny-llama" for part in parts]
    assert [*shown, n_figures()] == [0, 1, 2, 3], "the page after each part has the figures of all that are done"
    first, path = page.read_bytes(), next((tmp_path / "out").rglob("dimensions/part.json"))
    kept = read_record(path)
    kept["record"]["groups"][0]["layer"] = 99
    write_record(path, {k: v for k, v in kept.items() if k != "digest"})
    run_module.show(asked)
    assert drawn[3:] == ["dimensions-tiny-llama"]
    path.unlink()
    reproduce(replace(asked))
    assert page.read_bytes() == first, "as drawn by another process"


def test_several_models_stand_side_by_side_and_one_is_in_memory_at_a_time(
    files: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    other = tmp_path / "second-llama"
    shutil.copytree(saved, other)
    names = (str(saved), str(other))
    opened: list[str] = []

    def open_model(name: str, *, dtype: str | None = None) -> Model:
        opened.append(name)
        return replace(make_model("llama"), name=name)

    both = replace(undertaking(saved, tiny_scale(files), tmp_path, open_model, parts=("dimensions",)), models=names)
    page = reproduce(both).read_text("utf-8")
    assert opened == list(names)
    for name in ("tiny-llama", "second-llama"):
        assert f"R² and variance by components, {name}" in page
        assert f"<b>{name}</b> · ours, not run" in page
    assert len(list((tmp_path / "out" / "figures").glob("dimensions-*.svg"))) == 2


def test_models_of_one_name_keep_their_folders_and_their_figures(
    files: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    names = tuple(str(shutil.copytree(saved, tmp_path / run / "model")) for run in ("run1", "run2"))

    def open_model(name: str, *, dtype: str | None = None) -> Model:
        return replace(make_model("llama"), name=name)

    both = replace(undertaking(saved, tiny_scale(files), tmp_path, open_model, parts=("dimensions",)), models=names)
    page = reproduce(both).read_text("utf-8")
    assert len(list((tmp_path / "out" / "figures").glob("dimensions-*.svg"))) == 2
    for name in ("run1/model", "run2/model"):
        assert f"R² and variance by components, {name}" in page
        assert f"<b>{name}</b> · ours, not run" in page
        assert page.count(f'<td data-label="model">{name}</td>') == 2, "the claims on dimensions, of each model"
    markdown = (tmp_path / "out" / "tables.md").read_text("utf-8")
    assert len(re.findall(r"^\| Three components .* \| run1/model \|", markdown, re.M)) == 1
    (said,) = re.findall(r"run1/model (\d), (\d), (\d); run2/model (\d), (\d), (\d); all models 0, 0, 0", markdown)
    assert said[:3] == said[3:]
    assert sum(map(int, said)) == 4
    assert "this model" not in markdown


def failing(part: str, error: BaseException) -> dict[str, Part]:
    """The parts, one of which fails."""

    def run(_: Any) -> dict[str, Any]:
        raise error

    return {name: replace(one, run=run) if name == part else one for name, one in PARTS.items()}


def patched(monkeypatch: pytest.MonkeyPatch, parts: dict[str, Part]) -> None:
    for name, part in parts.items():
        monkeypatch.setitem(PARTS, name, part)


def test_a_part_that_fails_stops_no_other_and_the_page_says_why(
    files: dict[str, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = tiny_scale(files)
    opening = Opening(replace_name(make_model("llama"), saved))
    wanted = ("sae", "corrsteer", "dimensions", "heads")
    with monkeypatch.context() as patch:
        patched(patch, failing("sae", CoralError("There is no room for 16x; give a smaller one.")))
        patch.setitem(PARTS, "heads", failing("heads", ValueError("odd <shape>\nof states"))["heads"])
        with pytest.raises(
            CoralError, match=r"Parts that failed: sae of .*, corrsteer of .*, heads of .* says why and has all"
        ):
            reproduce(undertaking(saved, scale, tmp_path, opening, parts=parts_of(wanted)))
    page = (tmp_path / "out" / "reproduction.html").read_text("utf-8")
    assert "There is no room for 16x; give a smaller one." in page
    assert "it needs the part sae, which is missing" in page
    assert "ValueError: odd &lt;shape&gt; (" in page
    assert "it was not asked for (--part probe1)." in page
    assert "R² and variance by components" in page
    assert "of states" in next((tmp_path / "out").rglob("heads/failure.txt")).read_text("utf-8")
    # the same command tries what failed once more, and nothing else
    told: list[str] = []
    reproduce(undertaking(saved, scale, tmp_path, opening, parts=("heads",)), tell=told.append)
    assert [line for line in told if line.startswith("Attention heads")] == told[:1]
    assert "ValueError" not in (tmp_path / "out" / "reproduction.html").read_text("utf-8")


def test_a_piece_that_cannot_be_shown_is_named_and_all_else_stands(
    whole: tuple[Path, Opening, Scale], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole[0] / "out", tmp_path / "out")
    again = undertaking(saved, whole[2], tmp_path, nobody)

    def damaged(part: str, change: Any) -> None:
        path = next((tmp_path / "out").rglob(f"{part}/part.json"))
        kept = read_record(path)
        change(kept["record"])
        write_record(path, {k: v for k, v in kept.items() if k != "digest"})

    damaged("layers", lambda record: record.pop("single_gain"))
    damaged("dimensions", lambda record: record["groups"].clear())
    damaged("sae", lambda record: (record["ablation"]["chosen"].clear(), record["ablation"]["groups"].clear()))
    results = next((tmp_path / "out").rglob("probe1/study/**/results.json"))
    results.write_text(results.read_text("utf-8").replace('"tasks"', '"tusks"'))
    page = run_module.show(again).read_text("utf-8")
    for sentence in (
        "Layers, several of them side by side, and gamma, tiny-llama: it cannot be shown (KeyError: &#39;single_gain&#39;).",
        "Dimensions, tiny-llama: it cannot be shown (IndexError: ",
        "Probe 1: CommonsenseQA and RACE, tiny-llama: ",
        "no feature was selected, so there is none to draw.",
        "Cannot be told: no feature was selected by correlation.",
    ):
        assert sentence in page
    assert "the best 48 hold" in page, "heads are shown"


def test_a_part_whose_files_are_gone_is_run_again(
    whole: tuple[Path, Opening, Scale], saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole[0] / "out", tmp_path / "out")
    again = undertaking(saved, whole[2], tmp_path, nobody)
    assert set(run_module.records_of(again, str(saved))) == set(PARTS)
    next((tmp_path / "out").rglob("transfer/study/**/seeds.json")).unlink()
    assert set(PARTS) - set(run_module.records_of(again, str(saved))) == {"transfer"}


def test_results_of_other_weights_questions_or_an_adapter_do_not_stand(
    files: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(saved, tmp_path / "model"))
    own = {name: Path(shutil.copy(path, tmp_path)) for name, path in files.items()}
    scale, opening = tiny_scale(own), Opening(replace_name(make_model("llama"), model))
    first = undertaking(model, scale, tmp_path, opening, parts=("dimensions",))
    reproduce(first)

    def done(**changes: Any) -> bool:
        fresh = undertaking(model, scale, tmp_path, nobody)
        return "dimensions" in run_module.records_of(replace(fresh, **changes), str(model))

    assert done()
    with_adapter = replace(first.folders, adapter="my-adapter")
    assert not done(folders=with_adapter)
    assert with_adapter.of_model("m") != first.folders.of_model("m"), "nor do states, of a study or of this"
    weights = model / "model.safetensors"
    weights.touch()
    assert done(), "the same weights, written again"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not done()
    weights.write_bytes(good)
    text = own["home"].read_text("utf-8")
    own["home"].write_text(text.replace("home: ", "HOME: ", 1))
    assert not done()
    own["home"].unlink()
    assert done(), "what cannot be read contradicts nothing"


def test_a_killed_run_goes_on_where_it_was(
    files: dict[str, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, opening = tiny_scale(files), Opening(replace_name(make_model("llama"), saved))
    parts = ("layers", "dimensions")
    with monkeypatch.context() as patch:
        patched(patch, failing("dimensions", KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            reproduce(undertaking(saved, scale, tmp_path, opening, parts=parts))
    assert "it has not been run yet." in (tmp_path / "out" / "reproduction.html").read_text("utf-8")
    monkeypatch.setitem(PARTS, "layers", failing("layers", AssertionError("done twice"))["layers"])
    reproduce(undertaking(saved, scale, tmp_path, opening, parts=parts))
    assert "Missing." in (tmp_path / "out" / "reproduction.html").read_text("utf-8"), "other parts were not asked for"


def test_the_store_of_another_model_is_named_in_the_place_of_the_part(
    files: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    scale = tiny_scale(files)
    first, other = (replace_name(make_model("llama"), saved) for _ in range(2))
    reproduce(undertaking(saved, scale, tmp_path, Opening(first), parts=("dimensions",)))
    other = replace_name(Model_of_other_weights(), saved)
    (next((tmp_path / "out").rglob("dimensions/part.json"))).unlink()
    weights = saved / "model.safetensors"
    weights.touch()  # it may have become another model
    with pytest.raises(CoralError, match="Parts that failed: dimensions of"):
        reproduce(undertaking(saved, scale, tmp_path, Opening(other), parts=("dimensions",)))
    assert "are of different models called" in (tmp_path / "out" / "reproduction.html").read_text("utf-8")


def Model_of_other_weights() -> Model:  # noqa: N802
    """Another tiny model."""
    return make_model("qwen2")


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ((10**9, 10**10), "it would answer by chance; take a larger model, or go on with --anyway"),
        ((1, 100), "it would take long; take a smaller model or --scale paper with a GPU, or go on with --anyway"),
    ],
)
def test_a_model_of_another_size_than_the_scale_is_refused(
    files: dict[str, Path], saved: Path, tmp_path: Path, weights: tuple[int, int], sentence: str
) -> None:
    scale = replace(tiny_scale(files), weights=weights, larger="--scale paper with a GPU")
    with pytest.raises(CoralError, match=sentence):
        reproduce(undertaking(saved, scale, tmp_path, nobody))
    largest = run_module.size_complaint(str(saved), undertaking(saved, replace(scale, larger=""), tmp_path, nobody))
    assert "--scale paper" not in largest, "there is no larger scale than that"
    assert not (tmp_path / "out").exists()
    run_module.refuse_size(str(saved), undertaking(saved, scale, tmp_path, nobody, anyway=True))


def test_a_folder_of_another_scale_and_one_with_other_things_are_refused(
    files: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    scale = tiny_scale(files)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(CoralError, match="is not empty and holds no reproduction"):
        reproduce(undertaking(saved, scale, tmp_path, nobody))
    (tmp_path / "out" / "thesis.tex").unlink()
    run_module.claim_folder(undertaking(saved, scale, tmp_path, nobody))
    with pytest.raises(CoralError, match="holds a reproduction at scale 'tiny', not 'other'; choose another --out"):
        reproduce(undertaking(saved, replace(scale, name="other"), tmp_path, nobody))


# ------------------------------------------------------------------------------------------------------------- the plan


def test_the_plan_counts_what_parts_share_once_and_loads_no_model(
    files: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    place = undertaking(saved, tiny_scale(files), tmp_path, nobody).place(str(saved))
    plans = {plan.name: plan for plan in plan_parts(place, tuple(PARTS))}
    assert list(plans) == list(PARTS)
    assert plans["probe1"].questions > 60 + 30 + 30
    assert plans["layers"].questions == 60
    assert plans["layers"].passes == pytest.approx(1.0)
    assert plans["dimensions"].passes == 0.0, "its states are those of the layers"
    assert plans["transfer"].passes < 1.0, "its training questions were scored before"
    assert all(plan.seconds is not None and plan.seconds >= 0 for plan in plans.values())
    options = sum(len(q.options) for q in toy_questions(60, seed=1))
    assert plans["layers"].n_bytes == options * 4 * 32 * 2, "four layers of width 32 in half precision"
    assert plans["heads"].n_bytes == pytest.approx(options * 3 * 32 * 2 * 40 / 60, rel=0.2), (
        "of 40 questions, in three blocks"
    )
    assert plans["sae"].n_bytes == 2 * 500 * 32 + 4 * 4 * (2 * 32 * 4 * 32), (
        "500 tokens; weights once and in a checkpoint"
    )
    alone = plan_parts(place, ("sae", "layers"))
    assert alone[1].n_bytes == plans["layers"].n_bytes, "autoencoders keep nothing that others read"
    nowhere = undertaking(tmp_path / "no-such-model", tiny_scale(files), tmp_path, nobody)
    with pytest.raises(CoralError, match=r"There is no model at .*no-such-model"):
        plan_parts(nowhere.place(str(tmp_path / "no-such-model")), ("layers",))


def test_a_busy_machine_is_reckoned_as_fast_as_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock on the wall runs 15 times as fast as that of the thread: others have the core."""
    ticks = itertools.count()
    clock = SimpleNamespace(thread_time=lambda: 0.01 * next(ticks), perf_counter=lambda: 0.15 * next(ticks))
    monkeypatch.setattr(reckoning, "time", clock)
    monkeypatch.setattr(reckoning.torch, "rand", lambda *_, **__: torch.ones(2, 2))
    threads = torch.get_num_threads()
    assert reckoning.machine_speed("cpu", seconds=0.3) == pytest.approx(threads * 2 * 1024**3 / 0.01, rel=0.1)
    assert torch.get_num_threads() == threads


def test_questions_ordered_by_subject_are_drawn_and_no_article_is_divided() -> None:
    asked = [replace(q, id=f"{i}", group=f"article {i // 3}", task=f"subject {i // 20}")
             for i, q in enumerate(toy_questions(120, seed=0))]  # fmt: skip
    sets = drawn_apart(asked, (30, 20, 10))
    assert [len(drawn) - size in (0, 1, 2) for drawn, size in zip(sets, (30, 20, 10), strict=True)] == [True] * 3
    assert all(len({q.task for q in drawn}) >= 3 for drawn in sets)
    groups = [{q.group for q in drawn} for drawn in sets]
    assert len(set.union(*groups)) == sum(map(len, groups))
    assert sets == drawn_apart(asked, (30, 20, 10))
    assert all([int(q.id) for q in drawn] == sorted(int(q.id) for q in drawn) for drawn in sets)


def test_heads_are_read_on_drawn_questions_in_a_store_of_their_own(
    files: dict[str, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, asked = tiny_scale(files), []

    def noted(_: Any, questions: Any, folder: Path, *, extraction: Any, **__: Any) -> Any:
        asked.append((questions, folder, extraction.mixed))
        raise CoralError("far enough")

    monkeypatch.setattr("coral_lens.study.reproduce.parts.extract", noted)
    for n in (40, 30):
        model = Opening(replace_name(make_model("llama"), saved))
        some = undertaking(saved, replace(scale, n_heads=n), tmp_path, model)
        place = replace(some, folders=replace(some.folders, mixed=True)).place(str(saved))
        with pytest.raises(CoralError, match="far enough"):
            PARTS["heads"].run(place)
    (first, one, mixed), (second, other, _) = asked
    assert [len(first), len(second)] == [40, 30]
    assert first != list(place.load(scale.home)[:40])
    assert one != other
    assert mixed


def test_probes_of_other_depth_are_trained_on_the_device_that_was_given(
    files: dict[str, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def noted(data: Any, *_: Any, **__: Any) -> Any:
        given.append(data.device)
        raise CoralError("far enough")

    monkeypatch.setattr("coral_lens.analysis.probes.choose_candidate", noted)
    opening = Opening(replace_name(make_model("llama"), saved))
    place = undertaking(saved, tiny_scale(files), tmp_path, opening, device="meta").place(str(saved))
    with pytest.raises(CoralError, match="far enough"):
        PARTS["depth"].run(place)
    assert given == ["meta"]


def test_questions_are_read_once_for_all_parts(
    files: dict[str, Path], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = plan_module.load_questions
    monkeypatch.setattr(plan_module, "load_questions", lambda task, *a: (read.append(task), real(task, *a))[1])
    opening = Opening(replace_name(make_model("llama"), saved))
    reproduce(undertaking(saved, tiny_scale(files), tmp_path, opening, parts=("layers", "dimensions")))
    assert read == [str(files["home"])]


def test_a_shared_beginning_is_counted_once() -> None:
    assert shared_beginning(["shots, one", "shots, two", "shots, ten"]) == len("shots, ")
    assert shared_beginning(["same", "same"]) == 4


def test_parts_come_in_the_order_of_the_paper_with_what_they_need() -> None:
    assert tuple(PARTS) == NAMES
    assert parts_of(("corrsteer", "layers")) == ("layers", "sae", "corrsteer")
    assert parts_of(()) == ()


# --------------------------------------------------------------------------------------------------------------- scales


def test_the_papers_scale_is_its_ready_made_studies_with_its_own_rows() -> None:
    scale = SCALES["paper"]
    for part in ("probe1", "probe2", "transfer"):
        study, ready = scale.study(part, "mine"), load_study(part)
        assert study.models == ("mine",)
        assert (study.test, study.guard) == (ready.test, ready.guard)
        assert [m.sources for m in study.mixture] == [m.sources for m in ready.mixture]
        assert [m.kind for m in study.method] == ["mlp", "iti", "ccps", "steerconf"]
    assert scale.home == load_study("probe2").mixture[0].sources[0]
    assert scale.layers.tested_folds == 1
    assert scale.sae.training == TrainingSettings(massive=0.0), "attention sinks are not left out"
    assert (scale.sae.ablation, scale.sae.features) == (AblationPlan(), 300)


def test_the_papers_scale_takes_the_papers_own_way_of_each_method() -> None:
    scale = SCALES["paper"]
    for part in ("probe1", "probe2", "transfer"):
        study = scale.study(part, "mine")
        coral, iti, ccps, steerconf = (read_method(entry) for entry in study.method)
        assert (coral.network.search, coral.network.grid) == ("grid", "paper")
        assert iti.questions == 5000
        assert not iti.balanced
        assert ccps.push == "up"
        assert (steerconf.crossed, steerconf.questions, steerconf.ask_again) == (True, 2000, True)
        assert steerconf.max_new_tokens == 512
        assert not any(mixture.stratified for mixture in study.mixture)
    assert scale.layers.network == NetworkSearch(search="grid", grid="paper")
    (trained,) = (m.options["train_on"] for m in scale.study("transfer", "mine").method if m.kind == "ccps")
    assert tuple(trained) == ("commonsense_qa",)
    assert any("target" in reason for reason in scale.left_out.values()), "what no option gives is said"


def test_the_original_corrsteer_stays_the_original_at_the_small_scale() -> None:
    rows = {m.name or m.kind: m.options for m in smaller_study("corrsteer", "m").method}
    original, ours = rows["corrsteer (original)"], rows["corrsteer"]
    assert (list(original["features"]), list(original["alphas"])) == ([1], [1.0])
    assert (list(ours["features"]), list(ours["alphas"])) == ([10], [0.0, 1.0])
    assert original["questions"] == ours["questions"] == 40


def test_the_small_scale_asks_less_of_the_same_and_says_what_it_leaves_out() -> None:
    for part in ("probe1", "probe2", "transfer", "corrsteer"):
        small = smaller_study(part, "smollm2")
        assert small.models == ("smollm2",)
        assert all(s.shots == (5 if s.task == "mmlu" else 0) for s in small.sources)
        assert "steerconf" not in [m.kind for m in small.method]
    assert [t.task for t in smaller_study("transfer", "m").test] == ["arc_challenge", "hellaswag", "openbookqa"]
    probe1, transfer = smaller_study("probe1", "m"), smaller_study("transfer", "m")
    assert transfer.mixture == probe1.mixture
    assert set(transfer.guard) == set(probe1.tested)
    assert {"SteerConf", "Math-MC"} <= set(SCALES["small"].left_out)
    for scale in SCALES.values():
        assert (scale.layers.lens, scale.dimensions.embedding) == ("mlp", False)


def test_a_limit_caps_every_source_and_is_a_scale_of_its_own() -> None:
    scale = limited(SCALES["paper"], 70)
    assert scale.name == "paper, limit 70"
    for part in ("probe1", "probe2", "transfer", "corrsteer"):
        study = scale.study(part, "m")
        assert {s.n for m in study.mixture for s in m.sources} == {70}
        assert not any(m.stratified for m in study.mixture), (
            "70 questions of 57 subjects: each would give one to the test"
        )
        assert {t.n for t in study.test if not t.rest} <= {70}
        assert study.guard == SCALES["paper"].study(part, "m").guard, "what is kept out of training is kept out whole"
    assert (scale.home.n, scale.away.n, scale.n_heads, scale.sae.testing, scale.sae.asked.n) == (70, 70, 70, 70, 210)
    small = SCALES["small"].sae
    assert limited(SCALES["small"], 120).sae.asked.n == 120 + 120 + min(120, small.choosing)


# ----------------------------------------------------------------------------------------------------- the command line


def test_the_command_prints_the_plan_and_refuses_what_it_cannot_do(
    saved: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALES, "small", tiny_scale(files))
    runner = CliRunner()

    def coral(*words: object) -> Any:
        return runner.invoke(app, ["reproduce", "--out", str(tmp_path / "out"), *map(str, words)])

    outcome = coral("--model", saved, "--check", "--part", "dimensions", "--part", "corrsteer")
    assert outcome.exit_code == 0
    assert [line.split()[0] for line in outcome.stdout.splitlines()[2:5]] == ["sae", "corrsteer", "dimensions"]
    assert "What is left: about" in outcome.stdout
    assert "refused" not in outcome.stdout
    assert not (tmp_path / "out").exists()
    for missing in (tmp_path / "none", "nosuchmodel"):
        refused = coral("--model", missing, "--check", "--part", "layers")
        assert isinstance(refused.exception, CoralError), "one sentence, and exit code 2"
        assert Path(missing).name in str(refused.exception)
        assert "unknown" not in refused.stdout
    monkeypatch.setattr(run_module, "records_of", lambda *_: {"layers": {}, "depth": {}, "heads": {}})
    assert "What is left: about" in coral("--model", saved, "--check", "--part", "probe1", "--part", "probe2").stdout
    said = coral("--model", saved, "--check", "--part", "layers").stdout
    assert "All of it is done." in said, "others were not asked for"
    monkeypatch.setitem(SCALES, "small", replace(tiny_scale(files), weights=(10**9, 10**10)))
    assert "It would be refused:" in coral("--model", saved, "--check", "--part", "layers").stdout.replace("\n", " ")
    for words, sentence in {
        ("--limit", 5): "limit must be at least 50. Got 5 instead.",
        ("--part", "probe3"): "Unknown part 'probe3'; use one of probe1,",
        ("--model", tmp_path / "none"): "There is no model at",
    }.items():
        assert sentence in str(coral(*words).exception)


def test_names_of_models_and_reasons_stay_text_in_markdown() -> None:
    picture = Picture("layers", lambda figure: None, 2.0, "", "A caption.")
    name = "[x](http://a) <b>*_"
    section = PaperSection("layers", "Layers", "4.2", pictures=((picture, name),), missing=(f"{name}: two\nlines",))
    text = markdown_of(Reproduction(f"The paper on {name}", (), (section,)), [], [])
    assert text.count(r"\[x\](http:\//a) \<b>\*\_") == 3
    assert "two lines" in text
