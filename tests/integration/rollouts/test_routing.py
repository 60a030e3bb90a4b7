"""Which engine the router chooses: a holder of the version, awake, idle, and the one before."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from activities.routing import FRESH_S, REST_S, STICKINESS, Router
from domain.errors import EngineBusy, EngineUnavailable

Make = Callable[..., Any]


def fleet(b: Any, **held: tuple[int, ...]) -> None:
    for url, versions in held.items():
        b.sql(
            """INSERT INTO engines(run_id, engine_id, incarnation, max_resident, alive_until)
            VALUES (%s, %s, 1, 4, now() + interval '1 hour')""",
            b.run,
            url,
        )
        for version in versions:
            b.sql(
                """INSERT INTO engine_versions(run_id, engine_id, version, incarnation,
                weights_sha256) VALUES (%s, %s, %s, 1, %s)""",
                b.run,
                url,
                version,
                bytes(32),
            )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_only_live_holders_of_the_version_are_chosen(make: Make) -> None:
    b = make()
    b.serve(1)
    fleet(b, one=(0,), two=(0, 1), three=(1,))
    b.sql("UPDATE engines SET alive_until = now() WHERE run_id = %s AND engine_id = 'three'", b.run)
    router = Router(b.ledger)
    for _ in range(5):
        async with router.engine(b.run, 1) as url:
            assert url == "two"
    assert await router.resident(b.run) == [1, 0]
    with pytest.raises(EngineUnavailable, match=rf"no live engine holds {b.run}@7"):
        async with router.engine(b.run, 7):
            pass


async def test_a_version_that_one_engine_still_loads_holds_no_request_up(make: Make) -> None:
    b = make()
    b.sql(
        """INSERT INTO policy_versions(run_id, version, weights_sha256, weights_key, state,
        trainer_epoch) VALUES (%s, 1, %s, 'w', 'loading', 1)""",
        b.run,
        bytes(32),
    )
    fleet(b, loads=(0,), holds=(0, 1))
    router = Router(b.ledger)
    seen = set()
    for _ in range(20):
        async with asyncio.timeout(5), router.engine(b.run, 0) as url:
            seen.add(url)
    assert seen == {"loads", "holds"}
    assert b.start(b.group(), 0).version == 0  # an attempt pins what is served, and begins


async def test_requests_spread_over_the_idlest(make: Make) -> None:
    b = make()
    fleet(b, one=(0,), two=(0,), three=(0,))
    router = Router(b.ledger)
    chosen: list[str] = []
    release = asyncio.Event()

    async def request() -> None:
        async with router.engine(b.run, 0) as url:
            chosen.append(url)
            await release.wait()

    requests = [asyncio.create_task(request()) for _ in range(12)]
    while len(chosen) < 12:  # noqa: ASYNC110
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*requests)
    assert sorted(chosen) == ["one"] * 4 + ["three"] * 4 + ["two"] * 4


async def test_an_attempt_stays_where_its_cache_is_until_that_is_too_busy(make: Make) -> None:
    b = make()
    fleet(b, one=(0,), two=(0,))
    router = Router(b.ledger)
    held = []
    for _ in range(STICKINESS + 1):
        lease = router.engine(b.run, 0, prefer="one")
        assert await lease.__aenter__() == "one"
        held.append(lease)
    async with router.engine(b.run, 0, prefer="one") as url:
        assert url == "two"
    for lease in held:
        await lease.__aexit__(None, None, None)


async def test_a_failing_engine_rests_longer_each_time_and_is_asked_when_alone(make: Make) -> None:
    b = make()
    fleet(b, one=(0,), two=(0,))
    clock = Clock()
    router = Router(b.ledger, clock=clock)

    async def fail(prefer: str) -> str:
        with pytest.raises(EngineUnavailable):
            async with router.engine(b.run, 0, prefer=prefer) as url:
                raise EngineUnavailable("down")
        return url

    async def chosen() -> str:
        async with router.engine(b.run, 0, prefer="one") as url:
            return url

    assert await fail("one") == "one"
    assert await chosen() == "two"
    clock.now += 0.6
    assert await chosen() == "one"
    assert [await fail("one"), await fail("two")] == ["one", "two"]
    assert await chosen() == "one"  # both rest; this one wakes first
    clock.now += 20
    assert await chosen() == "one"


async def test_a_full_engine_rests_and_no_longer_each_time(make: Make) -> None:
    b = make()
    fleet(b, one=(0,), two=(0,))
    clock = Clock()
    router = Router(b.ledger, clock=clock)
    chosen = []

    async def ask(*, full: bool) -> None:
        async with router.engine(b.run, 0, prefer="one") as url:
            chosen.append(url)
            if full:
                raise EngineBusy("full")

    for _ in range(5):
        with pytest.raises(EngineBusy):
            await ask(full=True)
        await ask(full=False)
        clock.now += REST_S + 0.1
    assert chosen == ["one", "two"] * 5


async def test_the_ledger_is_asked_at_most_once_a_second(make: Make) -> None:
    b = make()
    clock = Clock()
    router = Router(b.ledger, clock=clock)
    assert await router.resident(b.run) == []
    fleet(b, one=(0,))
    assert await router.resident(b.run) == []
    clock.now += FRESH_S + 0.1
    assert await router.resident(b.run) == [0]
    assert await router.weights_sha256(b.run, 0) == "00" * 32
