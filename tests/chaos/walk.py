"""The run that is killed: three-turn rollouts whose tool can be slow, or never answer."""

import json
from pathlib import Path
from typing import Any

from domain.config import RunConfig

SOURCE = '''
"""Three turns with pauses between them, judged by what was said: rewards differ within a group."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from rollbook import Env

PAUSE = Path(__file__).with_name("pause")
HANG = Path(__file__).with_name("hang")


class Walk(Env):
    def __init__(self, recovery):
        self.recovery = recovery

    async def reset(self, task):
        return [{"role": "user", "content": task.data["prompt"]}]

    async def on_turn(self, rollout):
        await asyncio.sleep(float(PAUSE.read_text()))  # the tool that a worker dies in
        with suppress(FileNotFoundError):  # one rollout finds it, its siblings do not
            HANG.rename(HANG.with_name("hung"))
            await asyncio.sleep(600)
        return None if rollout.turns == 3 else [{"role": "user", "content": f"{rollout.turns}="}]

    async def snapshot(self, rollout):
        return rollout.turns

    async def restore(self, rollout, state):
        assert state == rollout.turns, (state, rollout.turns)

    async def reward(self, rollout, task):
        said = "".join(m["content"] for m in rollout.messages if m["role"] == "assistant")
        return sum(map(int, filter(str.isdigit, said))) % 10 / 9

    async def on_truncated(self, rollout, task, cause):
        return await self.reward(rollout, task)


snapshot, stateless, drop = Walk("snapshot"), Walk("stateless"), Walk("drop")
'''


def configuration(name: str, folder: Path, **sections: Any) -> RunConfig:
    """A small run of three-turn rollouts, its source and data written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "walk.py").write_text(SOURCE)
    pause(folder, 0.02)
    rows = [json.dumps({"id": f"t{i}", "prompt": f"{7 * i % 1000:03d}="}) for i in range(60)]
    (folder / "tasks.jsonl").write_text("\n".join(rows))
    table: dict[str, Any] = {
        "name": name,
        "steps": 5,
        "root": str(folder),
        "tasks": {"source": "walk:snapshot", "dataset": "tasks.jsonl", "batch_size": 2},
        "groups": {"size": 3, "timeout": 90.0, "heartbeat": 2.0},
        "schedule": {"order": "dataset", "stale_policy": "resubmit", "max_lag": 3, "ahead": 1},
        "model": {"tiny": {"dim": 16, "layers": 1, "heads": 2, "max_positions": 48}},
        "budget": {"max_turns": 4, "max_generated_tokens": 12, "segment_tokens": 2},
        "trainer": {
            "width": 48,
            "rows": 4,
            "estimator": "mean",
            "truncation": "score",
            "lr": 1e-2,
            "threads": 1,
        },
        "checkpoint": {"every": 2, "keep": 100},
    }
    for key, value in sections.items():
        table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
    return RunConfig.parse(table)


def pause(folder: Path, seconds: float) -> None:
    """How long each turn's tool takes, from now on."""
    draft = folder / "pause.tmp"
    draft.write_text(str(seconds))
    draft.replace(folder / "pause")
