"""Nothing that is read runs code: every call of the tree that could is in a short list with its reason, and what strangers plant
in folders stays where it is. Hostile lens folders and pages are in tests/faults."""

from __future__ import annotations

import ast
import csv
import inspect
import io
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from typer.main import get_command

from coral_lens.cli import app
from coral_lens.data import task_index
from coral_lens.engine.loading import load_model, load_outline
from coral_lens.errors import CoralError
from coral_lens.report.tables.exports import csv_text

ROOT = Path(__file__).parents[1]
TOPS = ("src", "bench", "docs", "examples", "tests")
FILES = [
    *sorted(p for top in TOPS for kind in ("*.py", "*.ipynb") for p in (ROOT / top).rglob(kind)),
    ROOT / "setup.py",
]
OWN = ROOT / "tests" / "test_security.py"
"""Names what it looks for."""

# ------------------------------------------------------------------------------------------------- calls that could

MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "runpy",
    "code",
    "subprocess",
    "pty",
}
NAMES = {"eval", "exec", "compile", "__import__"}
"""Of Python itself; a method of the same name is another thing."""
METHODS = {
    "import_module", "load_module", "exec_module", "system", "popen", "unsafe_load", "full_load", "load_dataset",
    "from_pretrained", "from_config", "snapshot_download", "hf_hub_download", "extractall", "Markup",
}  # fmt: skip
LOADERS = {"torch.load", "np.load", "numpy.load", "yaml.load", "jit.load", "hub.load"}
KEYWORDS = {"shell", "weights_only", "allow_pickle", "trust_remote_code", "autoescape"}

ALLOWED = {
    "src/coral_lens/__init__.py import_module": "loads the module of a public name when that is first asked for",
    "src/coral_lens/data/assets.py subprocess": "calls pip with a list of words, no shell; what it fetches has its digest here",
    "src/coral_lens/data/task_data.py load_dataset": "data only: it runs no scripts, and the option for them is taken away",
    "src/coral_lens/data/task_data.py trust_remote_code": "takes the option away from what a task file says",
    "tests/end_to_end/test_ray_serve.py exec_module": "runs the example of this repository",
    "bench/* import_module": "imports modules of coral_lens by names that stand in the source",
    "src/coral_lens/storage/temporary.py import_module": "fcntl of the standard library, which Windows lacks",
    "src/coral_lens/serve/encodings.py import_module": "zstd of the standard library, or of the package that has it earlier",
    "src/coral_lens/engine/loading.py import_module": "imports modules of transformers by names that stand in the source",
    "src/coral_lens/engine/loading.py from_pretrained": "takes trust_remote_code from the caller, who must say it",
    "src/coral_lens/engine/loading.py from_config": "as above, and without weights",
    "src/coral_lens/engine/loading.py trust_remote_code": "passes on what the caller said; its default is False",
    "src/coral_lens/harness/model.py trust_remote_code": "passes on what lm-eval was told; its default is False",
    "src/coral_lens/engine/loading.py snapshot_download": "fetches only the two files of an adapter, one of them safetensors",
    "src/coral_lens/lens/publish.py snapshot_download": "fetches only the files of a lens, by their names",
    "src/coral_lens/report/pages/contents.py Markup": "an SVG of our own drawing, and an <img>, in which no script runs",
    "src/coral_lens/report/pages/run.py Markup": "our script, its digest, and data that was escaped for a script",
    "src/coral_lens/report/pages/templates.py Markup": "our style sheet",
    "src/coral_lens/report/pages/templates.py autoescape": "True",
    "bench/* from_pretrained": "an encoder from a local folder: safetensors alone, and no remote code",
    "bench/* subprocess": "measures in processes of its own, no shell",
    "tests/* subprocess": "starts commands and browsers to kill and to look at, no shell",
    "tests/* import_module": "imports modules by names that stand in our own sources and documents",
    "tests/engine/test_loading.py from_pretrained": "reads the tokenizer of the embedded model",
    "tests/faults/sharing.py pickle": "carries results from a fork of the test to itself",
    "tests/support/pages.py eval": "runs the blocks of our own documents",
    "tests/support/pages.py exec": "as above",
    "tests/support/pages.py compile": "as above",
    "tests/test_documents.py runpy": "runs our own setup.py and the script of the picture",
}
"""Every hit of the tree, and why it is right."""


def hits(tree: ast.AST) -> Iterator[str]:
    """Yield what could run code, or let text become markup."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {a.name.split(".")[0] for a in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            yield from called(node.func)
            yield from {k.arg for k in node.keywords if k.arg} & KEYWORDS
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from {node.value} & (KEYWORDS - {"shell"})


def called(function: ast.expr) -> set[str]:
    """Return the name under which a call is looked up in the lists above."""
    if isinstance(function, ast.Name):
        return {function.id} & (NAMES | METHODS)
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value).split(".")[-1]
        return {function.attr} & METHODS | {f"{owner}.{function.attr}"} & LOADERS
    return set()


def found(path: Path) -> set[str]:
    """Return the entries of the list that a file needs."""
    name = path.relative_to(ROOT).as_posix()
    entries = set()
    for hit in hits(ast.parse(source_of(path))):
        everywhere = f"{name.split('/')[0]}/* {hit}"
        entries.add(everywhere if everywhere in ALLOWED else f"{name} {hit}")
    return entries


def source_of(path: Path) -> str:
    """Return the Python of a file; of a notebook that of its cells."""
    if path.suffix == ".py":
        return path.read_text("utf-8")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_every_call_that_could_run_code_is_in_the_list_and_the_list_holds_no_other() -> None:
    needed = {entry for path in FILES if path != OWN for entry in found(path)}
    assert sorted(needed - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - needed) == []


@pytest.mark.parametrize(
    ("code", "hit"),
    [
        ("import pickle", "pickle"),
        ("from joblib import load", "joblib"),
        ("torch.load(path)", "torch.load"),
        ("yaml.load(text)", "yaml.load"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("eval('1')", "eval"),
        ("os.system('x')", "system"),
        ("run(words, shell=True)", "shell"),
        ("settings = {'trust_remote_code': True}", "trust_remote_code"),
        ("Environment(autoescape=False)", "autoescape"),
    ],
)
def test_such_a_call_is_seen(code: str, hit: str) -> None:
    assert hit in set(hits(ast.parse(code)))


def test_a_method_called_eval_is_no_hit() -> None:
    assert set(hits(ast.parse("network.eval(); re.compile('x'); json.load(file)"))) == set()


def test_no_template_takes_text_for_markup() -> None:
    for path in (ROOT / "src").rglob("*.html"):
        text = path.read_text("utf-8")
        assert "|safe" not in text.replace(" ", ""), path
        assert "autoescape" not in text, path


def test_code_of_the_hub_runs_only_where_the_caller_says_so() -> None:
    for function in (load_model, load_outline):
        assert inspect.signature(function).parameters["trust_remote_code"].default is False


def test_no_command_offers_it() -> None:
    def options(command: object) -> Iterator[str]:
        for inner in (getattr(command, "commands", None) or {}).values():
            yield from options(inner)
        yield from (name for p in getattr(command, "params", ()) for name in p.opts)

    offered = {name for name in options(get_command(app)) if "trust" in name or "remote" in name}
    # of a folder of tasks that the user names: without it, the functions in it are refused (tests/data/test_task_index.py)
    assert offered == {"--trust-task-code"}


# ----------------------------------------------------------------------------------------------------------- planted

PLANTED = "test_split: !function evil.harm\n"


def test_a_task_outside_the_folders_of_tasks_is_not_read_whatever_the_cached_index_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index in the cache is a file like others; a `../` in it must not lead to YAML whose functions are then run."""
    root = tmp_path / "tasks"
    (root / "own").mkdir(parents=True)
    (root / "own" / "sound.yaml").write_text("task: sound\n", "utf-8")
    (tmp_path / "planted.yaml").write_text("task: planted\n" + PLANTED, "utf-8")
    monkeypatch.setenv("CORAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(task_index, "_lm_eval_folder", lambda: root)
    monkeypatch.setattr(task_index, "_memory", {})
    assert [leaf.path for leaf in task_index.leaves("sound")] == [root / "own" / "sound.yaml"]
    index = tmp_path / "cache" / "task-index.json"
    stored = json.loads(index.read_text("utf-8"))
    assert metadata.version("lm_eval") in stored["key"]
    for planted in ("../planted.yaml", str(tmp_path / "planted.yaml")):
        stored["entries"]["planted"] = [planted, False, []]
        index.write_text(json.dumps(stored), "utf-8")
        monkeypatch.setattr(task_index, "_memory", {})
        with pytest.raises(CoralError, match="no task called 'planted'"):
            task_index.leaves("planted")


@pytest.mark.parametrize("text", ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "=HYPERLINK(1)"])
def test_a_cell_of_an_export_starts_no_formula(text: str) -> None:
    (row,) = csv.reader(io.StringIO(csv_text([[text, -1.5, "plain"]]), newline=""))
    assert row[0][:1] not in set("=+-@\t\r")
    assert text.strip() in row[0]
    assert row[1:] == ["-1.5", "plain"]
