"""The gateway as the process that `rollbook gateway` is, killed at the worst moments."""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from activities.access import key_sha256, session_path
from activities.chat import Chat
from domain.services import Services
from rollbook.stack import ports
from storage import manifests, segments, sessions
from storage.objects import ObjectStore
from tests.gateways import Script
from tests.scripted import printable
from tests.stub_engine import StubEngine

Make = Callable[..., Any]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stored_run(
    sampled_run: Make, s3_services: Services, ledger_url: str, tmp_path: Path
) -> tuple[Any, Chat, Services]:
    """A run whose tokenizer lies in the object store."""
    chat = printable(tmp_path / "model")
    ObjectStore(s3_services).prepare()
    files = {
        path.name: path.read_bytes()
        for path in (tmp_path / "model").iterdir()
        if path.suffix != ".safetensors"
    }
    digest = hashlib.sha256(b"".join(files.values())).hexdigest()
    stored = manifests.upload(
        ObjectStore(s3_services), f"models/{digest}", files, kind="model", sha256=digest
    )
    b = sampled_run()
    b.sql(
        "UPDATE runs SET config = jsonb_set(config, '{world}', %s::jsonb) WHERE run_id = %s",
        json.dumps({"model_manifest": stored.manifest_key}),
        b.run,
    )
    return b, chat, s3_services.model_copy(update={"database_url": ledger_url})


@asynccontextmanager
async def process(
    services: Services, port: int, state: Path, **variables: str
) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """A gateway process that answers; killed at the end."""
    gateway = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "rollbook", "gateway", "--port", f"{port}", "--state", f"{state}"],
        cwd=ROOT,
        env=os.environ | services.environment() | variables,
    )
    try:
        async with httpx.AsyncClient() as http, asyncio.timeout(60):
            while True:
                try:
                    await http.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.HTTPError:
                    assert gateway.poll() is None
                    await asyncio.sleep(0.1)
        yield gateway
    finally:
        gateway.kill()
        gateway.wait()


@pytest.mark.parametrize("at", ["segment_sampled", "segment_done"])
async def test_a_program_goes_on_over_a_gateway_that_was_killed(
    stored_run: tuple[Any, Chat, Services], engine: StubEngine, tmp_path: Path, at: str
) -> None:
    b, chat, services = stored_run
    engine.say = Script(chat, ["one", "two", "three"])
    # A request that the killed process had asked is asked with the same seed: the same answer.
    said: dict[int, list[int]] = {}
    script = engine.say
    engine.say = lambda body: said.setdefault(body["sampling_params"]["seed"], script(body))
    group = b.group()
    i, started, key, port = b.key(group, 0), b.start(group, 0), token_hex(8), ports.choose(0)
    b.ledger.call(sessions.issue, i, started.fence, key_sha256(key))
    url = f"http://127.0.0.1:{port}{session_path(i)}"
    history: list[Any] = [{"role": "user", "content": "go"}]

    async def program() -> None:
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=20) as client:
            for turn in range(3):
                answer = await client.chat.completions.create(model="m", messages=history)
                history.append(answer.choices[0].message)
                history.append({"role": "user", "content": f"and {turn}"})

    async with process(services, port, tmp_path, FAILPOINT=f"{at}:2") as first:
        running = asyncio.create_task(program())
        assert await asyncio.to_thread(first.wait, 30) == 137
    async with process(services, port, tmp_path) as second:
        async with asyncio.timeout(60):
            await running
        second.terminate()
        assert await asyncio.to_thread(second.wait, 30) == 0
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    texts = [chat.text([int(token) for token in segment.sampled_ids]) for segment in read]
    assert [message.content for message in history[1::2]] == texts
    assert len(read) == 3
    for before, after in pairwise(read):
        kept = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(kept)] == kept
    assert {p.chain for p in b.ledger.call(segments.places, b.run, group, 0, 0)} == {0}


async def test_the_gateway_knows_neither_torch_nor_temporal() -> None:
    code = (
        "import sys, rollbook.gateway;"
        "print(sorted({'torch', 'transformers', 'temporalio'} & set(sys.modules)))"
    )
    out = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert out.stdout.decode().strip() == "[]"
