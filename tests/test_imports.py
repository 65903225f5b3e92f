"""Imports point backwards along the line, and what every command needs stays light."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import coral_lens

PACKAGE = Path(coral_lens.__file__).parent
HEAVY = {"torch", "transformers", "lm_eval", "datasets", "sklearn", "scipy", "matplotlib", "accelerate"}

LINES = (
    "errors records metrics stats",
    "metrics confidence_curves report",
    "errors manifest fingerprints models loading",
    "manifest scratch store",
    "scratch probes",
    "scratch listwise",
    "scratch tempering",
    "errors assets task_index tasks questions",
    "errors assets task_data tasks",
    "records tasks",
    "terms tasks",
    "terms fitting",
    "listing splits samples",
    "listing baselines",
    "records splits samples",
    "records splits lens",
    "records steering temperature lens",
    "records steering listwise inputs samples listwise_mlp kinds choosing simulation fitting",
    "choosing learning_curve fitting",
    "metrics samples",
    "probes mlp search choosing",
    "probes ridge kinds lens",
    "mlp listwise_mlp",
    "probes samples",
    "probes lens",
    "probes shift lens",
    "records steering tempering lens",
    "shift simulation",
    "tempering simulation",
    "records conformal lens",
    "inputs layer_view lens",
    "joined layer_view fitting",
    "errors hub lens",
    "records card lens",
    "manifest shards search",
    "manifest shards store",
    "records prompts store",
    "records prefixes layout engine store joined lens fitting evaluation report demo printing cli",
    "metrics fitting",
    "ridge mlp fitting analysis cli",
    "joined stats analysis cli",
    "records runs evaluation",
    "stats report",
    "report printing",
    "lens printing",
    "lens guarantees cli",
    "engine doctor cli",
    "questions cli",
    "errors study planning running cli",
    "store sae baselines",
    "fitting sae cli",
    "edits sae",
    "tasks questions planning",
    "splits planning",
    "errors manifest costs predicting running",
    "fitting jobs lens_method baselines methods predicting running",
    "store jobs",
    "store variants baselines",
    "layout readers edits baselines",
    "report running",
    "runs places running",
    "models loading cli",
    "errors lm_eval_requests lm_eval_scoring lm_eval_model lm_eval_command cli",
    "prompts lm_eval_scoring",
    "engine readers lm_eval_scoring",
    "shards lm_eval_scoring",
    "token_budget lm_eval_scoring",
    "lens lm_eval_model",
    "models loading lm_eval_model",
    "metrics lm_eval_metrics lm_eval_command",
    "tasks lm_eval_metrics",
    "lm_eval_requests lm_eval_logs cli",
    "steering runs lm_eval_logs",
)
"""Along each line, a module may import those before it and never one after it."""
LEAVES = {"errors", "listing", "prefixes", "progress", "terms"}
"""Import nothing of ours."""
LIGHT = {"__init__", "cli", "errors", "records", "metrics", "stats", "tasks", "questions", "assets", "task_index",
         "task_data", "terms", "manifest", "splits", "steering", "prefixes", "prompts", "runs", "progress", "card", "hub",
         "conformal", "scratch", "listwise", "inputs", "tempering", "lm_eval_requests", "lm_eval_logs", "lm_eval_metrics",
         "lm_eval_command", "study", "planning", "listing"}  # fmt: skip
"""Import nothing heavy when they are imported themselves."""


def module_name(path: Path) -> str:
    """The file's name, or for a folder the folder's: its files are one module to the others."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def nodes_of(tree: ast.Module, *, top_level: bool) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file, without those for the type checker alone; `top_level`: that run on import."""
    found: list[ast.Import | ast.ImportFrom] = []

    def walk(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found.append(node)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                walk(node.orelse)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and top_level:
                continue
            else:
                for name in ("body", "orelse", "finalbody"):
                    walk(getattr(node, name, []))
                for handler in getattr(node, "handlers", []):
                    walk(handler.body)

    walk(tree.body)
    return found


def imported(path: Path, *, top_level: bool = False) -> set[str]:
    """Dotted names of everything that a file imports."""
    names: set[str] = set()
    for node in nodes_of(ast.parse(path.read_text("utf-8")), top_level=top_level):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: a relative import"
            names.add(str(node.module))
            if node.module == "coral_lens":
                names |= {f"coral_lens.{alias.name}" for alias in node.names}
    return names


def own(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("coral_lens.")}


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = sorted({module_name(path) for path in FILES} - {"__init__", "lm_eval_tasks"})
GRAPH = {
    module: set().union(*(own(imported(path)) for path in FILES if module_name(path) == module)) - {module}
    for module in MODULES
}


def reachable(module: str) -> set[str]:
    """Everything that a module imports, directly or through others."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        for other in GRAPH[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def test_there_is_no_circle() -> None:
    order = list(TopologicalSorter(GRAPH).static_order())
    assert sorted(order) == MODULES


@pytest.mark.parametrize("line", LINES)
def test_imports_point_backwards_along_the_line(line: str) -> None:
    modules = line.split()
    assert set(modules) <= set(MODULES)
    for i, module in enumerate(modules):
        assert not reachable(module) & set(modules[i + 1 :]), f"{module} imports what comes after it"


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_one_that_data_really_takes(line: str) -> None:
    modules = line.split()
    assert set(modules[:-1]) <= reachable(modules[-1])


@pytest.mark.parametrize("module", sorted(LEAVES))
def test_leaves_import_nothing_of_ours(module: str) -> None:
    assert GRAPH[module] == set()


def test_nothing_imports_the_command_line_and_only_it_imports_the_demo_and_the_doctor() -> None:
    importers = {name: {m for m, others in GRAPH.items() if name in others} for name in ("cli", "demo", "doctor")}
    assert importers == {"cli": set(), "demo": {"cli"}, "doctor": {"cli"}}


def test_metrics_and_reports_do_not_know_which_method_made_predictions() -> None:
    methods = {"lens", "fitting", "probes", "ridge", "mlp", "steering", "baselines", "splits", "engine", "store", "models",
               "listwise", "temperature", "kinds", "choosing", "samples", "shift", "tempering", "simulation", "conformal",
               "search", "jobs"}  # fmt: skip
    for module in ("metrics", "stats", "runs", "report"):
        assert not reachable(module) & methods


def test_fitting_cannot_reach_test_questions() -> None:
    assert not reachable("fitting") & {"evaluation", "runs", "tasks", "questions", "report"}


@pytest.mark.parametrize("path", [p for p in FILES if module_name(p) in LIGHT], ids=lambda p: p.stem)
def test_light_modules_import_nothing_heavy_at_the_top(path: Path) -> None:
    top = imported(path, top_level=True)
    assert not {name.split(".")[0] for name in top} & HEAVY
    assert own(top) <= LIGHT


def test_the_command_line_imports_nothing_of_ours_but_errors_at_the_top() -> None:
    for path in (PACKAGE / "cli").glob("*.py"):
        assert own(imported(path, top_level=True)) <= {"errors", "cli"}, path
    assert own(imported(PACKAGE / "__init__.py", top_level=True)) == set()


def test_every_public_name_is_where_the_package_says() -> None:
    assert sorted(coral_lens.__all__) == sorted(coral_lens._HOME_OF)
    for name in coral_lens.__all__:
        assert getattr(coral_lens, name).__module__ == f"coral_lens.{coral_lens._HOME_OF[name]}"
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = coral_lens.fitt
    assert dir(coral_lens) == sorted(coral_lens.__all__)
