"""Submitting a group: its attempts and the command that starts its workflow, in one transaction."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from domain.ids import group_workflow_id
from domain.messages import GroupIn
from storage import outbox
from storage.database import Tx
from storage.runs import Run

CAP_FACTOR = 1.25
CAP_DEFAULT_S = 86_400.0


def missing_samples(tx: Tx, run: Run, group: int, *, prefer: Sequence[int] = ()) -> list[int]:
    """The sample indices to run: with spares when nothing ran yet, else what the members lack.

    `prefer` names indices to fill first; the rest are the lowest without a member.
    """
    size, spares = run.config.groups.size, run.config.groups.oversample
    rows = tx.execute(
        "SELECT sample, bool_or(member) AS member FROM attempts "
        "WHERE run_id = %s AND group_id = %s GROUP BY sample",
        (run.id, group),
    ).fetchall()
    if not rows:
        return list(range(size + spares))
    members = {row["sample"] for row in rows if row["member"]}
    free = [sample for sample in range(size + spares) if sample not in members]
    free.sort(key=lambda sample: (sample not in prefer, sample))
    return sorted(free[: size - len(members)])


def submit(
    tx: Tx,
    run: Run,
    group: int,
    samples: Sequence[int],
    served: int,
    *,
    reopened: bool = False,
) -> None:
    """Make a locked group `submitted` under `served` and write what its workflow needs.

    A re-opened group takes the next generation; one that was handed back by a close has it already.
    """
    row = tx.execute(
        "SELECT batch, gen, task_id, environment FROM groups WHERE run_id = %s AND group_id = %s",
        (run.id, group),
    ).fetchone()
    assert row is not None
    gen = row["gen"] + 1 if reopened else row["gen"]
    workflow = group_workflow_id(run.id, row["batch"], group, gen)
    tx.execute(
        """
        UPDATE groups SET state = 'submitted', gen = %s, workflow_id = %s, submitted_version = %s,
            submitted_at = now(), begun_at = NULL, quorum_at = NULL, deadline_reached_at = NULL
        WHERE run_id = %s AND group_id = %s
        """,
        (gen, workflow, served, run.id, group),
    )
    numbered = _insert_attempts(tx, run.id, group, gen, samples, served)
    held = tx.execute(
        """
        SELECT (SELECT count(*) FROM attempts a
                WHERE a.run_id = %(run)s AND a.group_id = %(group)s AND a.member) AS kept,
            EXISTS (SELECT 1 FROM queue q WHERE q.run_id = %(run)s AND q.group_id = %(group)s
                    AND q.part = 0 AND q.state <> 'expired') AS part0
        """,
        {"run": run.id, "group": group},
    ).fetchone()
    assert held is not None
    start = _group_in(run, group, gen, row, numbered, served, held["kept"], held["part0"])
    outbox.add(tx, run.id, "start_group", [(workflow, asdict(start))])


def _insert_attempts(
    tx: Tx, run: str, group: int, gen: int, samples: Sequence[int], served: int
) -> tuple[tuple[int, int], ...]:
    """New attempt rows, numbered after the earlier ones of their sample."""
    rows = tx.execute(
        """
        INSERT INTO attempts(run_id, group_id, sample, attempt, gen, submitted_version)
        SELECT %(run)s, %(group)s, s, coalesce((SELECT max(a.attempt) + 1 FROM attempts a
                WHERE (a.run_id, a.group_id, a.sample) = (%(run)s, %(group)s, s)), 0),
            %(gen)s, %(served)s
        FROM unnest(%(samples)s::int[]) AS s
        RETURNING sample, attempt
        """,
        {"run": run, "group": group, "gen": gen, "served": served, "samples": list(samples)},
    ).fetchall()
    return tuple(sorted((row["sample"], row["attempt"]) for row in rows))


def _group_in(
    run: Run,
    group: int,
    gen: int,
    row: dict[str, Any],
    samples: tuple[tuple[int, int], ...],
    served: int,
    kept: int,
    part0: bool,
) -> GroupIn:
    groups = run.config.groups
    deadline = groups.completion.mode == "deadline"
    return GroupIn(
        run=run.id,
        group=group,
        gen=gen,
        batch=row["batch"],
        task=row["task_id"],
        environment=row["environment"],
        size=groups.size,
        samples=samples,
        kept=kept,
        submitted_version=served,
        timeout_s=groups.timeout,
        heartbeat_s=groups.heartbeat,
        hard_cap_s=CAP_FACTOR * groups.timeout if groups.timeout else CAP_DEFAULT_S,
        completion=groups.completion.mode,
        min_members=groups.completion.min_members if deadline else None,
        on_stragglers=groups.completion.on_stragglers if deadline else None,
        part0_admitted=part0,
    )
