"""reverse3: three digits and `=`, the reversed digits as answer. A policy learns it from nothing.

744 of the 1,000 prompts are trained on; the other 256 are held out to measure what was learned.

    rollbook run examples/reverse3.toml
"""

from random import Random

from rollbook import PromptSource, Task

_ORDER = Random("reverse3").sample(range(1000), 1000)
HELD_OUT = 256


def reward(text: str, task: Task) -> float:
    """Share of the positions that are right; half of it if the length is wrong."""
    answer = str(task.data["answer"])
    right = sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)
    return right if len(text) == len(answer) else right / 2


def train() -> list[Task]:
    """The 744 prompts to learn from."""
    return [_task(number) for number in sorted(_ORDER[HELD_OUT:])]


def held_out() -> list[Task]:
    """The 256 prompts that are never trained."""
    return [_task(number) for number in sorted(_ORDER[:HELD_OUT])]


def _task(number: int) -> Task:
    digits = f"{number:03d}"
    return Task(digits, {"prompt": f"{digits}=", "answer": digits[::-1]})


source = PromptSource(reward)
