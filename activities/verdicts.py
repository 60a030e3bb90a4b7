"""Call user code and read its verdicts: what it raised or returned decides the rollout's outcome."""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from numbers import Real
from typing import Any, TypeVar

from activities.turns import Failed
from domain.errors import AgentError, BudgetExhausted, LedgerError, SourceBroken
from domain.rollouts import Reward
from domain.text import clean

T = TypeVar("T")

_PASSED_ON = (AgentError, BudgetExhausted, Failed, LedgerError, SourceBroken)


async def guarded(where: str, call: Awaitable[T], *, limit_s: float | None = None) -> T:
    """Await user code, for `limit_s` seconds at most.

    Raises:
        Failed: it raised, or took too long; names `where` and what it raised.
        AgentError, BudgetExhausted, LedgerError, SourceBroken: as they were raised.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if limit.expired():
            raise Failed(
                f"{where} took longer than groups.environment_timeout = {limit_s:g} s"
            ) from error
        raise Failed(clean(f"{where} raised TimeoutError: {error}")) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Failed(f"{where} was cancelled by its own code") from error
    except _PASSED_ON:
        raise
    except (Exception, SystemExit) as error:
        raise Failed(clean(f"{where} raised {type(error).__name__}: {error}")) from error


async def verdict(
    where: str, function: Callable[..., Any], *arguments: Any, limit_s: float | None = None
) -> Any:
    """Call a verifier; a plain function runs in a thread, so that it cannot stop heartbeats.

    Raises:
        Failed: it raised, or took longer than `limit_s` seconds; names `where`.
        SourceBroken, LedgerError: as they were raised.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await guarded(where, function(*arguments), limit_s=limit_s)
        value = await guarded(where, _in_thread(function, *arguments), limit_s=limit_s)
        return await guarded(where, value, limit_s=limit_s) if inspect.isawaitable(value) else value
    except (AgentError, BudgetExhausted) as error:
        raise Failed(clean(f"{where} raised {type(error).__name__}: {error}")) from error


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a thread of its own: one that never returns must not hold up another's verdict.

    Not `asyncio.to_thread`: its few threads are everybody's, and a StopIteration (`next` without a
    default is a common slip) would never come back from it.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = copy_context()

    def tell(value: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((value, error))

    def call() -> None:
        value = error = None
        try:
            value = context.run(function, *arguments)
        except BaseException as raised:  # noqa: BLE001 - told to whoever awaits it
            error = raised
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=call, name="verifier", daemon=True).start()
    value, error = await ended
    if error is not None:
        raise error
    return value


def as_reward(value: object, where: str) -> Reward:
    """The verdict as a Reward.

    Raises:
        Failed: missing, not finite or a bool; never taken for 0.
        SourceBroken: no number at all.
    """
    reward = value if isinstance(value, Reward) else None
    number: object = reward.value if reward else value
    components = {
        str(name): _finite(part, f"{where}, component {name!r},")
        for name, part in (reward.components if reward else {}).items()
    }
    return Reward(_finite(number, where), components)


def _finite(value: object, where: str) -> float:
    if value is None:
        raise Failed(f"{where} returned no reward")
    if isinstance(value, bool):
        raise Failed(f"{where} returned {value}; a reward is a number, write {int(value)}.0")
    if not isinstance(value, Real):
        raise SourceBroken(f"{where} returned a {type(value).__name__}; return a float or a Reward")
    number = float(value)
    if not math.isfinite(number):
        raise Failed(f"{where} returned {number}; a reward must be finite")
    return number
