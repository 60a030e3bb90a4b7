"""A program as agent: it speaks the OpenAI API, and knows nothing of rollbook.

Run as a script, this file is the agent: it asks for the digits of the task reversed, one answer, and
once more with a hint if that was wrong. Imported, it is the source: the command, its verifier and its
tasks. Any other program that reads OPENAI_BASE_URL and OPENAI_API_KEY could stand in the command.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from domain.environments import HarnessSource, RolloutView
from domain.rollouts import Task


def ask(messages: list[dict[str, Any]]) -> str:
    """One chat completion; `openai.OpenAI().chat.completions.create` does the same."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "max_tokens": 8}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        body = json.load(answer)
    return str(body["choices"][0]["message"]["content"])


def agent(digits: str) -> None:
    """Ask, check the form of the answer, and ask once more if it has none."""
    messages = [{"role": "user", "content": f"{digits}="}]
    answer = ask(messages)
    if len(answer) != len(digits):
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"{digits}="},
        ]
        answer = ask(messages)
    Path("answer.txt").write_text(answer)


def verify(rollout: RolloutView, task: Task) -> float:
    """The share of positions that are right, judged by the file that the agent left."""
    assert rollout.folder is not None
    given = (Path(rollout.folder) / "answer.txt").read_text()
    wanted = str(task.data["digits"])[::-1]
    right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return right / max(len(given), len(wanted))


source = HarnessSource([sys.executable, str(Path(__file__).resolve()), "{digits}"], verify)

train = [{"id": f"{number:03d}", "digits": f"{number:03d}"} for number in range(0, 1000, 4)]

if __name__ == "__main__":
    agent(sys.argv[1])
