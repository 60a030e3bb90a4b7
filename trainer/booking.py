"""APPLY with its record: what a step did, and what happened around it since the step before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from domain import failpoints
from storage import holds, records, runs, steps, versions
from storage.database import Ledger, Tx
from storage.plans import Planned


@dataclass(frozen=True, kw_only=True)
class Done:
    """A computed step."""

    updated: bool
    """Whether the weights changed."""
    weights_sha256: bytes
    """Digest of the weights after it."""
    cause: str | None = None
    """Why they did not change."""
    optimizer_updates: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Booked:
    """The step's record as the ledger has it (`step_shares.record` and `steps.metrics`)."""

    record: dict[str, Any]
    metrics: dict[str, float]


def of_share(plan: Planned, waited: Mapping[str, float]) -> dict[str, Any]:
    """One share's part of a step: its groups, their greatest lag, the seconds its rank waited."""
    return {
        "lag": max((row.lag for row in plan.rows), default=0),
        "groups": len(plan.rows),
        "waited": sum(waited.values()),
        "waited_for": dict(waited),
    }


def book(
    ledger: Ledger,
    run: str,
    epoch: int,
    plan: Planned,
    done: Done,
    shares: Sequence[Mapping[str, Any]],
) -> Booked:
    """Apply a planned step and write its record, in one transaction.

    Args:
        ledger: where.
        run: its name.
        epoch: the trainer's fencing token.
        plan: of the step.
        done: what it did.
        shares: `of_share` of each, in order. The ranks wait for each other, so the step's waits are
            those of rank 0.

    Raises:
        Fenced: another trainer has taken over.
        ReplayDiverged: the step was applied before with another result.
    """
    version = plan.version_before + done.updated
    waited = shares[0]["waited_for"]

    def apply(tx: Tx) -> Booked:
        served = versions.served(tx, run)
        before = records.last(tx, run, plan.step).get("totals", {})
        totals = records.totals(tx, run)
        metrics = dict(done.metrics) | {f"waited/{kind}": s for kind, s in waited.items()}
        metrics |= records.environment_metrics(tx, run, plan.step)
        metrics |= holds.gauge(tx, runs.read(tx, run))
        metrics["publish_lag"] = float(version - (0 if served is None else served))
        record = {
            "updates": version,
            "optimizer_updates": done.optimizer_updates,
            "version": records.oldest(tx, run, plan.step),
            "lag": max(share["lag"] for share in shares),
            "groups": sum(share["groups"] for share in shares),
            "waited": shares[0]["waited"],
            "waited_for": waited,
            "totals": totals,
        } | records.since(before, totals)
        steps.apply(
            tx,
            run,
            epoch,
            plan.step,
            updated=done.updated,
            weights_sha256=done.weights_sha256,
            cause=done.cause,
            metrics=metrics,
            record=record,
            others=shares[1:],
        )
        failpoints.reach("apply_mid")
        return Booked(record=record, metrics=metrics)

    return ledger.call(apply)
