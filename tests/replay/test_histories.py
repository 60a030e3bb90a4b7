"""Workflows that were started by older code can be continued by this code.

tests/histories holds one history per path of a workflow, recorded on a real server by
`RECORD_HISTORIES=1 pytest tests/integration -k 'group_workflow or steward'`. Record again only when a
path is new: an old history that no longer replays means that running groups would break.
"""

import json
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from activities.payloads import MESSAGES
from domain.messages import GroupIn, GroupOut
from workflows.group import GroupWorkflow
from workflows.publish import PublishWorkflow

HISTORIES = sorted((Path(__file__).parents[1] / "histories").glob("*.json"))
WORKFLOWS = [GroupWorkflow, PublishWorkflow]


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


def test_every_path_has_a_history() -> None:
    assert {path.stem for path in HISTORIES} >= {
        "abandoned",
        "cancel_in_drain",
        "cancel_in_finish",
        "cancelled",
        "carry_over",
        "closed",
        "complete",
        "lost",
        "oversample",
        "publish",
        "publish_refused",
        "publish_slow_and_refusing",
        "reopened",
        "resubmitted",
        "source_broken",
        "stale",
        "timeout",
    }


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
