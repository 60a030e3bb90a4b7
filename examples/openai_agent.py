"""An agent program: it speaks the OpenAI API, and knows nothing of rollbook.

It asks for the digits it is given, reversed, and once more if the answer is of the wrong length. Any
program that reads OPENAI_BASE_URL and OPENAI_API_KEY could stand in its place; with the openai package
`ask` would be one line.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path


def ask(messages: list[dict[str, str]]) -> str:
    """One chat completion."""
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


def main(digits: str) -> None:
    """Leave the answer in a file."""
    question = {"role": "user", "content": f"{digits}="}
    answer = ask([question])
    if len(answer) != len(digits):
        answer = ask([question, {"role": "assistant", "content": answer}, question])
    Path("answer.txt").write_text(answer)


if __name__ == "__main__":
    main(sys.argv[1])
