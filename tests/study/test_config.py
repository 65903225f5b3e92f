"""A study says what it means: every mistake in it is one sentence, with the place, before anything is loaded."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coral_lens.data.questions import load_questions
from coral_lens.data.task_data import local_splits, origin_of
from coral_lens.data.task_index import definition, leaves
from coral_lens.data.tasks import definitions
from coral_lens.errors import CoralError
from coral_lens.methods.registry import read_method
from coral_lens.sae.autoencoder import Autoencoder
from coral_lens.study import config as module
from coral_lens.study.config import READY_MADE, Study, load_study, ready_made, study_path
from coral_lens.study.plan import check_sources

READY = ("probe1", "probe2", "transfer")
PAPER = ("mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen2.5-7B-Instruct", "deepseek-ai/deepseek-llm-7b-chat")

MINIMAL = """
name = "mine"
models = ["smollm2"]

[[mixture]]
name = "easy"
sources = [
    { task = "arc_easy", split = "train", shots = 0 },
]

[[test]]
task = "arc_challenge"
split = "test"
shots = 0

[[method]]
kind = "ridge"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8")
    return path


def complaint_of(tmp_path: Path, old: str, new: str) -> str:
    """Load the minimal study with one thing changed, and return the sentence."""
    assert MINIMAL.count(old) == 1
    with pytest.raises(CoralError) as error:
        load_study(write(tmp_path, MINIMAL.replace(old, new)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_minimal_study_has_the_papers_defaults(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, MINIMAL))
    assert (study.seed, study.seeds, study.base, study.chat, study.layers) == (0, (0,), "token", False, None)
    (mixture,) = study.mixture
    assert (mixture.validation, mixture.held_out, mixture.validation_of_rest) == (0.2, 0.0, 0.2)
    assert [s.label for s in study.sources] == ["arc_easy:train", "arc_challenge:test"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('split = "train"', 'spilt = "train"', ("line 8 (mixture 1, sources 1)", "'spilt'", "Did you mean 'split'")),
        ('models = ["smollm2"]', 'model = ["smollm2"]', ("line 3", "'model'", "Did you mean 'models'")),
        ('name = "easy"', 'name = "easy"\nvalidaton = 0.2', ("line 7 (mixture 1)", "Did you mean 'validation'")),
        ('task = "arc_challenge"', "", ("(test 1)", "either a task or the name of a mixture as rest")),
        ('split = "test"\nshots = 0', 'split = "test"', ("(test 1)", "shots is missing")),
        ('kind = "ridge"', 'name = "x"', ("(method 1)", "'kind' is missing")),
        ('name = "mine"', 'name = "../mine"', ("(name)", "pattern")),
        ('name = "easy"', 'name = "easy"\nvalidation = 0.5\nheld_out = 0.5', ("mixture 1", "nothing to train on")),
        ('kind = "ridge"', 'kind = "ridge"\n[[method]]\nkind = "ridge"', ("two methods are called 'ridge'",)),
        ('name = "mine"', 'name = "mine"\nseeds = [0, -1]', ("(seeds 2)", "greater than or equal to 0")),
        ('models = ["smollm2"]', 'models = ["smollm2"', ("not valid TOML", "at line 5")),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    said = complaint_of(tmp_path, old, new)
    assert "mine.toml" in said
    for word in words:
        assert word in said, said


def test_a_study_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CoralError, match=r"no study .*nowhere\.toml"):
        load_study(tmp_path / "nowhere.toml")


def study_of(**changes: Any) -> Study:
    content = module.tomllib.loads(MINIMAL) | changes
    return Study.model_validate(module.frozen(content))


def source(task: str, split: str, shots: int = 0) -> dict[str, Any]:
    return {"task": task, "split": split, "shots": shots}


def mixture_of(*sources: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"name": "m", "sources": list(sources), **more}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # trained on and tested
        ({"mixture": mixture_of(source("arc_challenge", "test"), held_out=0.2)}, "trains on arc_challenge:test"),
        # the same data in another form
        (
            {
                "mixture": mixture_of(source("commonsense_qa", "validation")),
                "test": [source("commonsense_qa_cloze", "validation")],
            },
            "tests on questions of the same split",
        ),
        ({"mixture": mixture_of(source("openbookqa", "test"))}, "would tune on openbookqa:test, which was published"),
        ({"mixture": mixture_of(source("mmlu", "test"))}, "would tune on mmlu:test"),
        ({"test": [{"rest": "m"}]}, "no mixture called 'm'"),
        ({"test": [{"rest": "easy"}]}, "holds nothing out"),
        ({"test": [source("arc_challenge", "")]}, "names no split of arc_challenge"),
        ({"test": [source("arc_chalenge", "test")]}, "Did you mean 'arc_challenge'"),
        # lm-eval's race takes its worked examples from its test set
        ({"test": [source("race", "test", 2)]}, "takes its worked examples from its split 'test'"),
        (
            {
                "mixture": mixture_of(source("openbookqa", "validation", 3)),
                "test": [source("openbookqa", "train", 3)],
            },
            "takes its worked examples from its split 'train'",
        ),
        ({"test": [source("arc_challenge", "test"), source("arc_easy", "test", 5)]}, "0 and with 5 shots"),
        ({"test": [{"task": "mine.jsonl", "split": "x", "shots": 0}]}, "is a file of questions"),
    ],
)
def test_leaks_by_split_are_refused_before_a_question_is_read(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CoralError) as error:
        check_sources(study_of(**changes))
    assert words in str(error.value)


def test_a_part_of_a_test_split_may_be_held_out_of_training() -> None:
    check_sources(study_of(mixture=mixture_of(source("mmlu", "test", 5), held_out=0.2), test=[{"rest": "m"}]))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"kind": "rige"}, "no method of kind 'rige'. Did you mean 'ridge'"),
        ({"kind": "ridge", "fold": 5}, "no option 'fold'. Did you mean 'folds'"),
        ({"kind": "ridge", "seed": 5}, "no option 'seed'"),
        ({"kind": "ridge", "folds": "many"}, "folds must lie between 0 and 20. Got 'many' instead"),
        ({"kind": "ridge", "folds": 50}, "folds must lie between"),
        ({"kind": "temperature", "folds": 5}, "no option 'folds'"),
        ({"kind": "ridge", "name": "base"}, "cannot be called 'base'"),
    ],
)
def test_a_method_that_does_not_exist_or_an_option_it_has_not_is_refused(method: dict[str, Any], words: str) -> None:
    (entry,) = study_of(method=[method]).method
    with pytest.raises(CoralError) as error:
        read_method(entry)
    assert words in str(error.value)


# --- the ready-made studies


def config(name: str) -> Study:
    return load_study(name)


def all_configs() -> list[str]:
    return sorted(path.stem for path in READY_MADE.glob("*.toml"))


def test_there_are_the_papers_three_studies_and_their_small_versions_and_studies_of_the_baselines() -> None:
    assert all_configs() == sorted(
        [
            *READY,
            "corrsteer",
            "steerconf-chat",
            *(f"{name}-small" for name in (*READY, "baselines", "steerconf", "corrsteer")),
        ]
    )
    assert config("corrsteer").models == PAPER[2:]
    assert config("steerconf-chat").models == ("Qwen/Qwen2.5-Coder-1.5B-Instruct",)
    assert config("corrsteer").mixture == config("probe2").mixture
    for name in READY:
        assert config(name).models == PAPER
        assert config(f"{name}-small").models == ("smollm2",)


@pytest.mark.parametrize("name", all_configs())
def test_a_ready_made_study_leaks_nothing_and_names_methods_and_splits_that_exist(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Autoencoder(torch.zeros(4, 8), torch.zeros(8), torch.zeros(8, 4), torch.zeros(4), 1).save(tmp_path / "sae" / "16x")
    study = config(name)
    assert study.name == name
    check_sources(study)
    for entry in study.method:
        read_method(entry)
    for one in study.sources:
        for leaf, known in zip(leaves(one.task), definitions(one.task), strict=True):
            about = definition(leaf)
            published = {about.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot")}
            assert one.split in published | set(local_splits(origin_of(about, None))), one
            assert known.shot_split != one.split or not one.shots


def test_ready_made_studies_are_listed_with_a_line_each_and_installed_with_the_package() -> None:
    listed = ready_made()
    assert list(listed) == all_configs()
    assert all(line.endswith(".") and len(line) < 90 for line in listed.values())
    assert listed["probe1-small"] == "The paper's Probe 1, scaled for SmolLM2 on 2 cores."
    packaged = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert "study/configs/*.toml" in packaged["tool"]["setuptools"]["package-data"]["coral_lens"]


def test_a_study_is_a_path_or_the_bare_name_of_a_ready_made_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert study_path("probe1-small") == READY_MADE / "probe1-small.toml"
    for path in ("probe1-small.toml", "./probe1-small", "mine/probe1-small"):
        assert study_path(path) == Path(path)
    (tmp_path / "probe1-small").mkdir()
    assert study_path("probe1-small") == READY_MADE / "probe1-small.toml", "results are in a folder of that name"
    (tmp_path / "probe1-small").rmdir()
    (tmp_path / "probe1-small").write_text("", "utf-8")
    assert study_path("probe1-small") == Path("probe1-small"), "a file of that name is what was meant"
    with pytest.raises(CoralError, match=r"no study called 'probe1-smal'\. Did you mean 'probe1-small'.*--list"):
        load_study("probe1-smal")


@pytest.mark.parametrize("name", all_configs())
def test_a_ready_made_study_says_what_it_costs(name: str) -> None:
    head = (READY_MADE / f"{name}.toml").read_text("utf-8").split("\nname")[0]
    assert "GPU" in head
    assert "2 cores" in head


def test_the_papers_studies_have_its_baselines_and_the_controls() -> None:
    for name in READY:
        kinds = {entry.kind for entry in config(name).method}
        assert {"mlp", "iti", "ccps", "steerconf", "isotonic"} <= kinds
        assert {"control-random", "control-untrained", "control-base"} <= kinds
        small = {entry.kind for entry in config(f"{name}-small").method}
        assert {"mlp", "isotonic", "control-random", "control-base"} <= small
    assert {"pride", "cyclic", "batch-calibration", "contextual-calibration", "vector-scaling"} <= {
        entry.kind for entry in config("probe2").method
    }


def test_probe_1_is_the_construct_set() -> None:
    (mixture,) = config("probe1").mixture
    assert [(s.task, s.split, s.n) for s in mixture.sources] == [
        ("commonsense_qa", "train", 5000),
        ("race_question", "train", 5000),
    ]
    assert mixture.validation == 0.2


def test_probe_2_is_60_20_20_of_mmlus_test_questions_with_five_shots() -> None:
    study = config("probe2")
    (mixture,) = study.mixture
    assert [s.model_dump() for s in mixture.sources] == [{"task": "mmlu", "split": "test", "n": None, "shots": 5}]
    assert (mixture.validation, mixture.held_out) == (0.2, 0.2)
    assert mixture.validation_of_rest == pytest.approx(0.25)
    assert [t.rest for t in study.test] == [mixture.name]
    assert {d.shot_split for d in definitions("mmlu")} == {"dev"}


@pytest.mark.parametrize("size", ["", "-small"])
def test_the_transfer_study_has_probe_1_unchanged(size: str) -> None:
    probe1, transfer = config(f"probe1{size}"), config(f"transfer{size}")
    assert transfer.mixture == probe1.mixture
    # but for CCPS, which the paper's table of transfer trains on one of the two tasks
    assert [m for m in transfer.method if m.kind != "ccps"] == [m for m in probe1.method if m.kind != "ccps"]
    assert (transfer.seed, transfer.seeds, transfer.base) == (probe1.seed, probe1.seeds, probe1.base)
    # what Probe 1 must not have seen, it has not seen here either
    assert set(transfer.guard) == set(probe1.tested)


def test_the_transfer_study_has_ccps_with_and_without_adaptation() -> None:
    study = config("transfer")
    (ccps,) = [read_method(entry) for entry in study.method if entry.kind == "ccps"]
    assert ccps.adapt
    adapted = {t.task: t.adaptation for t in study.test}
    assert adapted.pop("hellaswag") is None, "its labelled splits are tested, or shown as worked examples"
    assert [source.n for source in adapted.values() if source] == [500] * 4
    tested = {(d.data, s.split) for s in study.tested for d in definitions(s.task)}
    assert not tested & {(d.data, s.split) for s in study.adapted for d in definitions(s.task)}


def test_a_file_of_questions_may_stand_for_a_task(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "Which?", "options": ["a", "b"], "answer": 0}\n', "utf-8")
    study = study_of(test=[{"task": str(path), "shots": 0}])
    check_sources(study)
    assert len(load_questions(study.tested[0].task)) == 1


# ------------------------------------------------------------------------------------------------- whatever it holds


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 5000, "x = " + "{a = " * 5000, "[" + "a." * 5000 + "b]", "x = " + "9" * 5000]
)
def test_a_study_that_is_nested_too_deep_is_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(CoralError) as error:
        load_study(write(tmp_path, text))
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


toml_values = st.sampled_from(
    [
        '"x"',
        '""',
        "0",
        "-1",
        "1.5",
        "nan",
        "inf",
        "true",
        "[]",
        "{}",
        "[[1]]",
        '["x"]',
        "{ task = 1 }",
        "1979-05-27",
        '"[/b]"',
    ]
)
toml_lines = st.tuples(st.sampled_from(MINIMAL.split()), toml_values).map(lambda pair: f"{pair[0]} = {pair[1]}")
toml_texts = st.lists(st.sampled_from(MINIMAL.splitlines()) | toml_lines, max_size=16).map("\n".join)


@given(content=st.binary(max_size=200) | toml_texts.map(str.encode))
@hypothesis_settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_study_of_any_bytes_is_a_study_or_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    message, found = str(path), None
    try:
        found = load_study(path)
    except CoralError as error:
        message = str(error)
    assert str(path) in message
    assert "\n" not in message
    assert found is None or found.mixture
