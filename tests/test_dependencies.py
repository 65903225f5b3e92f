"""What is imported is declared, what only some need is an extra, and a missing extra is one sentence before any long work."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner

import coral_lens
from coral_lens.cli import app
from coral_lens.data.questions import load_questions
from coral_lens.engine.loading import load_model
from coral_lens.engine.model import Model
from coral_lens.errors import EXTRAS, CoralError, need
from coral_lens.metrics.display import Shown
from coral_lens.study.config import load_study
from coral_lens.study.folders import Folders
from coral_lens.study.run import prepare_study, run_alone, run_study

PACKAGE = Path(coral_lens.__file__).parent
ROOT = PACKAGE.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "PyYAML"}
"""What is installed under another name than it is imported by."""
UNIMPORTED = {
    "accelerate": "transformers spreads a model over devices with it",
    "gguf": "transformers reads GGUF files with it",
    "s3fs": "fsspec opens s3:// with it",
}
"""Declared although no file of ours imports it, and why."""
PLUGIN = PACKAGE / "harness" / "model.py"
"""Imported by lm-eval or by its command only, and so the one file that may import it at once."""


def declared(requirements: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, requirements)}


CORE = declared(PROJECT["dependencies"])
OPTIONAL = {name: declared(listed) for name, listed in PROJECT["optional-dependencies"].items()}
TOOLS = ("dev", "docs")
"""What working on the package installs, and nothing of the package imports."""
OURS = {name: listed for name, listed in OPTIONAL.items() if name not in ("all", *TOOLS)}


def distribution(module: str) -> str:
    return canonicalize_name(DISTRIBUTIONS.get(module, module))


def third_party(nodes: list[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    return names - set(sys.stdlib_module_names) - {"coral_lens"}


IMPORTS = {path: third_party(list(ast.walk(ast.parse(path.read_text("utf-8"))))) for path in PACKAGE.rglob("*.py")}


# -------------------------------------------------------------------------------------------------------- declared


def test_every_import_is_declared() -> None:
    known = set(CORE) | {name for listed in OURS.values() for name in listed}
    for path, modules in IMPORTS.items():
        undeclared = {module for module in modules if distribution(module) not in known}
        assert not undeclared, f"{path} imports {undeclared}"


def test_everything_declared_is_imported() -> None:
    imported = {distribution(module) for modules in IMPORTS.values() for module in modules}
    assert (set(CORE) | {name for listed in OURS.values() for name in listed}) - imported == set(UNIMPORTED)


def test_the_table_of_extras_is_that_of_the_package() -> None:
    modules = {extra: {distribution(module) for module in listed} for extra, listed in EXTRAS.items()}
    assert modules == {extra: set(listed) for extra, listed in OURS.items()}
    # Ray is as large as all others together, s3fs allows one version of fsspec alone, and one machine needs neither
    assert OPTIONAL["all"]["coral-lens"].extras == set(OURS) - {"ray", "remote"}


def test_what_an_extra_installs_is_imported_inside_functions_only() -> None:
    optional = {module for listed in EXTRAS.values() for module in listed if distribution(module) not in CORE}
    for path in IMPORTS.keys() - {PLUGIN}:
        at_once = third_party(list(ast.parse(path.read_text("utf-8")).body))
        assert not at_once & optional, f"{path} imports {at_once & optional} when it is imported itself"


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    requirements = declared([line for line in lines if line and not line.startswith("#")])
    return {name: Version(str(r.specifier).removeprefix("==")) for name, r in requirements.items()}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """Of torch alone a newer one is tested: its older builds for the CPU are on no index that pip asks by itself."""
    oldest = pins("constraints-oldest.txt")
    for name, requirement in {**CORE, **{n: r for listed in OURS.values() for n, r in listed.items()}}.items():
        lowest = next(Version(s.version) for s in requirement.specifier if s.operator == ">=")
        assert oldest[name] == lowest or name == "torch", name


def test_every_pinned_version_is_allowed_and_everything_is_pinned() -> None:
    newest = pins("constraints.txt")
    for listed in (CORE, *OURS.values(), *(OPTIONAL[tools] for tools in TOOLS)):
        for name, requirement in listed.items():
            assert newest[name] in requirement.specifier, name


def test_the_hooks_before_a_commit_are_the_tools_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    installed = {name for hook in hooks for name in hook["additional_dependencies"]}
    newest = pins("constraints.txt")
    assert {f"{tool}=={newest[tool]}" for tool in ("ruff", "typos")} <= installed


# --------------------------------------------------------------------------------------------------------- missing


def block(monkeypatch: pytest.MonkeyPatch, *extras: str) -> None:
    """Let the packages of an extra be as if they were not installed."""
    for name in (name for extra in extras for name in EXTRAS[extra]):
        monkeypatch.setitem(sys.modules, name, None)


def sentence(*extras: str) -> str:
    modules = " and ".join(", ".join(name for extra in extras for name in EXTRAS[extra]).rsplit(", ", 1))
    return re.escape(f"needs {modules}, which") + r" (is|are) " + re.escape(
        f"not installed: pip install 'coral-lens[{','.join(extras)}]'"
    )  # fmt: skip


def test_nothing_is_said_where_nothing_is_missing() -> None:
    need(*EXTRAS, by="The suite")


def test_only_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CoralError) as raised:
        need("eval", "report", by="A page")
    assert str(raised.value) == "A page needs pyarrow, which is not installed: pip install 'coral-lens[eval]'"


@pytest.mark.parametrize(
    ("extras", "command"),
    [
        (("report",), "eval --lens none --task none.jsonl --out out"),
        (("report",), "eval --lm-eval-samples none.jsonl --out out"),
        (("report",), "audit none.jsonl --out out"),
        (("report",), "run none.toml --out out"),
        (("report",), "report none"),
        (("report",), "baseline isotonic --train none.jsonl --task none.jsonl --out out"),
        (("report",), "analyse confidence none --out out"),
        (("report",), "analyse layers --store none --out out"),
        (("report",), "analyse heads --store none --out out"),
        (("report",), "analyse dimensions --store none --out out"),
        (("report",), "analyse data --store none --out out"),
        (("report",), "analyse probes --store none --out out"),
        (("report",), "sae report none"),
        (("eval", "report", "gguf"), "demo --out out"),
        (("eval",), "fit --train arc_easy:validation --out out"),
        (("eval",), "extract arc_easy --out out"),
        (("eval",), "tasks"),
        (("eval",), "lm-eval run --model coral"),
        (("gguf",), "doctor none.gguf"),
        (("serve",), "serve --lens none"),
        (("remote",), "extract none.jsonl --out s3://bucket/states"),
        (("remote",), "extract --finish --out s3://bucket/states"),
        (("remote",), "sae train --store s3://bucket/states --layer 1 --out out"),
    ],
)
def test_a_command_says_which_extra_it_needs_before_it_does_anything(
    extras: tuple[str, ...], command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    block(monkeypatch, *extras)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    Path("none.gguf").write_bytes(b"no model")
    result = CliRunner().invoke(app, command.split())
    # of the files that the command names none exists: had it read one before, it would have said so
    assert isinstance(result.exception, CoralError), result.output
    assert re.search(sentence(*extras), str(result.exception)), result.exception
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "command", ["run none.toml --check", "eval --lens none --task none.jsonl", "analyse heads --dry-run --shape 2x2x8"]
)
def test_what_draws_nothing_needs_no_report(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block(monkeypatch, "report")
    monkeypatch.chdir(tmp_path)
    assert "not installed" not in str(CliRunner().invoke(app, command.split()).exception)


def test_a_benchmark_task_needs_lm_eval_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block(monkeypatch, "eval")
    with pytest.raises(CoralError, match=sentence("eval")):
        load_questions("arc_easy:validation")
    file = tmp_path / "own.jsonl"
    file.write_text('{"question": "1 + 1?", "options": ["2", "3"], "answer": 0}\n', "utf-8")
    assert [q.options for q in load_questions(file)] == [("2", "3")]


def test_the_embedded_model_needs_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block(monkeypatch, "gguf")
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path))
    with pytest.raises(CoralError, match=sentence("gguf")):
        load_model("smollm2")


def test_a_study_says_so_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block(monkeypatch, "report")
    monkeypatch.chdir(ROOT / "tests" / "golden")
    with pytest.raises(CoralError, match=sentence("report")):
        run_study("study.toml", tmp_path / "out")
    prepared = prepare_study(load_study(Path("study.toml")), None)
    with pytest.raises(CoralError, match=sentence("report")):
        run_alone(prepared, Folders(tmp_path / "out", tmp_path / "work"), open_model=pytest.fail)
    assert list(tmp_path.iterdir()) == []


def test_a_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    block(monkeypatch, "frames")
    with pytest.raises(CoralError, match=sentence("frames")):
        Shown().to_frame()


# ------------------------------------------------------------------------------------------------------------ core

COMMANDS = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
# not by None in sys.modules, as above: scikit-learn looks there itself to see whether pandas is in use
PathFinder.find_spec = classmethod(
    lambda _, name, *rest: None if name.split(".")[0] in {blocked!r} else find(name, *rest)
)
from coral_lens.cli import app
fit = "fit --model tiny --train train.jsonl --lens ridge --layers 1-2 --out lens"
predict = "predict --lens lens --questions new.jsonl --out answers.jsonl"
evaluate = "eval --lens lens --task new.jsonl"
for command in (fit, predict, evaluate):
    app(command.split(), standalone_mode=False)
"""


def test_fitting_predicting_and_measuring_on_your_own_files_need_no_extra(tiny: Model, tmp_path: Path) -> None:
    tiny.hf.save_pretrained(tmp_path / "tiny")
    tiny.tokenizer.save_pretrained(tmp_path / "tiny")
    rows = [{"question": f"{i} + 1?", "options": [str(i + 1), str(i), "none"], "answer": i % 3} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:50]), "utf-8")
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[50:]), "utf-8")
    blocked = [module for listed in EXTRAS.values() for module in listed]
    run = subprocess.run(
        [sys.executable, "-c", COMMANDS.format(blocked=blocked)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "temperature" in run.stdout
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
    assert [len(a["probs"]) for a in answers] == [3] * 10
