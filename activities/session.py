"""The recorder of one execution of an attempt: prompt ids in, a committed segment out.

A request is sampled under the version that the sampling policy chooses, tried on other engines while
engines fail, and committed to the ledger before its caller sees a token. The ledger's answer to a
commit may be that the attempt is cancelled, or has passed to another execution: then the recorder
*halts* the work. It cancels the task the source runs in, so that no `except` of user code can go on
without it, and says why in `halted`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psycopg

from activities.access import Access
from activities.chain import Chain
from activities.inference import Generated
from activities.sampler import Answer, Request, Sampler, segment_of
from activities.whole import whole
from domain import failpoints
from domain.config import RunConfig
from domain.errors import (
    BudgetExhausted,
    ConfigError,
    EngineUnavailable,
    Fenced,
    LedgerError,
)
from domain.images import Image
from domain.messages import AttemptIn
from domain.rollouts import Segment
from storage import segments, sessions, snapshots
from storage.attempts import Started
from storage.database import Tx
from storage.segments import Place, Progress
from storage.sessions import Past, Recorded, Seen

logger = logging.getLogger(__name__)


LONGEST_S = 86_400.0
"""Seconds for which an attempt without a time limit waits for engines."""


class Stopped(Exception):
    """The ledger cancelled the attempt; the message is its cancel cause."""


class ShuttingDown(Exception):
    """The worker stops: another one takes the attempt up."""


class GatewayFailed(Exception):
    """The gateway could not sample for the attempt; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a request's caller has to do with its segment."""

    trim: Callable[[Generated], Generated]
    """Cuts what was sampled before it is recorded, as an engine would have that stopped there."""
    recorded: Callable[[int], Recorded]
    """Which call the segment belongs to, given its number; kept in the segment's own transaction."""


class SessionRecorder:
    """Implements `AttemptRecorder`. Requests may run side by side; commits are one at a time."""

    def __init__(
        self,
        sampler: Sampler,
        config: RunConfig,
        attempt: AttemptIn,
        started: Started,
        *,
        recorded: Sequence[Segment] = (),
        places: Sequence[Place] = (),
        stop_ids: Sequence[int] = (),
        patience_s: float = LONGEST_S,
        draining: Callable[[], bool] = lambda: False,
        access: Access | None = None,
    ) -> None:
        """Take up an attempt.

        Args:
            sampler: the worker's clients.
            config: of the run.
            attempt: which attempt.
            started: what its start said.
            recorded: segments that earlier executions committed,
            places: and where they stand.
            stop_ids: ids that end a turn.
            patience_s: seconds from now for which failing engines are tried again.
            draining: whether the worker is shutting down and requests should not begin.
            access: to the gateway, which then writes this attempt's segments.
        """
        self._sampler = sampler
        self._config = config
        self._attempt = attempt
        self._started = started
        self._recorded = recorded
        self._stop_ids = tuple(sorted(stop_ids))
        self._give_up_at = time.monotonic() + patience_s
        self._draining = draining
        self._access = access
        self._commits = asyncio.Lock()
        self._requests = len(recorded)
        self._chain = Chain(recorded, places)
        self._version = started.version
        self._engine: str | None = None
        self._work: asyncio.Task[Any] | None = None
        self._facts: dict[str, Any] = {"phase": "starting"}
        self._phase_began = time.monotonic()
        self._failures: list[str] = []  # of engines, in the request that is under way
        self._tokens = sum(len(segment.sampled_ids) for segment in recorded)
        self._deadline = started.deadline
        self._closed = False
        self.halted: Exception | None = None
        """Why the recorder cancelled the work, if it did."""

    # ------------------------------------------------------------ what a source sees

    @property
    def version(self) -> int:
        """The version the next request would use."""
        return self._version

    @property
    def base_url(self) -> str:
        """The gateway's OpenAI base URL."""
        return self._at_gateway().base_url

    @property
    def api_key(self) -> str:
        """The attempt's own key at the gateway."""
        return self._at_gateway().api_key

    @property
    def recorded(self) -> Sequence[Segment]:
        """Segments that were committed before this execution began."""
        return self._recorded

    @property
    def deadline_reached(self) -> bool:
        """The group's straggler deadline has passed; carried-over tails go on regardless."""
        return self._deadline and self._config.groups.completion.on_stragglers == "truncate"

    def progress(self, phase: str, **facts: Any) -> None:
        """Shown in the Temporal UI with the next heartbeat."""
        self._phase_began = time.monotonic()
        self._facts = {"phase": phase} | {
            name: value for name, value in facts.items() if isinstance(value, int | float | str)
        }

    async def keep(self, image: Image) -> None:
        """See that an image lies in the object store.

        Raises:
            ConfigError: this process has no object store.
            ObjectError: the store refused.
        """
        if self._sampler.album is None:
            raise ConfigError("images cannot be sent from here: this process has no object store")
        await self._sampler.album.keep(image)

    async def save(self, state: Any) -> None:
        """Keep a JSON value that describes the attempt at this turn boundary."""
        try:
            await self._sampler.ledger.run(
                snapshots.save,
                self._attempt,
                self._started.fence,
                segments=self._chain.segments,
                state=state,
            )
        except (Fenced, psycopg.OperationalError) as error:
            await self._halt(error)

    async def saved(self) -> Any | None:
        """The newest value that was kept."""
        return await self._sampler.ledger.run(snapshots.newest, self._attempt)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[str] = (),
        beside: Beside | None = None,
    ) -> Segment:
        """One sampling request, committed before it returns.

        Raises:
            BudgetExhausted: the engine's tokens for the images fill the context; nothing is kept.
            ConfigError: the attempt samples through the gateway.
            EngineUnavailable: no engine answered while the attempt's time lasted.
            EngineRefused, WrongVersion: the engine's answer cannot be used.
            LedgerError: the ledger refused what the engine answered.
            CancelledError: the attempt was cancelled, or passed to another execution.
        """
        if self._access is not None:
            raise ConfigError(
                "this source samples through the gateway (gateway = True); a rollout has one "
                "writer, so recorder.chat and .sample are not for it"
            )
        if self.halted is not None or self._closed or self._draining():
            await self._halt(self.halted or ShuttingDown("the worker is shutting down"))
        request = Request(
            attempt=self._attempt,
            started=self._started,
            config=self._config,
            number=self._requests,
            prompt_ids=prompt_ids,
            images=images,
            max_tokens=max_tokens or self._config.budget.segment_tokens,
            stop_ids=self._stop_ids,
            prefer=self._engine,
            give_up_at=self._give_up_at,
        )
        self._requests += 1
        self._failures = request.failures
        try:
            answer = await self._sampler.answer(request)
            self._require_room(request, answer)
            (segment, progress), cancelled = await whole(self._commit(request, answer, beside))
        except (Fenced, psycopg.OperationalError) as error:
            await self._halt(error)
        except (asyncio.CancelledError, EngineUnavailable):
            await self._keep(request, beside)
            raise
        if cancelled:
            raise asyncio.CancelledError
        self._failures = []
        self._deadline = self._deadline or progress.deadline
        if progress.cancel_cause is not None:
            await self._halt(Stopped(progress.cancel_cause))
        return segment

    # ------------------------------------------------------------ what the activity sees

    def bind(self, work: "asyncio.Task[Any]") -> None:
        """Name the task that is cancelled when the attempt must halt."""
        self._work = work

    def close(self) -> None:
        """Begin no further request, whatever the source does with the cancel it is about to get."""
        self._closed = True

    async def look(self) -> Seen:
        """Read what the gateway wrote for this attempt, and halt if that ends the attempt.

        Raises:
            CancelledError: the attempt was cancelled, has failed, or passed to another execution.
            OperationalError: the ledger is out of reach.
        """
        i, fence = self._attempt, self._started.fence
        seen = await self._sampler.ledger.run(sessions.look, i, fence)
        if not seen.ours:
            await self._halt(Fenced(f"fence {fence} of group {i.group} is not the newest"))
        if seen.cancel_cause is not None:
            await self._halt(Stopped(seen.cancel_cause))
        if seen.failure is not None:
            await self._halt(GatewayFailed(seen.failure))
        self._tokens, self._engine = seen.tokens, seen.engine
        self._facts |= {"turn": seen.turns, "seg": seen.segments}
        return seen

    async def past(self) -> Past:
        """What the gateway recorded of this attempt."""
        return await self._sampler.ledger.run(sessions.past, self._attempt)

    @property
    def heartbeat(self) -> dict[str, Any]:
        """What the Temporal UI shows of this attempt."""
        trouble = {"engine_error": self._failures[-1]} if self._failures else {}
        return {
            "turn": self._chain.turns,
            "seg": self._chain.segments,
            "tok": self._tokens,
            "v": self._version,
            "engine": self._engine,
            "for_s": round(time.monotonic() - self._phase_began, 1),
        } | (trouble | self._facts)

    # ------------------------------------------------------------ inside

    def _require_room(self, request: Request, answer: Answer) -> None:
        """Only an engine knows how many tokens an image is, so this comes after its first answer."""
        if request.images and answer.generated.context > self._config.max_context_tokens:
            raise BudgetExhausted("context")

    async def _commit(
        self, request: Request, answer: Answer, beside: Beside | None
    ) -> tuple[Segment, Progress]:
        generated = answer.generated if beside is None else beside.trim(answer.generated)
        segment = segment_of(request, answer, generated)
        i = self._attempt
        async with self._commits:
            place = self._chain.place(segment)
            failpoints.reach("segment_sampled")

            def append(tx: Tx) -> Progress:
                progress = segments.append(
                    tx,
                    i.run,
                    i.group,
                    i.sample,
                    i.attempt,
                    self._started.fence,
                    segment,
                    place=place,
                    engine=answer.engine,
                )
                if beside is not None:
                    sessions.note(tx, i, beside.recorded(place.seq))
                return progress

            progress = await self._sampler.ledger.run(append)
            failpoints.reach("segment_done")
            self._version, self._engine = answer.version, answer.engine
            self._chain.append(segment, place)
            self._tokens += len(segment.sampled_ids)
        return segment, progress

    def _at_gateway(self) -> Access:
        if self._access is None:
            raise ConfigError(
                "this source has no access to the recording gateway; give its class the attribute "
                "gateway = True, or sample through recorder.chat or .sample"
            )
        return self._access

    async def _keep(self, request: Request, beside: Beside | None) -> None:
        """Record what a cancelled request had sampled, if the ledger still takes it."""
        if not request.partial or not request.partial[0].generated.sampled_ids:
            return
        try:
            self._require_room(request, request.partial[0])
            await whole(self._commit(request, request.partial[0], beside))
        except BudgetExhausted:
            return
        except (LedgerError, psycopg.Error) as error:
            logger.warning(
                "the partial output of a cancelled request was not recorded: %s",
                error,
                extra={"run": self._attempt.run, "group": self._attempt.group},
            )

    async def _halt(self, reason: Exception) -> NoReturn:
        """Stop the work for good: its task is cancelled, and this call never returns."""
        if not self._closed:
            self.halted = self.halted or reason
        if self._work is None:
            raise reason
        self._work.cancel()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable: the future above is never set")
