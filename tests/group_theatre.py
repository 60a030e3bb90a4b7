"""A real Temporal around GroupWorkflow, with the ledger and the attempts played."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from domain.messages import (
    AttemptIn,
    AttemptRef,
    BeginGroup,
    CloseAttempt,
    FinishGroup,
    GroupIn,
    GroupOut,
    GroupVerdict,
    NextAttempt,
)
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
    refusing: bool = False
    """The ledger will not hear of how an attempt ended."""
    joined: bool = False
    """What is given up as lost has joined its group."""
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
        if self.refusing:
            raise ApplicationError("no such attempt", type="LEDGER", non_retryable=True)
        if self.joined:
            lost = {"sample": ending.sample, "attempt": ending.attempt}
            return NextAttempt(
                adopted=self.join(AttemptIn(run=ending.run, group=ending.group, **lost))
            )
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


async def come_too_late(theatre: Theatre, which: AttemptIn) -> AttemptRef:
    return AttemptRef(
        sample=which.sample,
        attempt=which.attempt,
        status="completed",
        member=False,
        surplus=True,
        reward=1.0,
    )


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


class Opened:
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


Open = Callable[[Theatre], Opened]
