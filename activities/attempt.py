"""The attempt activity: one rollout, from its start transaction to its finish transaction.

how the work ended                                   ledger                activity
an outcome that can be judged                        finished, its status  AttemptRef
infra_error; anything unforeseen                     finished infra_error  INFRA_ERROR
the source says cancelled                            finished cancelled    CANCELLED
its time is up (`groups.timeout`)                    finished cancelled    TIMED_OUT
the ledger cancelled it (seen at a segment)          finished cancelled    CANCELLED
Temporal asked to cancel                             finished cancelled    CancelledError
another execution owns it                            late_result           FENCED
its worker died and it cannot resume                 –                     LOST
the source broke its contract                        finished infra_error  SOURCE_BROKEN
the gateway could not sample for it                  finished infra_error  INFRA_ERROR
worker shutdown, ledger out of reach for long        –                     WORKER_SHUTDOWN, retried
out of Temporal's time, paused, reset                 –                     CancelledError

A beater beside the work shows progress and brings cancels. What an earlier execution committed is in
the ledger, so a retry goes on from there, and one whose finish had committed only answers.
"""

import asyncio
import logging
import secrets
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import psycopg
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import time_limits
from activities.access import Access, key_sha256, session_path
from activities.harness import LOOK_EVERY_S
from activities.play import play
from activities.sampler import Sampler
from activities.session import GatewayFailed, SessionRecorder, ShuttingDown, Stopped
from activities.setups import Setup, Setups
from activities.whole import whole
from domain import failpoints
from domain.environments import HarnessSource, Outcome, recovery, samples_at_gateway
from domain.errors import ConfigError, Fenced, ObjectError, SourceBroken
from domain.messages import AttemptFailure, AttemptIn, AttemptRef, environment_of
from domain.rollouts import SCORED, Reward, Status
from domain.services import VARIABLES
from domain.text import clean
from storage import attempts, segments, sessions
from storage.attempts import Ending, Started

logger = logging.getLogger(__name__)

BEAT_S = 0.5
PATIENCE_S = 300.0
"""Seconds for which a rollout worker's ledger is tried again. Its environments live on meanwhile, and
most could not be taken up elsewhere: a restart of Postgres must not cost every rollout."""
ABANDON_S = 45.0
"""Seconds that cancelled user code gets to return, before it is abandoned and named."""

MESSAGE_LIMIT, ERROR_LIMIT = 2_000, 20_000
"""Characters of an error in a workflow's history, and in the ledger."""


class OutOfTime(Exception):
    """The attempt's time is up."""


class Attempts:
    """Runs attempts in a rollout worker. One per process and event loop."""

    def __init__(
        self, sampler: Sampler, setups: Setups, *, worker: str, gateway: str | None = None
    ) -> None:
        """Nothing starts yet.

        Args:
            sampler: ledger, engine client and router.
            setups: sources and chat formats of runs.
            worker: this process, for people: host and pid.
            gateway: base URL of the recording gateway.
        """
        self._sampler = sampler
        self._ledger = sampler.ledger
        self._setups = setups
        self._worker = worker
        self._gateway = gateway
        self._abandoned: set[asyncio.Task[Any]] = set()

    @activity.defn
    async def run_attempt(self, i: AttemptIn) -> AttemptRef:
        """Play one attempt to its end.

        Raises:
            ApplicationError: its type is an `AttemptFailure`.
            CancelledError: as Temporal asked.
        """
        began = time.monotonic()
        try:
            setup = await self._setup(i.run)
            started, cancelled = await whole(
                self._ledger.run(
                    attempts.start,
                    i,
                    worker=self._worker,
                    scheduled_at=activity.info().current_attempt_scheduled_time,
                )
            )
            failpoints.reach("attempt_started")
            if started.ended is not None:
                return _answer(started.ended, started.error)
            if cancelled:
                await self._cancelled(i, started.fence)
            return await self._play(i, setup, started, began)
        except (psycopg.OperationalError, ObjectError) as error:
            raise _failure(AttemptFailure.WORKER_SHUTDOWN, f"out of reach: {error}") from error
        except Fenced as error:  # before it began: this execution was given up long ago
            raise _failure(AttemptFailure.FENCED, str(error)) from error
        except ApplicationError:
            raise
        except Exception as error:
            # Before the attempt began: nothing to end in the ledger but what close_attempt ends.
            raise _failure(AttemptFailure.INFRA_ERROR, _describe(error)) from error

    async def _setup(self, run: str) -> Setup:
        try:
            return await self._setups.get(run, environment_of(activity.info().task_queue))
        except ConfigError as error:
            raise _failure(AttemptFailure.SOURCE_BROKEN, str(error)) from error

    async def _play(self, i: AttemptIn, setup: Setup, started: Started, began: float) -> AttemptRef:
        access = await self._access(i, setup, started)
        recorder = await self._recorder(i, setup, started, access, began)
        work = asyncio.create_task(_work(setup, started, recorder))
        recorder.bind(work)
        try:
            left = time_limits.left_s(setup.config, began)
            outcome = await self._beside_a_beater(i, work, recorder, left)
        except OutOfTime:
            limit = f"groups.timeout = {setup.config.groups.timeout:g} s after its submission"
            await self._fail(i, started.fence, AttemptFailure.TIMED_OUT, f"not finished {limit}")
        except asyncio.CancelledError:
            await self._cancelled(i, started.fence, recorder.halted)
        except Fenced as error:
            await self._refused(i, started.fence, "segment", error)
        except SourceBroken as error:
            await self._fail(i, started.fence, AttemptFailure.SOURCE_BROKEN, str(error))
        except (ApplicationError, psycopg.OperationalError):
            raise
        except Exception as error:
            logger.exception("attempt failed", extra={"run": i.run, "group": i.group})
            await self._fail(i, started.fence, AttemptFailure.INFRA_ERROR, _describe(error))
        finally:
            if access is not None:
                await self._revoke(i, started.fence)
        return await self._end(i, started.fence, outcome)

    async def _access(self, i: AttemptIn, setup: Setup, started: Started) -> Access | None:
        """A key of this execution's own, where the source samples through the gateway.

        Raises:
            ApplicationError: this worker knows no gateway, or another execution owns the attempt.
        """
        if not samples_at_gateway(setup.source):
            return None
        if self._gateway is None:
            await self._fail(
                i,
                started.fence,
                AttemptFailure.SOURCE_BROKEN,
                f"{type(setup.source).__name__} samples through the gateway, and this worker knows "
                f"none; set {VARIABLES['gateway']}",
            )
        key = secrets.token_urlsafe(32)
        try:
            await self._ledger.run(sessions.issue, i, started.fence, key_sha256(key))
        except Fenced as error:
            await self._refused(i, started.fence, "key", error)
        return Access(base_url=self._gateway.rstrip("/") + session_path(i), api_key=key)

    async def _revoke(self, i: AttemptIn, fence: int) -> None:
        """Close the session. An attempt that has ended has none, whether or not this gets through."""
        try:
            await whole(self._ledger.run(sessions.revoke, i, fence))
        except psycopg.OperationalError as error:
            logger.warning("a key was not revoked: %s", error)

    async def _recorder(
        self, i: AttemptIn, setup: Setup, started: Started, access: Access | None, began: float
    ) -> SessionRecorder:
        key = (i.run, i.group, i.sample, i.attempt)
        resumed = started.segments > 0
        resumable = recovery(setup.source) != "drop"
        return SessionRecorder(
            self._sampler,
            setup.config,
            i,
            started,
            recorded=await self._ledger.run(segments.read, *key) if resumed else (),
            places=await self._ledger.run(segments.places, *key) if resumed else (),
            stop_ids=tuple(setup.chat.stop_ids),
            patience_s=time_limits.patience_s(setup.config, began),
            # What cannot resume elsewhere uses the time that the worker's shutdown grants.
            draining=activity.is_worker_shutdown if resumable else lambda: False,
            access=access,
        )

    async def _beside_a_beater(
        self,
        i: AttemptIn,
        work: "asyncio.Task[Outcome]",
        recorder: SessionRecorder,
        left_s: float | None,
    ) -> Outcome:
        """The outcome of `work`, which is cancelled with us, when its time is up or its heartbeat
        stops."""
        beater = asyncio.create_task(_beat(recorder))
        try:
            await asyncio.wait([work, beater], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if beater.done() and not work.done():
                beater.result()
            if not work.done():
                raise OutOfTime
            return await work
        finally:
            beater.cancel()
            await self._let_go(i, work, recorder)
            await asyncio.gather(beater, return_exceptions=True)

    async def _let_go(
        self, i: AttemptIn, work: "asyncio.Task[Outcome]", recorder: SessionRecorder
    ) -> None:
        """Cancel the work if it still runs, and give it time to free what it holds."""
        if work.done():
            return
        recorder.close()
        work.cancel()  # once: a second cancel would interrupt the clean-up
        give_up = time.monotonic() + ABANDON_S
        while not work.done() and (left := give_up - time.monotonic()) > 0:
            try:
                await asyncio.wait([work], timeout=left)
            except asyncio.CancelledError:
                continue  # we were asked twice; the first is being answered
        if not work.done():
            work.cancel()
            self._abandoned.add(work)
            work.add_done_callback(self._abandoned.discard)
            logger.error(
                "sample %d of group %d ignored its cancellation for %.0f s and was abandoned; "
                "%d such tasks run in this worker",
                i.sample,
                i.group,
                ABANDON_S,
                len(self._abandoned),
                extra={"run": i.run, "group": i.group, "sample": i.sample},
            )

    async def _end(self, i: AttemptIn, fence: int, outcome: Outcome) -> AttemptRef:
        """Write the outcome, and answer with what became of it."""
        if outcome.lost:
            raise _failure(AttemptFailure.LOST, outcome.detail)
        if outcome.status is Status.INFRA_ERROR:
            await self._fail(i, fence, AttemptFailure.INFRA_ERROR, outcome.detail)
        if outcome.status is Status.CANCELLED:
            await self._fail(i, fence, AttemptFailure.CANCELLED, outcome.detail)
        reward = outcome.reward
        judged = reward if isinstance(reward, Reward) or reward is None else Reward(reward)
        end = Ending(
            status=outcome.status,
            reward=None if judged is None else judged.value,
            components={} if judged is None else judged.components,
            metrics=outcome.metrics,
            cause=outcome.cause,
            error=clean(outcome.detail)[:ERROR_LIMIT] or None,
        )
        try:
            ref = await self._write(i, fence, end)
        except Fenced as error:
            await self._refused(i, fence, "finish", error)
        except ValueError as error:
            await self._fail(i, fence, AttemptFailure.INFRA_ERROR, str(error))
        return ref

    async def _fail(
        self, i: AttemptIn, fence: int, failure: AttemptFailure, message: str
    ) -> NoReturn:
        """End the attempt unscored, and fail the activity."""
        timed_out = failure is AttemptFailure.TIMED_OUT
        cancelled = timed_out or failure is AttemptFailure.CANCELLED
        end = Ending(
            status=Status.CANCELLED if cancelled else Status.INFRA_ERROR,
            timed_out=timed_out,
            error_type=failure.value,
            error=clean(message)[:ERROR_LIMIT],
        )
        try:
            await self._write(i, fence, end)
        except Fenced as error:
            await self._refused(i, fence, "finish", error)
        raise _failure(failure, message)

    async def _cancelled(
        self, i: AttemptIn, fence: int, halted: Exception | None = None
    ) -> NoReturn:
        """The work was cancelled: by its recorder, which says why, or by Temporal."""
        match halted:
            case Stopped() as stopped:
                await self._fail(i, fence, AttemptFailure.CANCELLED, f"{stopped}")
            case Fenced() as error:
                await self._refused(i, fence, "segment", error)
            case GatewayFailed() as failed:
                await self._fail(i, fence, AttemptFailure.INFRA_ERROR, str(failed))
            case ShuttingDown() as error:
                raise _failure(AttemptFailure.WORKER_SHUTDOWN, str(error))
            case psycopg.OperationalError() as error:
                raise error
        details = activity.cancellation_details()
        if details is not None and details.worker_shutdown:
            raise _failure(AttemptFailure.WORKER_SHUTDOWN, "the worker shut down under it")
        if details is not None and details.cancel_requested:
            try:
                await self._write(i, fence, Ending(status=Status.CANCELLED))
            except Fenced as error:
                logger.info("cancelled attempt was not ours any more: %s", error)
        raise asyncio.CancelledError

    async def _write(self, i: AttemptIn, fence: int, end: Ending) -> AttemptRef:
        """The finish transaction; a cancel that arrives meanwhile does not tear it."""
        ref, _ = await whole(self._ledger.run(attempts.finish, i, fence, end))
        failpoints.reach("attempt_finished")
        return ref

    async def _refused(self, i: AttemptIn, fence: int, what: str, error: Fenced) -> NoReturn:
        """Count what came too late, and say that another execution answers for this attempt."""
        await self._ledger.run(attempts.late_result, i, fence, what)
        raise _failure(AttemptFailure.FENCED, str(error)) from error


async def _work(setup: Setup, started: Started, recorder: SessionRecorder) -> Outcome:
    """Play; where a session of the user's own samples at the gateway, watch what comes of it."""
    playing = play(setup.source, started.task, recorder, config=setup.config, chat=setup.chat)
    if isinstance(setup.source, HarnessSource) or not samples_at_gateway(setup.source):
        return await playing
    watching = asyncio.create_task(_watch(recorder))
    try:
        outcome = await playing
        await recorder.look()
        return outcome
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(recorder: SessionRecorder) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        with suppress(psycopg.OperationalError):  # the ledger is away; the source goes on
            await recorder.look()


async def _beat(recorder: SessionRecorder) -> None:
    while True:
        await asyncio.sleep(BEAT_S)  # first: an attempt that is over at once costs no heartbeat
        activity.heartbeat(recorder.heartbeat)


def _answer(ended: AttemptRef, error: str) -> AttemptRef:
    """What an execution says that found the attempt ended."""
    if ended.status in SCORED:
        return ended
    cancelled = ended.status == Status.CANCELLED
    raise _failure(AttemptFailure.CANCELLED if cancelled else AttemptFailure.INFRA_ERROR, error)


def _describe(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.name}, {where.filename}:{where.lineno})"


def _failure(failure: AttemptFailure, message: str) -> ApplicationError:
    return ApplicationError(
        clean(message)[:MESSAGE_LIMIT],
        type=failure.value,
        non_retryable=failure is not AttemptFailure.WORKER_SHUTDOWN,
    )
