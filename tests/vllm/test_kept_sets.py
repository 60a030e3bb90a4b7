"""Kept sets as vLLM writes them. Its CPU build computes none, but has the code that answers."""

import json
import os
import subprocess

from activities.answers import SamplingParams, generated
from domain.services import vllm_python
from engine.vllm.control import WHOLE_VOCABULARY

ANSWER = f"""
import logging
from vllm import SamplingParams
from vllm.entrypoints.scale_out.token_in_token_out.protocol import *

SamplingParams(temperature=1.0, top_k={WHOLE_VOCABULARY})
SamplingParams(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
content = [GenerateLogProbsContent(token_id=i, logprob=-1.0, top_logprobs=[]) for i in (3, 4)]
choice = GenerateTokensChoice(
    index=0, finish_reason="length", token_ids=[3, 4],
    logprobs=GenerateLogProbs(content=content), sampling_mask=[[3, 5, 9], [8, 4]],
)
print("ANSWER" + choice.model_dump_json())
"""


def test_the_kept_sets_of_vllms_own_answer_are_read() -> None:
    python = vllm_python(os.environ)
    assert python is not None
    said = subprocess.run([python, "-c", ANSWER], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("ANSWER")]
    choice = json.loads(line.removeprefix("ANSWER"))
    asked = SamplingParams(max_tokens=2, seed=0, top_k=2)
    found = generated("http://e", "r@4", asked, None, {"choices": [choice]})
    assert found.support == ((3, 5, 9), (8, 4))
