"""The tree shows the architecture: imports point backwards along one line, and what every command needs stays light."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import coral_lens

PACKAGE = Path(coral_lens.__file__).parent
ROOT = PACKAGE.parents[1]
ORDER = ("leaves", "storage", "data", "metrics", "engine", "lens", "report", "sae", "methods", "analysis", "study",
         "scale", "harness", "audit", "serve", "cli")  # fmt: skip
"""Each package may import only from those before it."""
LEAVES = {"errors", "records", "ragged"}
"""What anyone may import."""
NEVER = {"metrics": {"data"}, "report": {"data", "engine", "lens"}}
"""What a package may not import although it comes before: metrics and reports do not know which method made predictions."""
HEAVY = {"torch", "transformers", "lm_eval", "datasets", "sklearn", "scipy", "matplotlib", "accelerate"}
LIGHT = {"errors", "records", "ragged", "storage.files", "storage.arrays", "storage.bundles", "storage.escape",
         "storage.lines", "storage.outputs", "storage.parts", "storage.places", "storage.progress", "storage.remote",
         "storage.settings", "storage.temporary", "data",
         "metrics", "engine.trees",
         "engine.prompts", "engine.settings", "lens.settings", "lens.rules", "lens.publish", "lens.features",
         "lens.tempering", "lens.trace", "report.names", "report.runs", "methods.entry", "sae.settings", "analysis.settings",
         "study.config", "study.plan", "study.reproduce.settings", "harness.requests", "harness.logs", "harness.metrics",
         "harness.data", "harness.wrapping", "harness.command", "audit.settings", "scale.settings", "serve.settings", "cli",
         ""}  # fmt: skip
"""Import nothing heavy when they are imported themselves; of a package's name: every file of it."""
ENTRIES = 21
"""So many at most in `ls src/coral_lens`."""

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Every module by its dotted name inside the package; the package itself is the empty name."""


def imports_in(path: Path, *, top_level: bool = False) -> list[tuple[str, tuple[str, ...]]]:
    """Module and names of every import, those in functions and for the type checker too; `top_level`: that run on import."""

    def nodes(body: list[ast.stmt]) -> list[ast.stmt]:
        kept: list[ast.stmt] = []
        for node in body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                kept += nodes(node.orelse)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            else:
                kept.append(node)
                for name in ("body", "orelse", "finalbody"):
                    kept += nodes(getattr(node, name, []))
                for handler in getattr(node, "handlers", []):
                    kept += nodes(handler.body)
        return kept

    tree = ast.parse(path.read_text("utf-8"))
    imports: list[tuple[str, tuple[str, ...]]] = []
    for node in nodes(tree.body) if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            imports.append((str(node.module), tuple(alias.name for alias in node.names)))
    return imports


@cache
def modules_imported(module: str, *, top_level: bool = False) -> frozenset[str]:
    """Our own modules that a module imports; `from package import module` counts as the module."""
    found: set[str] = set()
    for name, names in imports_in(FILES[module], top_level=top_level):
        if name.split(".")[0] != "coral_lens":
            continue
        own = name.removeprefix("coral_lens").lstrip(".")
        inner = {f"{own}.{n}".lstrip(".") for n in names}
        found |= (inner & set(FILES)) or {own}
        if inner - set(FILES) and own in FILES:
            found.add(own)
    return frozenset(found - {module})


def package_of(module: str) -> str:
    first = module.split(".")[0]
    if first == "__main__":  # runs the command line
        return "cli"
    return "leaves" if first in LEAVES else first


@pytest.mark.parametrize("module", [m for m in FILES if m])
def test_imports_point_backwards_along_the_order_of_packages(module: str) -> None:
    home = package_of(module)
    assert home in ORDER, f"{module} is in no package of the order"
    allowed = set(ORDER[: ORDER.index(home) + 1]) - NEVER.get(home, set())
    for other in modules_imported(module):
        # the public names of the package are for users: our own modules name the real home
        assert other, f"{module} imports coral_lens itself"
        assert package_of(other) in allowed, f"{module} imports {other}, which comes after {home}"


@pytest.mark.parametrize("module", [m for m in FILES if m])
def test_a_private_module_is_imported_inside_its_package_only(module: str) -> None:
    for other in modules_imported(module):
        *package, last = other.split(".")
        if last.startswith("_"):
            assert module.split(".")[: len(package)] == package, f"{module} imports {other}"


def test_there_is_no_circle() -> None:
    graph = {m: {other for other in modules_imported(m, top_level=True) if other} for m in FILES if m}
    # a package's docstring imports nothing, so it is no part of a circle
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_a_listing_of_the_package_is_short() -> None:
    entries = [p.name for p in PACKAGE.iterdir() if p.name not in ("__pycache__",)]
    assert len(entries) <= ENTRIES, sorted(entries)


def is_light(module: str) -> bool:
    return (
        any(module == light or (light and module.startswith(f"{light}.")) for light in LIGHT)
        and module != "cli.printing"
    )


@pytest.mark.parametrize("module", [m for m in FILES if is_light(m) and "lm_eval_tasks" not in m])
def test_light_modules_import_nothing_heavy_at_the_top(module: str) -> None:
    names = {name.split(".")[0] for name, _ in imports_in(FILES[module], top_level=True)}
    assert not names & HEAVY
    for other in modules_imported(module, top_level=True):
        assert is_light(other), f"{module} imports {other}, which is heavy"


def test_fitting_cannot_reach_test_questions() -> None:
    seen, todo = set[str](), ["lens.fit"]
    while todo:
        new = modules_imported(todo.pop()) - seen
        seen |= new
        todo += new
    assert not {m for m in seen if package_of(m) in ("report", "study", "methods")}
    assert not seen & {"data.tasks", "data.questions"}


def test_every_public_name_is_where_the_package_says() -> None:
    assert sorted(coral_lens.__all__) == sorted(coral_lens._HOME_OF)
    for name in coral_lens.__all__:
        assert getattr(coral_lens, name).__module__ == f"coral_lens.{coral_lens._HOME_OF[name]}"
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = coral_lens.fitt
    assert dir(coral_lens) == sorted(coral_lens.__all__)


# ------------------------------------------------------------------------------------------------------------- tests

TESTS = ROOT / "tests"
ACROSS = {"end_to_end", "faults"}
"""Folders of tests that cross the packages."""


@pytest.mark.parametrize(
    "path",
    [p.relative_to(TESTS).as_posix() for p in sorted(TESTS.glob("*/test_*.py")) if p.parent.name not in ACROSS],
)
def test_every_test_file_is_named_after_the_module_that_it_tests(path: str) -> None:
    package, name = path.split("/")
    tested = name.removeprefix("test_").removesuffix(".py")
    modules = {
        m.removeprefix(f"{package}.").replace(".", "_").lstrip("_") for m in FILES if m.startswith(f"{package}.")
    }
    assert any(re.fullmatch(rf"{re.escape(m)}(_\w+)?", tested) for m in modules), f"no module of {package} is called so"
