"""GroupWorkflow on a real Temporal server; the ledger and the rollouts are played by the test.

The actors keep the ledger's promises (idempotent steps, members up to `size`, numbered attempts), so
that each path of the workflow is driven exactly. `RECORD_HISTORIES=1` keeps each path's history for
tests/replay.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import psycopg
import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.worker import Worker

from activities import namespace
from activities.payloads import MESSAGES
from domain.messages import (
    AttemptFailure,
    AttemptIn,
    AttemptRef,
    BeginGroup,
    CancelSample,
    Close,
    CloseAttempt,
    FinishGroup,
    GroupIn,
    GroupOut,
    GroupVerdict,
    NextAttempt,
)
from tests.recording import keep
from workflows.group import GroupWorkflow

T = TypeVar("T")
Play = Callable[["Theatre", AttemptIn], Awaitable[AttemptRef]]
Handle = WorkflowHandle[GroupWorkflow, GroupOut]


@dataclass
class Theatre:
    """Plays the ledger and the rollout workers for one group."""

    size: int
    kept: int = 0
    spares: int = 0
    max_attempts: int = 3
    script: dict[tuple[int, int], Play] = field(default_factory=dict)
    owned: bool = False
    members: set[int] = field(default_factory=set)
    started: list[tuple[int, int]] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)
    closed: list[CloseAttempt] = field(default_factory=list)
    finished: list[FinishGroup] = field(default_factory=list)
    part0: int = 0
    before_finish: Callable[[], Awaitable[None]] | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @activity.defn
    async def begin_group(self, claim: BeginGroup) -> None:
        if self.owned:
            raise ApplicationError("taken", type="ALREADY_OWNED", non_retryable=True)

    @activity.defn
    async def run_attempt(self, which: AttemptIn) -> AttemptRef:
        key = (which.sample, which.attempt)
        await self.note(self.started, key)
        return await self.script.get(key, complete)(self, which)

    @activity.defn
    async def close_attempt(self, ending: CloseAttempt) -> NextAttempt:
        self.closed.append(ending)
        failures = [c for c in self.closed if c.sample == ending.sample and not c.lost]
        if sum(c.cause != "stale" for c in failures) >= self.max_attempts:
            return NextAttempt(close="abandoned", cause="max_attempts")
        if self.spares:
            self.spares -= 1
            return NextAttempt(give_up=True)
        return NextAttempt(next_attempt=ending.attempt + 1)

    @activity.defn
    async def read_attempt(self, which: AttemptIn) -> AttemptRef:
        return self.join(which)

    @activity.defn
    async def finish_group(self, ending: FinishGroup) -> GroupVerdict:
        if self.before_finish is not None:
            await self.before_finish()
        await self.note(self.finished, ending)
        settled = self.finished[0] if ending.part == 0 else ending  # a repetition loses
        return GroupVerdict(
            state=settled.outcome,
            applied=settled is ending,
            members=self.kept + len(self.members),
        )

    def join(self, which: AttemptIn) -> AttemptRef:
        fits = self.kept + len(self.members) < self.size
        if fits:
            self.members.add(which.sample)
        return AttemptRef(
            sample=which.sample,
            attempt=which.attempt,
            status="completed",
            member=fits,
            surplus=not fits,
            reward=1.0,
        )

    async def note(self, log: list[T], item: T) -> None:
        async with self.changed:
            log.append(item)
            self.changed.notify_all()

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(happened)

    async def until_started(self, *keys: tuple[int, int]) -> None:
        await self.until(lambda: set(keys) <= set(self.started))


async def complete(theatre: Theatre, which: AttemptIn) -> AttemptRef:
    return theatre.join(which)


async def run_until_cancelled(theatre: Theatre, which: AttemptIn) -> AttemptRef:
    try:
        while True:
            activity.heartbeat()
            await asyncio.sleep(0.05)
    finally:
        await theatre.note(theatre.stopped, (which.sample, which.attempt))


async def clean_up_slowly(theatre: Theatre, which: AttemptIn) -> AttemptRef:
    try:
        return await run_until_cancelled(theatre, which)
    except asyncio.CancelledError:
        await asyncio.sleep(1.0)
        await theatre.note(theatre.stopped, (which.sample, 100 + which.attempt))
        raise


async def fall_silent(theatre: Theatre, which: AttemptIn) -> AttemptRef:
    await asyncio.sleep(30)
    raise AssertionError("unreachable")


def fail(kind: str, *, retryable: bool = False) -> Play:
    async def play(theatre: Theatre, which: AttemptIn) -> AttemptRef:
        raise ApplicationError("it broke", type=kind, non_retryable=not retryable)

    return play


async def unscored(theatre: Theatre, which: AttemptIn) -> AttemptRef:
    return AttemptRef(
        sample=which.sample,
        attempt=which.attempt,
        status="truncated",
        member=False,
        resubmit="unscored",
        cause="tokens",
    )


@pytest.fixture(scope="session")
async def client(temporal_address: str) -> AsyncIterator[Client]:
    client = await Client.connect(temporal_address, namespace="rollbook", data_converter=MESSAGES)
    await namespace.ensure(client)
    yield client
    await asyncio.sleep(0.5)  # temporalio 1.35 may crash an interpreter that exits sooner


@dataclass
class House:
    """Workers for one theatre, on queues of their own."""

    client: Client
    theatre: Theatre
    name: str

    async def start(self, **settings: object) -> Handle:
        oversample = settings.pop("oversample", 0)
        assert isinstance(oversample, int)
        theatre = self.theatre
        group = GroupIn(
            run="r1",
            group=8841,
            gen=0,
            batch=12,
            task="8841",
            environment=self.name,
            size=theatre.size,
            samples=tuple((s, 0) for s in range(theatre.size - theatre.kept + oversample)),
            kept=theatre.kept,
            resumes=0,
            **settings,  # type: ignore[arg-type]
        )
        return await self.client.start_workflow(
            GroupWorkflow.run,
            group,
            id=f"run/{self.name}/b000012/g8841~0",
            task_queue=self.name,
            static_summary=f"r1 · batch 12 · task 8841 · {theatre.size}+{oversample}",
        )


@pytest.fixture
def house(client: Client) -> Callable[[Theatre], "_Open"]:
    return lambda theatre: _Open(client, theatre)


class _Open:
    def __init__(self, client: Client, theatre: Theatre) -> None:
        self.house = House(client, theatre, f"t{uuid.uuid4().hex[:12]}")
        steps: list[Callable[..., Awaitable[object]]] = [
            theatre.begin_group,
            theatre.close_attempt,
            theatre.read_attempt,
            theatre.finish_group,
        ]
        throttle = timedelta(milliseconds=100)
        self.workers = [
            Worker(
                client,
                task_queue=self.house.name,
                workflows=[GroupWorkflow],
                activities=steps,
            ),
            Worker(
                client,
                task_queue=f"rollout-{self.house.name}",
                activities=[theatre.run_attempt],
                max_heartbeat_throttle_interval=throttle,
                default_heartbeat_throttle_interval=throttle,
            ),
        ]

    async def __aenter__(self) -> House:
        await asyncio.gather(*(worker.__aenter__() for worker in self.workers))
        return self.house

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(worker.__aexit__(None, None, None) for worker in self.workers))


Open = Callable[[Theatre], _Open]


async def test_a_group_of_eight_completes(house: Open) -> None:
    theatre = Theatre(size=8)
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert out == GroupOut(state="complete", members=8)
        assert [(f.outcome, f.part) for f in theatre.finished] == [("complete", 0)]
        await keep(handle, "complete")
        described = await handle.describe()
        assert described.typed_search_attributes[namespace.STAGE] == "complete"


async def test_spares_that_are_not_needed_are_cancelled_as_surplus(house: Open) -> None:
    theatre = Theatre(size=8, script={(s, 0): run_until_cancelled for s in (3, 9)})
    async with house(theatre) as run:
        handle = await run.start(oversample=2)
        out = await handle.result()
        assert (out.state, out.members) == ("complete", 8)
        assert sorted(theatre.stopped) == [(3, 0), (9, 0)]
        assert theatre.closed == []
        await keep(handle, "oversample")


async def test_a_failure_is_resubmitted_under_the_number_the_ledger_gives(house: Open) -> None:
    theatre = Theatre(size=2, script={(1, 0): fail(AttemptFailure.INFRA_ERROR), (1, 1): unscored})
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert out.resubmitted == {"infra_error": 1, "unscored": 1}
        assert [(c.attempt, c.cause, c.status, c.lost) for c in theatre.closed] == [
            (0, "infra_error", "infra_error", False),
            (1, "unscored", "truncated", False),
        ]
        attributes = (await handle.describe()).typed_search_attributes
        assert attributes[namespace.RESUBMISSIONS] == 2
        assert list(attributes[namespace.CAUSES]) == ["infra_error", "unscored"]
        await keep(handle, "resubmitted")


async def test_a_failed_sample_that_a_spare_replaces_is_given_up(house: Open) -> None:
    theatre = Theatre(size=2, spares=1, script={(0, 0): fail(AttemptFailure.CANCELLED)})
    async with house(theatre) as run:
        out = await (await run.start(oversample=1)).result()
        assert (out.state, out.members, out.resubmitted) == ("complete", 2, {})


async def test_a_sample_that_keeps_failing_abandons_the_group(house: Open) -> None:
    script: dict[tuple[int, int], Play] = {(0, n): fail(AttemptFailure.INFRA_ERROR) for n in (0, 1)}
    theatre = Theatre(size=2, max_attempts=2, script={**script, (1, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert (out.state, out.cause) == ("abandoned", "max_attempts")
        assert theatre.stopped == [(1, 0)]
        await keep(handle, "abandoned")


async def test_a_stale_signal_replaces_one_attempt_and_repeats_change_nothing(house: Open) -> None:
    theatre = Theatre(size=2, script={(0, 0): run_until_cancelled, (1, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        for _ in range(3):
            await handle.signal(
                GroupWorkflow.cancel_sample, CancelSample(sample=0, attempt=0, cause="stale")
            )
        await theatre.until_started((0, 1))
        await handle.signal(  # late: that attempt has been replaced
            GroupWorkflow.cancel_sample, CancelSample(sample=0, attempt=0, cause="stale")
        )
        await handle.signal(
            GroupWorkflow.cancel_sample, CancelSample(sample=1, attempt=0, cause="resident_limit")
        )
        out = await handle.result()
        assert out.resubmitted == {"stale": 1, "cancelled": 1}
        assert sorted(theatre.started) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        await keep(handle, "stale")


async def test_a_timeout_counts_from_submission_and_is_resubmitted(house: Open) -> None:
    theatre = Theatre(size=1, script={(0, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start(timeout_s=1.0)
        out = await handle.result()
        assert out.resubmitted == {"timeout": 1}
        assert [(c.cause, c.status, c.lost) for c in theatre.closed] == [
            ("timeout", "cancelled", False)
        ]
        await keep(handle, "timeout")


async def test_a_silent_worker_is_a_loss(house: Open) -> None:
    theatre = Theatre(size=1, script={(0, 0): fall_silent})
    async with house(theatre) as run:
        handle = await run.start(heartbeat_s=1.0)
        out = await handle.result()
        assert out.members == 1
        assert [(c.cause, c.status, c.lost) for c in theatre.closed] == [
            ("infra_error", "infra_error", True)
        ]
        await keep(handle, "lost")


@pytest.mark.parametrize("kind", [AttemptFailure.LOST, AttemptFailure.WORKER_SHUTDOWN])
async def test_what_the_platform_took_is_no_failure(house: Open, kind: str) -> None:
    theatre = Theatre(size=1, max_attempts=1, script={(0, 0): fail(kind, retryable=True)})
    async with house(theatre) as run:
        out = await (await run.start()).result()
        assert (out.state, out.resubmitted) == ("complete", {"infra_error": 1})
        assert theatre.closed[0].lost


async def test_a_fenced_attempt_adopts_the_result_of_its_owner(house: Open) -> None:
    theatre = Theatre(size=1, script={(0, 0): fail(AttemptFailure.FENCED)})
    async with house(theatre) as run:
        out = await (await run.start()).result()
        assert (out.state, out.members, theatre.closed) == ("complete", 1, [])


async def test_a_broken_source_ends_the_group_with_its_message(house: Open) -> None:
    script = {(0, 0): fail(AttemptFailure.SOURCE_BROKEN), (1, 0): run_until_cancelled}
    theatre = Theatre(size=2, script=script)
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert out.cause == "it broke"
        assert [(f.outcome, f.cause) for f in theatre.finished] == [("source_broken", "it broke")]
        assert theatre.stopped == [(1, 0)]
        await keep(handle, "source_broken")


async def test_a_close_signal_stops_all_and_the_first_cause_counts(house: Open) -> None:
    theatre = Theatre(size=3, script={(s, 0): run_until_cancelled for s in range(3)})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0), (2, 0))
        for cause in ("close", "surplus", "close"):
            await handle.signal(GroupWorkflow.close_group, Close(cause=cause))
        out = await handle.result()
        assert (out.state, out.cause) == ("cancelled", "close")
        assert sorted(theatre.stopped) == [(0, 0), (1, 0), (2, 0)]
        assert len(theatre.finished) == 1
        await keep(handle, "closed")


async def test_a_native_cancel_drains_and_still_finishes(house: Open) -> None:
    theatre = Theatre(size=2, script={(s, 0): run_until_cancelled for s in range(2)})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as failure:
            await handle.result()
        assert isinstance(failure.value.cause, CancelledError)
        assert [(f.outcome, f.cause) for f in theatre.finished] == [("cancelled", "human")]
        assert sorted(theatre.stopped) == [(0, 0), (1, 0)]
        await keep(handle, "cancelled")


async def test_a_second_cancel_during_the_drain_does_not_cut_it_short(house: Open) -> None:
    theatre = Theatre(size=2, script={(s, 0): clean_up_slowly for s in range(2)})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        await theatre.until(lambda: len(theatre.stopped) == 2)
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert len(theatre.finished) == 1
        assert (0, 100) in theatre.stopped
        assert (1, 100) in theatre.stopped
        await keep(handle, "cancel_in_drain")


async def test_a_cancel_while_the_ledger_settles_the_group_does_not_undo_it(house: Open) -> None:
    """The server refuses to complete a workflow that has news, so the local step may run again."""
    theatre = Theatre(size=1)
    async with house(theatre) as run:

        async def cancel_meanwhile() -> None:
            await handle.cancel()
            await asyncio.sleep(1.0)

        theatre.before_finish = cancel_meanwhile
        theatre.script[0, 0] = run_until_cancelled
        handle = await run.start()
        await theatre.until_started((0, 0))
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert theatre.finished[0].cause == "close"
        assert theatre.stopped == [(0, 0)]
        await keep(handle, "cancel_in_finish")


async def test_a_cancel_before_the_first_task_still_finishes(client: Client, house: Open) -> None:
    theatre = Theatre(size=2)
    opening = house(theatre)
    handle = await opening.house.start()
    await handle.cancel()
    async with opening:
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert [f.outcome for f in theatre.finished] == ["cancelled"]
    assert theatre.started == []


async def test_at_the_deadline_finished_members_train_and_the_tails_go_on(house: Open) -> None:
    release = asyncio.Event()

    async def tail(theatre: Theatre, which: AttemptIn) -> AttemptRef:
        while not release.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.05)
        return theatre.join(which)

    theatre = Theatre(size=4, script={(2, 0): tail, (3, 0): tail})
    async with house(theatre) as run:
        handle = await run.start(completion="deadline", min_members=2, on_stragglers="carry_over")
        await theatre.until_started((2, 0), (3, 0))
        for _ in range(2):
            await handle.signal(GroupWorkflow.deadline_reached)
        await theatre.until(lambda: bool(theatre.finished))
        release.set()
        out = await handle.result()
        assert [(f.outcome, f.part) for f in theatre.finished] == [("complete", 0), ("complete", 1)]
        assert (out.state, out.members) == ("complete", 4)
        await keep(handle, "carry_over")


async def test_a_deadline_signal_alone_does_not_end_a_group_that_truncates(house: Open) -> None:
    theatre = Theatre(size=2)
    async with house(theatre) as run:

        async def signalled(theatre: Theatre, which: AttemptIn) -> AttemptRef:
            await handle.signal(GroupWorkflow.deadline_reached)
            return theatre.join(which)

        theatre.script[1, 0] = signalled
        handle = await run.start(completion="deadline", min_members=1, on_stragglers="truncate")
        out = await handle.result()
        assert (out.members, len(theatre.finished)) == (2, 1)


async def test_a_lost_workflow_of_tails_finishes_as_part_one(house: Open) -> None:
    theatre = Theatre(size=2, kept=1)
    async with house(theatre) as run:
        handle = await run.start(on_stragglers="carry_over", part0_admitted=True)
        await handle.signal(GroupWorkflow.deadline_reached)
        await handle.result()
        assert [f.part for f in theatre.finished] == [1]


async def test_kept_members_count_and_only_the_missing_sample_runs(house: Open) -> None:
    theatre = Theatre(size=4, kept=3)
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert (out.members, theatre.started) == (4, [(0, 0)])
        await keep(handle, "reopened")


async def test_while_the_ledger_is_away_groups_wait_and_still_hear_signals(house: Open) -> None:
    theatre = Theatre(size=1)
    back = asyncio.Event()

    async def away() -> None:
        if not back.is_set():
            raise psycopg.OperationalError("the server closed the connection unexpectedly")

    theatre.before_finish = away
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0))
        async with asyncio.timeout(30):
            while (await handle.query(GroupWorkflow.state)).live:
                pass  # each query is a round trip
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        back.set()
        out = await handle.result()
        # The step is delivered at least once; the first to arrive settles the group.
        assert (out.state, theatre.finished[0].outcome) == ("complete", "complete")


async def test_a_claimed_generation_is_refused(house: Open) -> None:
    theatre = Theatre(size=1, owned=True)
    async with house(theatre) as run:
        with pytest.raises(WorkflowFailureError):
            await (await run.start()).result()
        assert theatre.started == []
        assert theatre.finished == []


async def test_people_see_each_sample_and_the_sweep_sees_what_is_live(house: Open) -> None:
    theatre = Theatre(size=2, script={(1, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        async with asyncio.timeout(20):
            while (state := await handle.query(GroupWorkflow.state)).members < 1:
                pass  # each query is a round trip
        assert [(a.sample, a.attempt) for a in state.live] == [(1, 0)]
        details = await handle.query("__temporal_workflow_metadata")
        assert "| 0 | 0 | completed, reward 1 | " in str(details)
        described = await handle.describe()
        assert described.raw_description.pending_activities[0].activity_id == "s1.a0"
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        await handle.result()
