"""An environment of the verifiers package: sums, asked for by a program that checks its answer once."""

import sys

import verifiers.v1 as vf

__all__ = ["AgentHarness", "SumsTaskset"]

PROGRAM = """
import sys
from openai import OpenAI

url, key, prompt = sys.argv[1:]
client = OpenAI(base_url=url, api_key=key, max_retries=0)
messages = [{"role": "user", "content": prompt}]
for turn in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages)
    text = answer.choices[0].message.content or ""
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
if "give up" in text:
    sys.exit(3)
"""


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 4)


class SumsConfig(vf.TasksetConfig):
    rows: int = 3


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for n in range(self.config.rows):
            yield SumsTask(SumsData(prompt=f"{n}+1=", answer=str(n + 1)), self.config.task)


class AgentHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        return await runtime.run([sys.executable, "-c", PROGRAM, endpoint, secret, data.prompt], {})
