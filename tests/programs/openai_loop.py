"""An agent in one loop over the openai client: two tools, and the answer in a file."""

import json
import os
from pathlib import Path
from typing import Any

from openai import OpenAI

TASK = json.loads(Path(os.environ["ROLLBOOK_TASK_FILE"]).read_text())["data"]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
    for name in ("add", "multiply")
]


def main() -> None:
    client = OpenAI()  # the base URL and the key come from the environment
    messages: list[Any] = [{"role": "user", "content": f"task {TASK['n']}"}]
    while True:
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            Path("answer.txt").write_text(message.content or "")
            return
        for call in message.tool_calls:
            assert call.type == "function"
            given = json.loads(call.function.arguments)
            value = given["a"] + given["b"]
            if call.function.name == "multiply":
                value = given["a"] * given["b"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{value}"})


if __name__ == "__main__":
    main()
    Path("environment.json").write_text(json.dumps(dict(os.environ)))
