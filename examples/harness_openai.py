"""A program as agent: the command, its verifier and its tasks. The program is openai_agent.py."""

import sys
from pathlib import Path

from rollbook import HarnessSource, RolloutView, Task

AGENT = Path(__file__).resolve().with_name("openai_agent.py")


def verify(rollout: RolloutView, task: Task) -> float:
    """The share of positions that are right, judged by the file that the agent left."""
    assert rollout.folder is not None
    answer = Path(rollout.folder) / "answer.txt"
    if not answer.exists():
        return 0.0
    given, wanted = answer.read_text(), str(task.data["digits"])[::-1]
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return right / max(len(given), len(wanted))


source = HarnessSource([sys.executable, str(AGENT), "{digits}"], verify)

train = [{"id": f"{number:03d}", "digits": f"{number:03d}"} for number in range(0, 1000, 4)]
held_out = [{"id": f"{number:03d}", "digits": f"{number:03d}"} for number in range(1, 1000, 40)]
