"""What the recording gateway adds to a call: many sessions at once, against the engine asked directly.

    python -m bench.gateway [--sessions 200] [--calls 10] [--think 2.0]

A stub engine in a process of its own answers each request after `think` seconds. Every session makes
its calls one after the other, each on the history of the last; sessions begin spread over `think`
seconds, so that calls come evenly and not in volleys. First they ask the engine itself, with
the ids that the gateway would send; then the gateway, in a process of its own over a real Postgres,
through the OpenAI API. Both times this process is the client. The overhead is the difference of the
same quantile. Every answer of the gateway is checked against the ledger at the end.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from activities.access import key_sha256, session_path
from activities.chat import Chat
from activities.connections import Connections
from domain.config import RunConfig
from domain.messages import AttemptIn
from rollbook.stack import ports
from rollbook.stack.postgres import Postgres
from rollbook.stack.supervise import Supervisor
from storage import attempts, runs, sessions
from storage.database import Ledger, upgrade
from tests.scripted import ALPHABET, printable

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 64

GATEWAY = """
import asyncio, sys
from pathlib import Path
from activities.chat import Chat
from activities.gateway import Gateway
from activities.inference import EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.sessions import LedgerBook, Sessions
from rollbook import collector
from rollbook.gateway import make_server
from storage import runs
from storage.database import Ledger

url, run, folder, port = sys.argv[1:]
ledger = Ledger.open(url)
config = ledger.call(runs.read, run).config
chat = Chat.open(Path(folder))

class Format:
    async def get(self, run):
        return config, chat

async def main():
    sampler = Sampler(ledger, EngineClient(), Router(ledger))
    collector.spare()
    gateway = Gateway(Sessions(LedgerBook(sampler, Format())))
    await make_server(gateway, host="127.0.0.1", port=int(port)).serve()

asyncio.run(main())
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--think", type=float, default=2.0)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-gateway-")))
        folder.chmod(0o711)
        chat = printable(folder / "model")
        ledger = stack.enter_context(_ledger(folder))
        engine = f"http://127.0.0.1:{ports.choose(0)}"
        port = ports.choose(0, [int(engine.rpartition(":")[2])])
        stub = [str(ROOT / "tests" / "stub_engine.py"), engine, str(options.think)]
        stack.enter_context(_process(stub, engine + "/health"))
        run, keys = _sessions(ledger, engine, options.sessions)
        gateway = f"http://127.0.0.1:{port}"
        argv = ["-c", GATEWAY, ledger_url(folder), run, str(folder / "model"), str(port)]
        process = stack.enter_context(_process(argv, gateway + "/health"))
        spread = options.think / options.sessions
        direct = asyncio.run(_direct(engine, run, chat, options.sessions, options.calls, spread))
        used = _cpu_s(process)
        through = asyncio.run(_through(gateway, run, keys, options.calls, spread))
        used = _cpu_s(process) - used
        _check(ledger, run, options.sessions * options.calls)
        calls = options.sessions * options.calls
        rows = {
            name: [float(np.quantile(values, q)) * 1e3 for q in (0.5, 0.9, 0.99)]
            for name, values in (("direct", direct), ("gateway", through))
        }
        rows["overhead"] = [b - a for a, b in zip(rows["direct"], rows["gateway"], strict=True)]
        print(
            f"{options.sessions} sessions, {options.calls} calls each, engine {options.think} s, "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; milliseconds a call"
        )
        print(f"{'':10}{'p50':>9}{'p90':>9}{'p99':>9}")
        for name, values in rows.items():
            print(f"{name:10}" + "".join(f"{value:9.1f}" for value in values))
        print(f"gateway CPU: {used / calls * 1e3:.1f} ms a call")


_URLS: dict[Path, str] = {}


def ledger_url(folder: Path) -> str:
    """Of the ledger in a folder."""
    return _URLS[folder]


@contextmanager
def _ledger(folder: Path) -> Iterator[Ledger]:
    state = folder / "state"
    state.mkdir(mode=0o711)
    server = Postgres(state=state, port=ports.free_port(), password=secrets.token_hex(8))
    server.prepare()
    with Supervisor(state / "pids") as supervisor:
        supervisor.start(server.command())
        supervisor.wait_ready("postgres")
        _URLS[folder] = server.url()
        upgrade(server.url())
        ledger = Ledger.open(server.url(), pool=2)
        try:
            yield ledger
        finally:
            ledger.close()


@contextmanager
def _process(argv: Sequence[str], health: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        give_up = time.monotonic() + 60
        while True:
            try:
                httpx.get(health, trust_env=False)
                break
            except httpx.HTTPError:
                if time.monotonic() > give_up or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _sessions(ledger: Ledger, engine: str, count: int) -> tuple[str, list[str]]:
    """A run whose version 0 the engine holds, with so many running attempts and their keys."""
    config = RunConfig.parse(
        {
            "name": "bench",
            "steps": 1,
            "tasks": {"source": "s:s", "dataset": "d:d", "batch_size": 1},
            "groups": {"size": count},
            "model": {"tiny": {"alphabet": ALPHABET}},
            "budget": {"max_turns": 1_000, "max_generated_tokens": 10**6},
            "trainer": {"width": 100_000},
        }
    )
    ledger.call(runs.create, config, world={})
    empty = bytes(32)
    with ledger.transaction() as tx:
        for query, values in (
            (
                "INSERT INTO policy_versions(run_id, version, weights_sha256, weights_key, state, "
                "trainer_epoch, served_at) VALUES ('bench', 0, %s, 'w', 'served', 1, now())",
                (empty,),
            ),
            (
                "INSERT INTO engines(run_id, engine_id, incarnation, max_resident, alive_until) "
                "VALUES ('bench', %s, 1, 4, now() + interval '1 day')",
                (engine,),
            ),
            (
                "INSERT INTO engine_versions(run_id, engine_id, version, incarnation, weights_sha256) "
                "VALUES ('bench', %s, 0, 1, %s)",
                (engine, empty),
            ),
            (
                "INSERT INTO task_batches(run_id, batch, share, tasks, groups, data_position, "
                "content_sha256) VALUES ('bench', 0, 0, 1, 1, '{}', %s)",
                (empty,),
            ),
            (
                "INSERT INTO groups(run_id, group_id, batch, share, pos, task_id, task) "
                "VALUES ('bench', 0, 0, 0, 0, 't', '{}')",
                (),
            ),
            (
                "UPDATE groups SET state = 'submitted', workflow_id = 'w', submitted_at = now(), "
                "submitted_version = 0 WHERE run_id = 'bench'",
                (),
            ),
            (
                "INSERT INTO attempts(run_id, group_id, sample, attempt, gen, submitted_version) "
                "SELECT 'bench', 0, s, 0, 0, 0 FROM generate_series(0, %s) AS s",
                (count - 1,),
            ),
        ):
            tx.execute(query, values)
    keys = []
    for sample in range(count):
        i = AttemptIn(run="bench", group=0, sample=sample, attempt=0)
        started = ledger.call(attempts.start, i, worker="bench")
        keys.append(secrets.token_urlsafe(16))
        ledger.call(sessions.issue, i, started.fence, key_sha256(keys[-1]))
    return "bench", keys


def _question(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"question {number}: " + "please go on " * 20}


async def _direct(
    engine: str, run: str, chat: Chat, count: int, calls: int, spread: float
) -> list[float]:
    http = Connections(2 * count, connect_s=5.0)

    async def session(sample: int) -> list[float]:
        await asyncio.sleep(sample * spread)
        times = []
        context = chat.prompt([_question(0)])
        for number in range(calls):
            body = {
                "model": f"{run}@0",
                "token_ids": context,
                "request_id": f"{sample}.{number}",
                "sampling_params": {"max_tokens": TOKENS, "stop_token_ids": []},
            }
            began = time.perf_counter()
            answer = await http.send(
                "POST",
                engine + "/inference/v1/generate",
                content=json.dumps(body).encode(),
                timeout_s=60,
            )
            ids = json.loads(answer.content)["choices"][0]["token_ids"]
            times.append(time.perf_counter() - began)
            context = chat.continuation(context, ids, [_question(number + 1)])
        return times

    return await _all(http, [session(sample) for sample in range(count)])


async def _through(
    gateway: str, run: str, keys: Sequence[str], calls: int, spread: float
) -> list[float]:
    http = Connections(2 * len(keys), connect_s=5.0)

    async def session(sample: int, key: str) -> list[float]:
        i = AttemptIn(run=run, group=0, sample=sample, attempt=0)
        url = gateway + session_path(i) + "/chat/completions"
        headers = {"Authorization": f"Bearer {key}"}
        await asyncio.sleep(sample * spread)
        times, said = [], [_question(0)]
        for number in range(calls):
            body = {"model": "m", "messages": said, "max_tokens": TOKENS}
            began = time.perf_counter()
            answer = await http.send(
                "POST", url, content=json.dumps(body).encode(), headers=headers, timeout_s=60
            )
            message = json.loads(answer.content)["choices"][0]["message"]
            times.append(time.perf_counter() - began)
            said += [message, _question(number + 1)]
        return times

    return await _all(http, [session(sample, key) for sample, key in enumerate(keys)])


async def _all(http: Connections, running: Sequence[Any]) -> list[float]:
    try:
        return [value for times in await asyncio.gather(*running) for value in times]
    finally:
        await http.aclose()


def _cpu_s(process: "subprocess.Popen[bytes]") -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def _check(ledger: Ledger, run: str, calls: int) -> None:
    """Everything was recorded, on one chain a session."""
    with ledger.transaction() as tx:
        row = tx.execute(
            """SELECT count(*) AS segments, sum(tokens) AS tokens, max(chain) AS chain
            FROM segments WHERE run_id = %s""",
            (run,),
        ).fetchone()
    assert row == {"segments": calls, "tokens": calls * TOKENS, "chain": 0}, row


if __name__ == "__main__":
    main()
