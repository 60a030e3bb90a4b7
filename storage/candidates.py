"""What PLAN decides about: the admitted rows and the groups still sampled, in one snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass

from domain.groups import baseline_reward, overlong_penalty, teaches, trains, truncation_policy
from domain.planning import Ready, Running
from domain.rollouts import Status
from storage import tasks
from storage.database import Tx
from storage.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The arguments of `domain.planning.plan` that come from tables."""

    ready: tuple[Ready, ...]
    running: tuple[Running, ...]
    gens: Mapping[tuple[int, int | None], int]  # (group, part or None) -> generation seen
    exists: bool  # order `dataset`: the batch lies within the data
    drawn: bool  # order `dataset`: the batch is registered
    draining: bool  # the data ended and nothing is registered


def read(tx: Tx, run: Run, share: int, step: int) -> Candidates:
    """Read them without locks; under order `dataset` those of batch `step` alone."""
    dataset = run.config.schedule.order == "dataset"
    drawn, end = tasks.progress(tx, run.id, share)
    rows = tx.execute(
        """
        SELECT q.group_id, q.gen, q.part, q.admitted_seq AS seq, q.oldest_version AS version,
            q.chain_lengths AS lengths, g.batch, g.pos, true AS ready
        FROM queue q JOIN groups g USING (run_id, group_id)
        WHERE q.run_id = %(run)s AND q.share = %(share)s AND q.state = 'admitted'
            AND (%(batch)s::int IS NULL OR g.batch = %(batch)s)
        UNION ALL
        SELECT g.group_id, g.gen, 0, 0, coalesce(o.version, %(version)s), NULL, g.batch, g.pos, false
        FROM groups g LEFT JOIN outstanding o ON (o.run_id, o.group_id) = (g.run_id, g.group_id)
            AND NOT o.ready
        WHERE g.run_id = %(run)s AND g.share = %(share)s
            AND CASE WHEN %(batch)s::int IS NULL THEN g.state = 'submitted'
                ELSE g.batch = %(batch)s AND g.state IN ('submitted', 'registered') END
        ORDER BY ready DESC, seq, group_id
        """,
        {
            "run": run.id,
            "share": share,
            "batch": step if dataset else None,
            "version": run.version,
        },
    ).fetchall()
    flat = _without_variance(tx, run, [r["group_id"] for r in rows if r["ready"]])
    return Candidates(
        ready=tuple(
            Ready(
                group=row["group_id"],
                part=row["part"],
                seq=row["seq"],
                version=row["version"],
                lengths=tuple(row["lengths"]),
                batch=row["batch"],
                pos=row["pos"],
                zero_variance=(row["group_id"], row["part"]) in flat,
            )
            for row in rows
            if row["ready"]
        ),
        running=tuple(Running(row["group_id"], row["version"]) for row in rows if not row["ready"]),
        gens={(row["group_id"], row["part"] if row["ready"] else None): row["gen"] for row in rows},
        exists=step < drawn or end is None or step < end,
        drawn=step < drawn,
        draining=end is not None and tasks.registered(tx, run.id, share) == 0,
    )


def _without_variance(tx: Tx, run: Run, groups: list[int]) -> set[tuple[int, int]]:
    """Parts of these groups that teach nothing at the rewards they train at, if such are filtered."""
    if not run.config.schedule.filter_zero_variance:
        return set()
    trainer = run.config.trainer
    parts: dict[tuple[int, int], list[tuple[float | None, bool]]] = {}
    for row in tx.execute(
        "SELECT group_id, part, status, reward, truncation, policy_tokens FROM attempts "
        "WHERE run_id = %s AND group_id = ANY(%s) AND member AND part IS NOT NULL",
        (run.id, groups),
    ):
        policy = truncation_policy(
            trainer.truncation, trainer.truncation_by_cause, row["truncation"]
        )
        status = Status(row["status"])
        reward = baseline_reward(status, row["reward"], policy)
        if reward is not None and trainer.overlong is not None:
            reward += overlong_penalty(row["policy_tokens"], *trainer.overlong)
        members = parts.setdefault((row["group_id"], row["part"]), [])
        members.append((reward, trains(status, policy)))
    return {key for key, members in parts.items() if not teaches(members)}
