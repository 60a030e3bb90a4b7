"""Workflow code is deterministic: it runs unsandboxed, so this is checked on the source instead.

The replay tests catch what this cannot see.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "workflows").glob("*.py"))

MODULES = {"asyncio", "collections", "dataclasses", "datetime", "temporalio", "typing"}
"""May be imported as they are; rollbook's own packages only beside `imports_passed_through`."""

OURS = {"activities", "domain", "workflows"}

CALLS = {
    "now", "today", "utcnow", "time", "monotonic", "perf_counter", "sleep", "random", "uuid4",
    "open", "getenv", "as_completed", "wait", "to_thread", "run_in_executor", "urandom", "set",
    "frozenset",
}  # fmt: skip
"""Clocks, chance, I/O, threads, and collections without an order."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_workflow_code_imports_nothing_that_acts(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        else:
            continue
        for name in names:
            assert name.split(".")[0] in MODULES | OURS, f"{path.name}:{node.lineno} {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_workflow_code_asks_temporal_for_time_and_chance(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Set | ast.SetComp):
            assert path.name in ("endings.py", "options.py"), f"{path.name}:{node.lineno} a set"
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = function.value
            if isinstance(owner, ast.Name) and owner.id == "workflow":
                continue  # workflow.now() is the replayed clock
            assert function.attr not in CALLS, f"{path.name}:{node.lineno} {function.attr}"
        elif isinstance(function, ast.Name):
            assert function.id not in CALLS, f"{path.name}:{node.lineno} {function.id}"
