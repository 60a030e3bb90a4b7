"""Recompute past steps from the ledger and a checkpoint, and compare what they make.

Reads only: no lease, no fence, nothing is written, so a run can be audited while it trains. A step
is exact if its plan, its rollouts and the state before it give the very weights that were booked.
If not, every input that the ledger has a digest of is compared, and what differs is named. A run of
several ranks is recomputed by as many processes, since the order of a sum is part of its bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from domain.errors import LedgerError
from domain.services import Services
from storage import checkpoints, inputs, plans, runs, scratch, segments
from storage.database import Ledger, Tx, canonical
from storage.objects import ObjectStore
from storage.plans import Planned
from storage.runs import Run
from trainer import determinism, devices
from trainer.batch import Batch
from trainer.creation import Workshop
from trainer.determinism import World
from trainer.model import weights_digest
from trainer.ranks import Ranks
from trainer.update import Learner
from trainer.waiting import Unfenced, Waits

PATIENCE_S = 60.0
ALONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of recomputing one step."""

    run: str
    step: int
    checkpoint: int
    """The checkpoint it was recomputed from."""
    exact: bool
    booked: str
    """Digest of the weights after the step, as the ledger has it; hex."""
    recomputed: str
    groups: int
    updated: bool
    differences: tuple[str, ...] = ()
    """Inputs that are not what they were when the step was booked; empty if it is exact."""


def step(
    run: str, services: Services, number: int, *, environ: Mapping[str, str] = ALONE
) -> Verdict:
    """Recompute one step from the newest readable checkpoint before it.

    Raises:
        LedgerError: the step was not applied.
        DigestMismatch: no checkpoint before it can be read.
    """
    for verdict in replay(run, services, first=None, last=number, environ=environ):
        if not verdict.exact or verdict.step == number:
            return verdict
    raise AssertionError("the last step is always judged")


def replay(
    run: str,
    services: Services,
    *,
    first: int | None,
    last: int | None = None,
    environ: Mapping[str, str] = ALONE,
) -> Iterator[Verdict]:
    """Recompute steps in order, up to and including the first that is not exact.

    Args:
        run: its name.
        services: Postgres and the object store.
        first: the checkpoint to start from; None for the newest before `last`.
        last: the last step; None for the newest one applied.
        environ: holds torchrun's variables if this is one of several processes that recompute a run
            of as many ranks; each of them gets the same verdicts.

    Raises:
        LedgerError: `last` was not applied, there is no checkpoint `first`, or the run has another
            number of ranks.
        DigestMismatch: the checkpoints cannot be read.
    """
    with (
        closing(Ledger.open(services.database_url, pool=1, application=f"audit {run}")) as ledger,
        ExitStack() as stack,
    ):
        found = ledger.call(runs.read, run)
        readers = found.config.trainer.readers
        joined = Ranks.joined(environ, timeout_s=2 * PATIENCE_S, readers=readers)
        ranks = stack.enter_context(joined)
        if (wanted := found.shares * readers) != ranks.size:
            raise LedgerError(
                f"run {run} was trained by {wanted} ranks, whose gradients {ranks.size} cannot "
                f"add up in the same order; `rollbook audit {run}` starts as many as it takes"
            )
        final = found.next_step - 1 if last is None else last
        if not found.first_step <= final < found.next_step:
            raise LedgerError(
                f"step {final} of run {run} was not applied; its steps are {found.first_step} to "
                f"{found.next_step - 1}"
            )
        with scratch.folder("audit") as place:
            waits = Waits(lambda: False, Unfenced(), patience_s=PATIENCE_S)
            store = ObjectStore(services)
            workshop = Workshop(ledger, store, place, waits, run, found.epoch, ranks)
            with ranks.sums():
                yield from _replay(workshop, found, first, final)


def oldest(run: str, services: Services) -> int:
    """The oldest checkpoint of a run that is still kept.

    Raises:
        LedgerError: the run has none.
    """
    with closing(Ledger.open(services.database_url, pool=1, application=f"audit {run}")) as ledger:
        return ledger.call(checkpoints.oldest, run).step


def _replay(workshop: Workshop, found: Run, first: int | None, last: int) -> Iterator[Verdict]:
    learner, state = workshop.restore(found, at_most=last if first is None else first)
    if first is not None and state.step != first:
        raise LedgerError(
            f"run {found.id} has no readable checkpoint {first}; the newest before it is "
            f"{state.step}"
        )
    version = state.version
    before = state.weights_sha256
    for number in range(state.step, last + 1):
        plan = workshop.ledger.call(plans.read, found.id, number)
        assert plan is not None, f"applied step {number} has no plan"
        booked = workshop.ledger.call(_booked, found.id, number)
        outcome = _compute(workshop.ledger, found, learner, number, version)
        mine = weights_digest(learner.policy.weights()).hex()
        digests = workshop.ranks.exchange("digest", mine)
        # Of several ranks, the first that made other weights than were booked speaks for all.
        digest = bytes.fromhex(
            next((d for d in digests if d != booked["weights_sha256"].hex()), mine)
        )
        exact = (digest, outcome) == (booked["weights_sha256"], booked["updated"])
        yield Verdict(
            run=found.id,
            step=number,
            checkpoint=state.step,
            exact=exact,
            booked=booked["weights_sha256"].hex(),
            recomputed=digest.hex(),
            groups=len(plan.rows),
            updated=outcome,
            differences=() if exact else tuple(_differences(workshop.ledger, found, plan, before)),
        )
        if not exact:
            return
        version, before = version + outcome, digest


def _compute(ledger: Ledger, run: Run, learner: Learner, number: int, version: int) -> bool:
    """Take this rank's part of the step; whether it moved the weights."""
    share = learner.ranks.share
    plan = ledger.call(plans.read, run.id, number, share)
    determinism.seed_step(run.config.seed, number, share)
    rows = [(row.group, row.part) for row in plan.rows] if plan else []
    groups = ledger.call(segments.members, run.id, rows) if rows else []
    return learner.step(Batch(groups=groups), version).updated


def _differences(ledger: Ledger, run: Run, plan: Planned, before: bytes) -> Iterator[str]:
    """The inputs of a step that are not what was booked."""
    threads = int(run.world["threads"])
    here = World.here(threads, devices.current(), shares=run.shares)
    if changed := World.read(run.world).differences(here):
        yield f"world: {changed}"
    row = ledger.call(_other_digests, run.id, plan.step)
    if (
        bytes(row["config_sha256"])
        != sha256(canonical(run.config.model_dump(mode="json"))).digest()
    ):
        yield "configuration: it is not the one that the run was created with"
    if row["plan_sha256"] is not None and bytes(row["plan_sha256"]) != row["plan_now"]:
        yield "plan: other groups are bound to the step than were when it was applied"
    booked, now = row["inputs"] or {}, row["inputs_now"]
    for part in sorted(booked):
        present = now.get(part, {})
        changed_kinds = [k for k in inputs.KINDS if booked[part].get(k) != present.get(k)]
        if changed_kinds:
            named = ", ".join(inputs.KINDS[kind] for kind in changed_kinds)
            yield f"rollouts: {named} of group {part} have changed since"
    if row["weights_before"] is not None and bytes(row["weights_before"]) != before:
        yield (
            f"weights before the step: {before.hex()[:16]}, booked were "
            f"{bytes(row['weights_before']).hex()[:16]}"
        )


def _booked(tx: Tx, run: str, number: int) -> dict[str, Any]:
    row = tx.execute(
        "SELECT updated, weights_sha256 FROM steps WHERE run_id = %s AND step = %s", (run, number)
    ).fetchone()
    assert row is not None
    return {"updated": row["updated"], "weights_sha256": bytes(row["weights_sha256"])}


def _other_digests(tx: Tx, run: str, number: int) -> dict[str, Any]:
    row = tx.execute(
        """
        SELECT r.config_sha256, s.plan_sha256, h.record->'inputs' AS inputs, b.weights_sha256 AS weights_before
        FROM runs r JOIN steps s ON s.run_id = r.run_id AND s.step = %s
        LEFT JOIN step_shares h ON (h.run_id, h.step, h.share) = (s.run_id, s.step, 0)
        LEFT JOIN steps b ON b.run_id = r.run_id AND b.step = s.step - 1
        WHERE r.run_id = %s
        """,
        (number, run),
    ).fetchone()
    assert row is not None
    return row | {
        "plan_now": plans.digest(tx, run, number),
        "inputs_now": inputs.digests(tx, run, number),
    }
