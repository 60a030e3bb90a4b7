"""The services under a running run die, come back, lose their data, or answer nonsense."""

import asyncio
import contextlib
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from domain.ids import policy_name
from rollbook.stack.stack import Stack
from tests.chaos.stage import Stage
from tests.outage import Proxy

pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["temporal", "postgres", "seaweed"])
def test_a_server_that_is_killed_comes_back_and_the_run_goes_on(
    stage: Stage, stack: Stack, server: str
) -> None:
    stage.until_full_work()
    stage.kill_server(stack, server)
    stage.pause(0.02)
    stage.finish()
    stage.check()


def test_a_temporal_that_has_forgotten_everything_is_refilled_from_the_ledger(
    stage: Stage, stack: Stack
) -> None:
    stage.until_full_work()
    before = members(stage)
    stage.wipe_temporal(stack)
    stage.pause(0.02)
    stage.finish()
    stage.check()
    assert before <= members(stage)  # finished members are kept
    reopened = stage.value("SELECT count(*) FROM groups WHERE run_id = %s AND gen > 0", stage.run)
    assert reopened > 0


def members(stage: Stage) -> set[tuple[int, ...]]:
    rows = stage.query(
        "SELECT group_id, sample, attempt FROM attempts WHERE run_id = %s AND member", stage.run
    )
    return {tuple(row.values()) for row in rows}


@pytest.mark.slow
def test_commands_that_are_delivered_again_and_out_of_order_change_nothing(stage: Stage) -> None:
    stage.start_all()

    def again() -> bool:
        stage.query(
            "UPDATE outbox SET done_at = NULL, due_at = now() - random() * interval '1 min' "
            "WHERE run_id = %s AND done_at IS NOT NULL AND random() < 0.7 RETURNING id",
            stage.run,
        )
        return stage.found().state == "finished"

    stage.until(again, "the run is finished")
    stage.finish()
    stage.check()


# -- a store and an engine that misbehave on the wire


def corrupting(times: int) -> Callable[[bytes], bytes]:
    """Flips one bit of what looks like tensor data, so many times."""
    left = [None] * times

    def corrupt(content: bytes) -> bytes:
        if len(content) < 4096 or not left:
            return content
        left.pop()
        return content[:-1] + bytes([content[-1] ^ 1])

    return corrupt


def other_version(content: bytes) -> bytes:
    """Weights of another digest than those that were asked for."""
    head, found, rest = content.partition(b'"weights_sha256":"')
    return head + found + (b"f" if rest[:1] != b"f" else b"0") + rest[1:] if found else content


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "engine"])
@pytest.mark.parametrize("fault", ["cut", "refused", "corrupted", "reset", "slow"])
def test_the_store_misbehaves_for_a_while(stage: Stage, name: str, fault: str) -> None:
    address = urlsplit(stage.services.s3_endpoint)
    with Proxy(str(address.hostname), int(address.port or 80)) as proxy:
        stage.places[name] = stage.services.model_copy(
            update={"s3_endpoint": f"http://127.0.0.1:{proxy.port}"}
        )
        stage.until_full_work()
        with misbehaving(proxy, fault):
            stage.rest(4)
        stage.pause(0.02)
        stage.finish()
        stage.check()


@contextlib.contextmanager
def misbehaving(proxy: Proxy, fault: str):  # type: ignore[no-untyped-def]
    faults: dict[str, Callable[[], None]] = {
        "cut": proxy.cut,
        "refused": lambda: proxy.answer(
            b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        ),
        "corrupted": lambda: proxy.alter(corrupting(2)),
        "reset": lambda: proxy.reset_after(20_000),
        "slow": lambda: proxy.throttle(50_000),
    }
    faults[fault]()
    try:
        yield
    finally:
        proxy.mend()


@pytest.mark.slow
def test_an_engine_that_comes_back_with_other_weights_under_the_name_is_never_believed(
    stage: Stage,
) -> None:
    served = (
        "SELECT bool_or(version >= 1 AND state = 'served') FROM policy_versions WHERE run_id = %s"
    )
    stage.until_full_work()
    stage.until(lambda: stage.value(served, stage.run), "version 1 is served")
    stage.stop("ledger")  # which would load the right ones first
    stage.kill("engine")
    wrong, right = stage.query(
        "SELECT version, weights_key, encode(weights_sha256, 'hex') AS sha256 FROM policy_versions "
        "WHERE run_id = %s AND state IN ('served', 'draining', 'retired') ORDER BY version",
        stage.run,
    )[-2:]
    name = policy_name(stage.run, right["version"])
    asyncio.run(load(stage, name, wrong["weights_key"], wrong["sha256"]))
    stage.start("ledger")
    told = f"policy '{name}' stands for weights {wrong['sha256']} in this engine"
    stage.until(lambda: told in stage.log("ledger").read_text(), "the ledger worker has told")
    stage.kill("engine")  # what a person does, as it was told
    stage.pause(0.02)
    stage.finish()
    stage.check(failures="WrongVersion")


async def load(stage: Stage, policy: str, manifest: str, sha256: str) -> None:
    url = stage.services.engines[0]
    async with httpx.AsyncClient(timeout=60) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                body = {"policy": policy, "manifest": manifest, "sha256": sha256, "crossing": None}
                answer = await client.post(f"{url}/rollbook/load", json=body)
                assert answer.status_code == 200, answer.text
                return
            await asyncio.sleep(0.1)


@pytest.mark.slow
def test_an_engine_that_answers_with_other_weights_is_never_believed(stage: Stage) -> None:
    url = urlsplit(stage.services.engines[0])
    with Proxy(str(url.hostname), int(url.port or 80)) as proxy:
        told = stage.services.model_copy(update={"engines": (f"http://127.0.0.1:{proxy.port}",)})
        stage.places |= dict.fromkeys(("ledger", "rollouts"), told)
        stage.until_full_work()
        proxy.alter(other_version)
        failures = "SELECT count(*) AS n FROM attempts WHERE run_id = %s AND counts_as_failure"
        stage.until(lambda: stage.value(failures, stage.run), "somebody noticed")
        proxy.mend()
        stage.pause(0.02)
        stage.finish()
        stage.check(failures="WrongVersion")
