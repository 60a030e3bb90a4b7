"""One generation of one task group: run its samples, replace those that fail, end it exactly once.

    begin_group ─▶ samples ─▶ enough, closed, or nothing left ─▶ drain ─▶ finish_group
                   │  ▲
                   ▼  │ close_attempt: the ledger numbers and bounds the attempts
                  attempt

A resubmission is workflow code: a new attempt with a new activity id. Temporal's own retries only
resume the same attempt. Whatever ends the group, every live attempt is cancelled and awaited before
`finish_group`, and `finish_group` runs even if the workflow is cancelled again meanwhile.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities import namespace
    from activities.ledger import LedgerActivities
    from domain.messages import (
        AttemptIn,
        AttemptRef,
        BeginGroup,
        CancelSample,
        Close,
        CloseAttempt,
        Closing,
        FinishGroup,
        GroupIn,
        GroupOut,
        GroupState,
        GroupVerdict,
        LiveAttempt,
        NextAttempt,
        Stuck,
    )
    from workflows import details, endings, options
    from workflows.details import Told
    from workflows.endings import Ending

T = TypeVar("T")


@dataclass
class Live:
    """An attempt this workflow answers for, until its end is settled in the ledger."""

    attempt: int
    handle: workflow.ActivityHandle[AttemptRef]
    cancel_cause: str | None = None


def _refusal(sample: "asyncio.Task[None]") -> BaseException | None:
    """The ledger's refusal of a step of this ended sample; a cancel is none."""
    error = None if sample.cancelled() else sample.exception()
    return None if error is None or is_cancelled_exception(error) else error


@workflow.defn
class GroupWorkflow:
    """See the module. The query `state` tells where it stands."""

    @workflow.init
    def __init__(self, group: GroupIn) -> None:
        """Nothing has started; signals may already arrive."""
        self.group = group
        self.stage = "sampling"
        self.moving = "sampling"  # the stage that a stuck group goes back to
        self.members = group.kept
        self.live: dict[int, Live] = {}
        self.told: dict[int, Told] = {}  # sample -> its row in the table people see
        self.resubmitted: Counter[str] = Counter()
        self.deadline = False  # the ledger saw the straggler deadline
        self.close_cause: str | None = None  # someone asked to close the group
        self.ended: tuple[Closing, str | None] | None = None  # the ledger's or the source's verdict
        self.cancelled = False  # native cancel, by a person
        self.closing = False  # from here on no sample starts again

    @workflow.signal
    def cancel_sample(self, request: CancelSample) -> None:
        """Stop one attempt. Keyed by its number: duplicates and late ones change nothing."""
        live = self.live.get(request.sample)
        if live and live.attempt == request.attempt and not live.handle.done():
            live.cancel_cause = live.cancel_cause or request.cause
            live.handle.cancel()

    @workflow.signal
    def close_group(self, request: Close) -> None:
        """Stop the whole group; the first cause counts."""
        self.close_cause = self.close_cause or request.cause

    @workflow.signal
    def deadline_reached(self) -> None:
        """The straggler allowance is used up; the ledger tells the members themselves."""
        self.deadline = True

    @workflow.signal
    def stuck(self, report: Stuck) -> None:
        """The steward saw attempts without progress, or that they move again."""
        for told in report.attempts:
            live = self.live.get(told.sample)
            if live and live.attempt == told.attempt:
                self._tell(told.sample, Told.stuck(told))
        if report.attempts and self.stage in ("sampling", "quorum"):
            self.moving = self.stage
            self._enter("stuck")
        elif not report.attempts and self.stage == "stuck":
            self._enter(self.moving)

    @workflow.query
    def state(self) -> GroupState:
        """What is live. An attempt between its end and `close_attempt` still is."""
        return GroupState(
            stage=self.stage,
            members=self.members,
            live=tuple(
                LiveAttempt(sample=sample, attempt=live.attempt)
                for sample, live in sorted(self.live.items())
            ),
            resubmitted=dict(self.resubmitted),
        )

    @workflow.run
    async def run(self, group: GroupIn) -> GroupOut:
        """Sample the group to its end and settle it in the ledger."""
        info = workflow.info()
        claim = BeginGroup(
            run=group.run,
            group=group.group,
            gen=group.gen,
            workflow_id=info.workflow_id,
            first_execution_run_id=info.first_execution_run_id,
        )
        await self._through(
            workflow.execute_local_activity_method(
                LedgerActivities.begin_group, claim, **options.LEDGER_STEP
            )
        )
        samples = [asyncio.create_task(self._sample(s, attempt)) for s, attempt in group.samples]
        part = int(group.part0_admitted)
        try:
            if not self.cancelled:
                await workflow.wait_condition(lambda: self._over(samples) or self._tails_only(part))
            if not self._over(samples):
                await self._finish(part)  # the finished members train now, the tails go on
                part = 1
                await workflow.wait_condition(lambda: self._over(samples))
        except asyncio.CancelledError:
            self.cancelled = True
        self.closing = True
        await self._drain(samples)
        for sample in samples:
            if refusal := _refusal(sample):
                raise refusal  # fail visibly; the sweep opens the group again
        verdict = await self._finish(part)
        self._enter(verdict.state)
        if self.cancelled:
            raise asyncio.CancelledError
        return GroupOut(
            state=verdict.state,
            members=verdict.members,
            resubmitted=dict(self.resubmitted),
            cause=self._outcome()[1],
        )

    def _over(self, samples: Sequence["asyncio.Task[None]"]) -> bool:
        return (
            self.cancelled
            or self.close_cause is not None
            or self.ended is not None
            or self.members >= self.group.size
            or all(sample.done() for sample in samples)
            or any(sample.done() and _refusal(sample) for sample in samples)
        )

    def _tails_only(self, part: int) -> bool:
        return self.deadline and self.group.on_stragglers == "carry_over" and part == 0

    def _outcome(self) -> tuple[Closing, str | None]:
        if self.ended is not None:
            return self.ended
        if self.cancelled:
            return "cancelled", "human"
        if self.close_cause is not None:
            return "cancelled", self.close_cause
        return "complete", None

    async def _finish(self, part: int) -> GroupVerdict:
        outcome, cause = self._outcome()
        ending = FinishGroup(
            run=self.group.run,
            group=self.group.group,
            gen=self.group.gen,
            outcome=outcome,
            part=part,
            cause=cause,
        )
        return await self._through(
            workflow.execute_local_activity_method(
                LedgerActivities.finish_group, ending, **options.LEDGER_STEP
            )
        )

    async def _drain(self, samples: Sequence["asyncio.Task[None]"]) -> None:
        """Cancel what still runs and wait for it; a cancel of ourselves does not cut this short."""
        waiting = [sample for sample in samples if not sample.done()]
        if waiting:
            self._enter("draining")
        for sample in waiting:
            sample.cancel()
        while waiting:
            try:
                await asyncio.gather(*waiting, return_exceptions=True)
                return
            except asyncio.CancelledError:
                self.cancelled = True

    async def _through(self, step: Awaitable[T]) -> T:
        """Await a step of the ledger to its end; a cancel meanwhile is remembered, not obeyed."""
        task = asyncio.ensure_future(step)
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                self.cancelled = True
        return task.result()

    async def _sample(self, sample: int, attempt: int) -> None:
        """Run one sample until it joins, is given up, or ends the group."""
        while True:
            live = self._start(sample, attempt)
            try:
                ref = await live.handle
            except ActivityError as failure:
                ending = endings.of_failure(failure, live.cancel_cause)
                if ending.kind == "fenced":
                    ref = await self._adopt(sample, attempt)
                    ending = endings.of_result(ref)
            else:
                ending = endings.of_result(ref)
            # A cancel that was swallowed because the attempt ended in the same moment.
            if self.closing:
                raise asyncio.CancelledError
            successor = await self._settle(sample, attempt, ending)
            if successor is None:
                return
            attempt = successor

    def _start(self, sample: int, attempt: int) -> Live:
        which = self._attempt_in(sample, attempt)
        handle = workflow.start_activity(
            "run_attempt",
            which,
            result_type=AttemptRef,
            **options.attempt_options(self.group, which),
        )
        live = self.live[sample] = Live(attempt=attempt, handle=handle)
        self._tell(sample, Told.running(attempt, workflow.now()))
        return live

    def _attempt_in(self, sample: int, attempt: int) -> AttemptIn:
        return AttemptIn(run=self.group.run, group=self.group.group, sample=sample, attempt=attempt)

    async def _adopt(self, sample: int, attempt: int) -> AttemptRef:
        """The result of the execution that owns this attempt now."""
        which = self._attempt_in(sample, attempt)
        return await workflow.execute_local_activity_method(
            LedgerActivities.read_attempt, which, **options.LEDGER_STEP
        )

    async def _settle(self, sample: int, attempt: int, ending: Ending) -> int | None:
        """Account for an attempt's end; the number of the attempt that follows, if one does."""
        answer = NextAttempt(give_up=True)
        if ending.kind == "again":
            answer = await self._close_attempt(sample, attempt, ending)
            if answer.adopted is not None:  # given up as lost, but it had joined just before
                ending = endings.of_result(answer.adopted)
        del self.live[sample]
        self._tell(sample, Told.ended(attempt, ending.told, ending.ref, workflow.now()))
        if ending.kind == "member":
            self.members += 1
            self._note_quorum()
        elif ending.kind == "broken":
            self.ended = self.ended or ("source_broken", ending.error)
        elif answer.close is not None:
            self.ended = self.ended or (answer.close, answer.cause)
        elif answer.next_attempt is not None:
            self._note_resubmission(str(answer.cause or ending.cause))  # the ledger knows best
        return answer.next_attempt

    async def _close_attempt(self, sample: int, attempt: int, ending: Ending) -> NextAttempt:
        report = CloseAttempt(
            run=self.group.run,
            group=self.group.group,
            gen=self.group.gen,
            sample=sample,
            attempt=attempt,
            cause=ending.cause,
            status=ending.status,
            lost=ending.lost,
            error_type=ending.error_type,
            error=ending.error,
        )
        return await workflow.execute_local_activity_method(
            LedgerActivities.close_attempt, report, **options.LEDGER_STEP
        )

    def _note_resubmission(self, cause: str) -> None:
        self.resubmitted[cause] += 1
        workflow.upsert_search_attributes(
            [
                namespace.CAUSES.value_set(sorted(self.resubmitted)),
                namespace.RESUBMISSIONS.value_set(self.resubmitted.total()),
            ]
        )

    def _note_quorum(self) -> None:
        group = self.group
        quorum = group.min_members if group.completion == "deadline" else None
        if not quorum or not quorum <= self.members < group.size:
            return
        if self.stage == "stuck":
            self.moving = "quorum"
        elif self.stage == "sampling":
            self._enter("quorum")

    def _enter(self, stage: str) -> None:
        if stage != self.stage:
            self.stage = stage
            workflow.upsert_search_attributes([namespace.STAGE.value_set(stage)])

    def _tell(self, sample: int, told: Told) -> None:
        """Refresh the table people see in the Temporal UI; it costs no event."""
        self.told[sample] = told
        table = details.render(self.group, self.members, self.resubmitted, self.told)
        workflow.set_current_details(table)
