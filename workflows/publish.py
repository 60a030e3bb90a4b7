"""Publish one version: every live engine loads and acknowledges it, then it is served.

One activity per engine process, so a slow or dead engine holds up nobody's load. A dead engine stops
counting when its health has not been seen for some seconds. A slow one stops counting once it takes
far longer than the first that was ready; it goes on loading and serves older versions meanwhile.
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.publish import EngineActivities, ServingActivities
    from domain.messages import (
        EngineRef,
        PublishIn,
        PublishOut,
        PublishRefused,
        Serve,
    )
    from workflows import options

POLL_MIN, POLL_MAX = timedelta(milliseconds=500), timedelta(seconds=10)
"""Between two looks for engines that came, went or were mended by someone else."""


@dataclass
class Load:
    """One engine process on its way to the version."""

    task: "asyncio.Task[None]"
    refusal: str | None = None


@workflow.defn
class PublishWorkflow:
    """See the module."""

    @workflow.init
    def __init__(self, publish: PublishIn) -> None:
        """Nothing is loading yet."""
        self.publish = publish
        self.began = workflow.now()
        self.first_ready: datetime | None = None
        self.loads: dict[tuple[str, int], Load] = {}
        self.acknowledged = 0
        self.changes = 0  # loads that ended

    @workflow.run
    async def run(self, publish: PublishIn) -> PublishOut:
        """Return once the version is served, or once every engine has refused it."""
        pause = POLL_MIN
        while True:
            seen = self.changes
            live = await self._engines()
            served = await workflow.execute_local_activity_method(
                ServingActivities.mark_served, self._serve(live), **options.LEDGER_STEP
            )
            refusal = None if served else self._refused_by_all(live)
            if refusal is not None:
                await self._fail_run(refusal)
            if served or refusal is not None:
                return self._end(served, len(live))
            if workflow.info().is_continue_as_new_suggested():
                self._end(False, len(live))
                workflow.continue_as_new(publish)
            pause = await self._wait_for_change(seen, pause)

    async def _engines(self) -> list[EngineRef]:
        """The live engines; those that are new begin to load."""
        answer = await workflow.execute_local_activity_method(
            ServingActivities.live_engines, self.publish, **options.LEDGER_STEP
        )
        for engine in answer.engines:
            key = (engine.engine, engine.incarnation)
            if key not in self.loads:
                self.loads[key] = Load(task=asyncio.create_task(self._load(engine)))
        return list(answer.engines)

    async def _load(self, engine: EngineRef) -> None:
        try:
            await workflow.execute_activity_method(
                EngineActivities.load_version,
                engine,
                **options.load_options(engine),
            )
        except ActivityError as failure:
            if is_cancelled_exception(failure):
                raise
            self.loads[engine.engine, engine.incarnation].refusal = str(failure.cause)
        else:
            self.acknowledged += 1
            self.first_ready = self.first_ready or workflow.now()
        finally:
            self.changes += 1

    def _serve(self, live: list[EngineRef]) -> Serve:
        """Ask without the engines that refused, and without the slow once one has been ready."""
        late = self.first_ready is not None and workflow.now() > (
            self.first_ready
            + 2 * (self.first_ready - self.began)
            + timedelta(seconds=self.publish.patience_s)
        )
        loads = [(engine.engine, self.loads[engine.engine, engine.incarnation]) for engine in live]
        return Serve(
            run=self.publish.run,
            version=self.publish.version,
            without=tuple(
                url for url, load in loads if load.refusal or (late and not load.task.done())
            ),
        )

    def _refused_by_all(self, live: list[EngineRef]) -> str | None:
        said = [self.loads[engine.engine, engine.incarnation].refusal for engine in live]
        return "; ".join(filter(None, said)) if said and all(said) else None

    async def _fail_run(self, reason: str) -> None:
        refused = PublishRefused(
            run=self.publish.run, version=self.publish.version, reason=reason[:2_000]
        )
        await workflow.execute_local_activity_method(
            ServingActivities.publish_refused, refused, **options.LEDGER_STEP
        )

    async def _wait_for_change(self, seen: int, pause: timedelta) -> timedelta:
        """Until a load ended, or the pause is over; the next pause."""
        try:
            await workflow.wait_condition(lambda: self.changes > seen, timeout=pause)
        except TimeoutError:
            return min(2 * pause, POLL_MAX)
        return POLL_MIN

    def _end(self, served: bool, engines: int) -> PublishOut:
        for load in self.loads.values():
            load.task.cancel()
        return PublishOut(
            version=self.publish.version,
            served=served,
            acknowledged=self.acknowledged,
            engines=engines,
        )
