"""Task groups from the data to the workflows: registration and hand-over.

What was drawn is recorded with its content's hash, so that a resumed run draws the same or stops.
Hand-over is part of every poll, not of every step: a group that ended without training frees its
place at once, otherwise too few groups are left and the run hangs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from domain.errors import ConfigError, DataChanged, LedgerError
from domain.rollouts import Task
from domain.shares import Division
from domain.staleness import submit_gate
from storage import runs, submission, versions
from storage.database import Tx, canonical, jsonb
from storage.runs import Run

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """What one hand-over did and what it needs."""

    submitted: int  # groups handed over now
    need_batch: int | None  # register this batch (or the end of the data), then call again
    outstanding: int  # groups that hold a place of a coming step, after this call


def register_batch(
    tx: Tx,
    run: str,
    epoch: int,
    share: int,
    batch: int,
    tasks: Sequence[Task],
    position: Mapping[str, Any],
) -> None:
    """Record the tasks of one batch as groups; a repetition must have the same content.

    `batch` counts from 0 in this share's data; `position` is where the data stands after it.

    Raises:
        DataChanged: the batch was recorded with other tasks, or lies beyond the recorded end.
        ConfigError: more tasks than `tasks.batch_size`, or a task that is no JSON.
    """
    owner = runs.fence(tx, run, epoch)
    size = owner.config.tasks.batch_size
    if not 1 <= len(tasks) <= size:
        raise ConfigError(
            f"batch {batch} has {len(tasks)} tasks; it must have 1 to tasks.batch_size = {size}"
        )
    digest = _content(tasks)
    known = tx.execute(
        "SELECT content_sha256, tasks FROM task_batches "
        "WHERE run_id = %s AND share = %s AND batch = %s",
        (run, share, batch),
    ).fetchone()
    if known is not None:
        if bytes(known["content_sha256"]) != digest:
            raise DataChanged(_difference(tx, run, share, batch, tasks))
        return
    drawn, end = progress(tx, run, share)
    if end is not None:
        raise DataChanged(
            f"run {run} recorded that its data ends after {end} batches, now there is batch "
            f"{batch}; restore the data set, or start a new run"
        )
    # One before it may lack where other trainer processes took the run over: see `fork`.
    if batch > drawn:
        raise LedgerError(f"batch {batch} of run {run} comes out of order; next is {drawn}")
    tx.execute(
        "INSERT INTO task_batches(run_id, batch, share, tasks, groups, data_position, "
        "content_sha256) VALUES (%s, %s, %s, %s, %s, %s, %s)",
        (run, batch, share, len(tasks), len(tasks), jsonb(position), digest),
    )
    environment = owner.config.environment_of
    # Numbers follow from the place in the data alone: the same data makes the same groups.
    first = Division.of(owner.world, owner.shares).place(share, batch) * size
    with tx.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO groups(run_id, group_id, batch, share, pos, environment, task_id, task) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
            [
                (
                    run,
                    first + pos,
                    batch,
                    share,
                    pos,
                    environment(task.id),
                    task.id,
                    jsonb(task.data),
                )
                for pos, task in enumerate(tasks)
            ],
        )


def end_of_data(tx: Tx, run: str, epoch: int, share: int, batches: int) -> None:
    """Record that the data has `batches` batches and no more.

    Raises:
        DataChanged: more were drawn, or another end was recorded.
    """
    runs.fence(tx, run, epoch)
    drawn, end = progress(tx, run, share)
    if drawn > batches or end not in (None, batches):
        before = f"ended after {end}" if end is not None else f"had at least {drawn}"
        raise DataChanged(
            f"the data of run {run} {before} batches and now ends after {batches}; restore the "
            "data set, or start a new run"
        )
    tx.execute(
        "UPDATE shares SET data_end = %s WHERE run_id = %s AND share = %s", (batches, run, share)
    )


def hand_over(tx: Tx, run: str, epoch: int, share: int) -> HandedOver:
    """Submit registered groups as far as `ahead` and the submit gate allow.

    Under order `dataset` those of the batches up to next_step + ahead; otherwise as many as keep
    (ahead + 1)·B outstanding. Rows of a step that is planned but not applied still hold their
    place. Nothing beyond the run's last step is handed over, and nothing while the run is paused
    or before a version is served.

    Raises:
        RunStopped, SourceBroken: the run has stopped.
    """
    owner = runs.fence(tx, run, epoch)
    runs.ensure_open(owner)
    holding = _outstanding(tx, run, share)
    served = versions.served(tx, run)
    if owner.state == "paused" or owner.ended or served is None:
        return HandedOver(submitted=0, need_batch=None, outstanding=len(holding))
    _quarantine(tx, owner, share)
    candidates, need = _candidates(tx, owner, share, len(holding))
    schedule = owner.config.schedule
    if schedule.stale_policy == "wait":
        allowed = submit_gate(
            owner.version,
            owner.config.tasks.batch_size,
            schedule.max_lag,
            holding,
            served,
            len(candidates),
        )
        candidates = candidates[:allowed]
    ids = sorted(group for group, _ in candidates)
    tx.execute(
        "SELECT 1 FROM groups WHERE run_id = %s AND group_id = ANY(%s) ORDER BY group_id "
        "FOR NO KEY UPDATE",
        (run, ids),
    )
    for group in ids:
        samples = submission.missing_samples(tx, owner, group)
        submission.submit(tx, owner, group, samples, served)
    if candidates:
        tx.execute(
            "UPDATE shares SET handed_over = greatest(handed_over, %s) "
            "WHERE run_id = %s AND share = %s",
            (max(batch for _, batch in candidates), run, share),
        )
    return HandedOver(submitted=len(ids), need_batch=need, outstanding=len(holding) + len(ids))


def registered(tx: Tx, run: str, share: int) -> int:
    """Groups that wait for their hand-over."""
    row = tx.execute(
        "SELECT count(*) AS n FROM groups "
        "WHERE run_id = %s AND share = %s AND state = 'registered'",
        (run, share),
    ).fetchone()
    assert row is not None
    return int(row["n"])


def progress(tx: Tx, run: str, share: int) -> tuple[int, int | None]:
    """The next batch to draw, and how many there are in all once the end was seen."""
    row = tx.execute(
        "SELECT s.data_end, coalesce((SELECT max(b.batch) + 1 FROM task_batches b "
        "WHERE (b.run_id, b.share) = (s.run_id, s.share)), "
        "(r.config #>> '{world,division,batch}')::int, 0) AS drawn "
        "FROM shares s JOIN runs r USING (run_id) WHERE s.run_id = %s AND s.share = %s",
        (run, share),
    ).fetchone()
    if row is None:
        raise LedgerError(f"run {run} has no share {share}")
    return int(row["drawn"]), row["data_end"]


def _candidates(
    tx: Tx, run: Run, share: int, holding: int
) -> tuple[list[tuple[int, int]], int | None]:
    """Registered `(group, batch)` that may be submitted, in data order, and the batch that lacks.

    A group that its environment's `in_flight` holds back keeps its place: the groups behind it that
    have a place of their own may start before it, but none is drawn in its stead, so that a slow
    environment never loses its share.
    """
    schedule, size = run.config.schedule, run.config.tasks.batch_size
    drawn, end = progress(tx, run.id, share)
    last_step = None if run.config.steps is None else run.config.steps - 1
    if schedule.order == "dataset":
        last = run.next_step + schedule.ahead
        if last_step is not None:
            last = min(last, last_step)
        rows = tx.execute(
            "SELECT group_id, batch, environment FROM groups WHERE run_id = %s AND share = %s "
            "AND state = 'registered' AND batch <= %s ORDER BY batch, pos",
            (run.id, share, last),
        ).fetchall()
        lacks = drawn <= last
    else:
        places = (schedule.ahead + 1) * size
        if last_step is not None:
            places = min(places, (last_step + 1 - run.next_step) * size)
        places = max(0, places - holding)
        rows = tx.execute(
            "SELECT group_id, batch, environment FROM groups WHERE run_id = %s AND share = %s "
            "AND state = 'registered' ORDER BY batch, pos LIMIT %s",
            (run.id, share, places),
        ).fetchall()
        lacks = len(rows) < places
    need = drawn if lacks and end is None else None
    return [(row["group_id"], row["batch"]) for row in _within_limits(tx, run, rows)], need


def _within_limits(tx: Tx, run: Run, rows: list[Row]) -> list[Row]:
    """Those that their environments' `in_flight` leaves room for, beside what is sampled now.

    Counted under the run's row lock, which every submission holds: two hand-overs cannot both take
    the last place. A group that is re-opened goes on at once, whatever the limit.
    """
    limits = {m.environment: m.in_flight for m in run.config.tasks.mix if m.in_flight is not None}
    if not limits:
        return rows
    busy = tx.execute(
        "SELECT environment, count(*) AS n FROM groups WHERE run_id = %s AND state = 'submitted' "
        "AND environment = ANY(%s) GROUP BY 1",
        (run.id, list(limits)),
    ).fetchall()
    room = limits | {row["environment"]: limits[row["environment"]] - row["n"] for row in busy}
    chosen = []
    for row in rows:
        left = room.get(row["environment"])
        if left is not None:
            if left <= 0:
                continue
            room[row["environment"]] = left - 1
        chosen.append(row)
    return chosen


def _outstanding(tx: Tx, run: str, share: int) -> list[int]:
    """Oldest versions of the groups that hold a place of a coming step."""
    rows = tx.execute(
        """
        SELECT version FROM outstanding WHERE run_id = %(run)s AND share = %(share)s
        UNION ALL
        SELECT oldest_version FROM queue
        WHERE run_id = %(run)s AND share = %(share)s AND state = 'planned'
        """,
        {"run": run, "share": share},
    ).fetchall()
    return [row["version"] for row in rows]


def _quarantine(tx: Tx, run: Run, share: int) -> None:
    """Set registered groups of poison tasks aside; a person releases them."""
    tx.execute(
        """
        UPDATE groups g SET state = 'quarantined', closed_cause = 'quarantine', closed_step = %s
        WHERE g.run_id = %s AND g.share = %s AND g.state = 'registered' AND EXISTS (
            SELECT 1 FROM quarantine q WHERE (q.run_id, q.task_id) = (g.run_id, g.task_id)
                AND q.released_at IS NULL)
        """,
        (run.next_step, run.id, share),
    )


def _content(tasks: Sequence[Task]) -> bytes:
    try:
        return sha256(canonical([[task.id, task.data] for task in tasks])).digest()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task data must be JSON values: {error}") from error


def _difference(tx: Tx, run: str, share: int, batch: int, tasks: Sequence[Task]) -> str:
    rows = tx.execute(
        "SELECT task_id FROM groups WHERE run_id = %s AND share = %s AND batch = %s ORDER BY pos",
        (run, share, batch),
    ).fetchall()
    recorded = [row["task_id"] for row in rows]
    now = [task.id for task in tasks]
    what = (
        "the same task ids with other content"
        if recorded == now
        else f"tasks {recorded[:5]}, now it has {now[:5]}"
    )
    return (
        f"batch {batch} of run {run} was recorded with {what}; restore the data set, its order and "
        "seed, or start a new run"
    )
