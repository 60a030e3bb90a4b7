"""Data sets of reasoning-gym: procedural problems, each scored by its own data set.

A task holds the question and the arguments that make its row again, since scoring looks at values
(tuples, sets) that JSON would change. An answer is what stands in the last `<answer>` tag, or the
whole reply where there is none.
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from domain.environments import PromptSource
from domain.errors import ConfigError
from domain.rollouts import Task

Args = Mapping[str, Any]
SYSTEM_PROMPT = "system_prompt"
"""The one argument that is not the data set's: text, or the name of one of reasoning-gym's own."""


def source(name: str, args: Args, *, root: Path, key: str) -> PromptSource:
    """One turn, scored by the data set that made the problem; its score is the reward.

    Raises:
        ConfigError: no such data set, or arguments that it refuses.
    """
    _open(name, args, key)
    return PromptSource(_reward)


def tasks(name: str, args: Args, *, root: Path, key: str) -> Sequence[Task]:
    """All rows of a data set; `args.size` says how many.

    Raises:
        ConfigError: as `source`.
    """
    data = _open(name, args, key)
    head = [{"role": "system", "content": text}] if (text := _system_prompt(args, key)) else []
    made = _canonical(args)
    return [
        Task(
            str(row),
            {
                "prompt": [*head, {"role": "user", "content": data[row]["question"]}],
                "answer": data[row]["answer"],
                "dataset": name,
                "args": made,
                "row": row,
            },
        )
        for row in range(len(data))
    ]


def _reward(text: str, task: Task) -> float:
    from reasoning_gym.utils import extract_answer

    data = _dataset(task.data["dataset"], task.data["args"])
    answer = extract_answer(text)
    reply = text.strip() if answer is None else answer
    return float(data.score_answer(reply, data[task.data["row"]]))


def _open(name: str, args: Args, key: str) -> Any:
    """The data set.

    Raises:
        ConfigError: names the argument or the data set, and what there is.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} = 'reasoning_gym:{name}' needs a package that is not installed ({error.name}); "
            "pip install reasoning-gym"
        ) from error
    if name not in DATASETS:
        near = ", ".join(get_close_matches(name, DATASETS)) or "none like it"
        raise ConfigError(f"{key}: reasoning-gym has no data set {name!r}; it has {near}")
    try:
        return _dataset(name, _canonical(args))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: reasoning-gym's {name} refuses {dict(args)}: {error}") from error


def _canonical(args: Args) -> str:
    """The data set's own arguments, as text that a task can carry and a cache can be keyed by."""
    own = {word: value for word, value in args.items() if word != SYSTEM_PROMPT}
    return json.dumps(own, sort_keys=True)


@lru_cache(maxsize=32)
def _dataset(name: str, args: str) -> Any:
    from reasoning_gym import create_dataset

    # Without a seed of its own a data set would draw one, and rows would differ between processes.
    return create_dataset(name, **({"seed": 0} | json.loads(args)))


def _system_prompt(args: Args, key: str) -> str | None:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    text = args.get(SYSTEM_PROMPT)
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{key}: args.{SYSTEM_PROMPT} = {text!r} must be text")
    return None if text is None else SYSTEM_PROMPTS.get(text, text)
