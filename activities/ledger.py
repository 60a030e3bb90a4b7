"""The ledger's side of a group's life, one transaction each. Run as local activities of GroupWorkflow.

A database that is away is retried for ever: it stalls groups, it does not fail them. Everything else
the database or the ledger says is final, because asking again would ask for ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import psycopg
from psycopg_pool import PoolTimeout
from temporalio import activity
from temporalio.exceptions import ApplicationError

from domain.errors import RollbookError
from domain.messages import (
    AttemptIn,
    AttemptRef,
    BeginGroup,
    CloseAttempt,
    FinishGroup,
    GroupVerdict,
    NextAttempt,
)
from storage import attempts, groups
from storage.database import Ledger, Tx

P = ParamSpec("P")
T = TypeVar("T")

AWAY = (psycopg.OperationalError, PoolTimeout)
"""The database is not there, or gave up on this transaction: worth another try."""


async def transact(
    ledger: Ledger, step: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run one ledger transaction from an activity, with refusals made final.

    Raises:
        ApplicationError: the ledger refused; not retryable, typed by the refusal's class name.
        psycopg.OperationalError: the database is away; Temporal tries again.
    """
    try:
        return await ledger.run(step, *args, **kwargs)
    except AWAY:
        raise
    except (psycopg.Error, RollbookError) as refusal:
        raise ApplicationError(
            f"{step.__module__}.{step.__qualname__}: {refusal}",
            type=type(refusal).__name__,
            non_retryable=True,
        ) from refusal


@dataclass
class LedgerActivities:
    """Steps of GroupWorkflow in the ledger. Each is idempotent: a repeated call changes nothing."""

    ledger: Ledger

    @activity.defn
    async def begin_group(self, claim: BeginGroup) -> None:
        """Claim a generation of a group for one workflow execution, or its chain of resets.

        Raises:
            ApplicationError: ALREADY_OWNED, another execution has it or the group has moved on.
        """
        if not await transact(self.ledger, groups.begin, claim):
            raise ApplicationError(
                f"group {claim.group} generation {claim.gen} of run {claim.run} belongs to another "
                "execution or is no longer submitted",
                type="ALREADY_OWNED",
                non_retryable=True,
            )

    @activity.defn
    async def close_attempt(self, ending: CloseAttempt) -> NextAttempt:
        """Record why an attempt will not join its group, and decide what follows."""
        return await transact(self.ledger, groups.close_attempt, ending)

    @activity.defn
    async def read_attempt(self, which: AttemptIn) -> AttemptRef:
        """The result of an attempt that another execution owns; retried until there is one."""
        ref = await transact(self.ledger, attempts.read, which)
        if ref is None:
            raise ApplicationError(
                f"attempt {which.attempt} at sample {which.sample} of group {which.group} still "
                "runs elsewhere",
                type="STILL_RUNNING",
            )
        return ref

    @activity.defn
    async def finish_group(self, ending: FinishGroup) -> GroupVerdict:
        """Admit a group or a part of it, or close it. A lost race leaves the ledger as it is."""
        return await transact(self.ledger, groups.finish, ending)
