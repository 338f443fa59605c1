"""The rules of the house: imports point down, the core is pure, SQL is in the store."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT

PACKAGE = ROOT / "freight"
# From the ground up; each may import from itself and what is below it.
ROOMS = ("core", "store", "client", "engines", "launchers", "worker", "control", "api", "cli")
IMPURE = {"asyncio", "os", "pathlib", "random", "socket", "subprocess", "tempfile", "threading", "time", "uuid"}
MOST_LINES = 500
MOST_FUNCTION_LINES = 70

MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yield the names of the modules that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for path in (PACKAGE / room).rglob("*.py"):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("freight.")} & set(ROOMS)
        assert used <= allowed, f"{path} imports from {used - allowed}"


def test_the_core_neither_acts_nor_reads_a_clock_or_settings() -> None:
    for path in (PACKAGE / "core").glob("*.py"):
        used = {name.split(".")[0] for name in imports(path)}
        assert not used & IMPURE, f"{path} imports {used & IMPURE}"
        assert "freight.config" not in set(imports(path))


def test_sql_is_in_the_store_alone() -> None:
    statement = re.compile(r"\b(SELECT .* FROM|INSERT INTO|UPDATE \w+ SET|DELETE FROM)\b")
    for path in MODULES:
        if path.parent.name != "store":
            assert not statement.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= MOST_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MOST_FUNCTION_LINES, node.name
