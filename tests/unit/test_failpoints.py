"""Every listed failpoint stands in the code, and some test kills a process there."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from domain import failpoints
from rollbook.root import ROOT

PRODUCT = ("domain", "storage", "activities", "trainer", "engine", "workflows", "rollbook")
KILLED_AT = ROOT / "tests" / "chaos" / "test_killed_processes.py"


def trees(*folders: str) -> Iterator[ast.Module]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(file.read_text())


def reached() -> set[str]:
    """The names that the code calls `reach` with."""
    return {
        str(name.value)
        for tree in trees(*PRODUCT)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "failpoints.reach"
        for name in ast.walk(call)
        if isinstance(name, ast.Constant)
    }


def test_what_is_listed_is_what_the_code_reaches() -> None:
    assert reached() == set(failpoints.ALL)


def test_a_process_is_killed_at_each() -> None:
    """The chaos tests name each point they crash at, or take all of a kind."""
    text = KILLED_AT.read_text()
    strings = {
        str(node.value).partition(":")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant)
    }
    wholes = {
        point
        for kind in ("ROLLOUT_POINTS", "ENGINE_POINTS")
        if f"[*{kind}]" in text or f"in {kind}:" in text
        for point in getattr(failpoints, kind)
    }
    assert strings | wholes >= set(failpoints.ALL)


@pytest.mark.parametrize("setting", ["", "plan_done"])
def test_nothing_dies_unless_the_environment_names_the_point(setting: str) -> None:
    program = "from domain import failpoints; [failpoints.reach(n) for n in failpoints.ALL]"
    died = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "FAILPOINT": setting},
        check=False,
    )
    assert died.returncode == (137 if setting else 0)
