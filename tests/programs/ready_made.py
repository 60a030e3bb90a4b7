"""The Agents SDK as it comes, streamed: an agent with a tool against the gateway."""

import asyncio
import os
from pathlib import Path

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> str:
    set_tracing_disabled(True)
    client = AsyncOpenAI()
    model = OpenAIChatCompletionsModel(os.environ["ROLLBOOK_MODEL"], openai_client=client)
    agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model=model)
    result = Runner.run_streamed(agent, "What is 2 + 3?")
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


if __name__ == "__main__":
    Path("answer.txt").write_text(asyncio.run(main()))
