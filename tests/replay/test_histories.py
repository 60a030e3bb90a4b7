"""Workflows that were started by older code can be continued by this code.

tests/histories holds one history per path of a workflow, recorded on a real server by
`RECORD_HISTORIES=1 pytest tests/integration -k 'group_workflow or steward'`. Record again only when a
path is new: an old history that no longer replays means that running groups would break.
"""

import ast
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner
from temporalio.workflow import NondeterminismError

from activities.payloads import MESSAGES
from domain.messages import GroupIn, GroupOut
from workflows.group import GroupWorkflow
from workflows.publish import PublishWorkflow

HISTORIES = sorted((Path(__file__).parents[1] / "histories").glob("*.json"))
WORKFLOWS = [GroupWorkflow, PublishWorkflow]
MODULES = ("workflows.group", "workflows.endings", "workflows.details", "workflows.publish")


def read(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json(path.stem, path.read_text(encoding="utf-8"))


@workflow.defn(name="GroupWorkflow", sandboxed=False)
class Changed(GroupWorkflow):
    """A timer that the recorded groups never had."""

    @workflow.init
    def __init__(self, group: GroupIn) -> None:
        super().__init__(group)

    @workflow.run
    async def run(self, group: GroupIn) -> GroupOut:
        await workflow.sleep(1)
        return await super().run(group)


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_recorded_history_replays(path: Path) -> None:
    replayer = Replayer(workflows=WORKFLOWS, data_converter=MESSAGES)
    await replayer.replay_workflow(read(path))


UNRECORDED = {
    "return GroupState(": "a query leaves no event",
    "return _lost(type(error).__name__, str(error))": "a kind of failure that Temporal has not yet",
    "self._end(False, len(live))": "thousands of events, as Temporal suggests a new history",
    "workflow.continue_as_new(publish)": "thousands of events, as Temporal suggests a new history",
}
"""Statements of the workflows that no history passes, and why."""


async def test_every_path_has_a_history() -> None:
    passed: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_globals.get("__name__") not in MODULES:
            return None
        if event == "line":
            passed.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    threading.settrace(trace)  # workflows run in threads that the replayer starts
    try:
        for path in HISTORIES:
            replayer = Replayer(
                workflows=WORKFLOWS,
                data_converter=MESSAGES,
                workflow_runner=UnsandboxedWorkflowRunner(),
            )
            await replayer.replay_workflow(read(path))
    finally:
        threading.settrace(None)
    unpassed = {
        text
        for name in MODULES
        for file, line, text in statements(sys.modules[name])
        if (file, line) not in passed
    }
    assert unpassed <= set(UNRECORDED)


def statements(module: ModuleType) -> Iterator[tuple[str, int, str]]:
    """The file, the line and the text of each statement within the functions of a module."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if (
                isinstance(node, ast.stmt)
                and node is not function
                and not isinstance(node, ast.Try | ast.FunctionDef)
                and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            ):
                yield module.__file__, node.lineno, lines[node.lineno - 1].strip()


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_histories_hold_references_and_no_tokens(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(json.dumps(json.loads(text)["events"])) < 64 * 1024
    for word in ("sampled_ids", "logprobs", "prompt_ids", "messages"):
        assert word not in text


async def test_a_breaking_change_is_caught() -> None:
    complete = next(path for path in HISTORIES if path.stem == "complete")
    replayer = Replayer(workflows=[Changed], data_converter=MESSAGES)
    with pytest.raises(NondeterminismError):
        await replayer.replay_workflow(read(complete))
