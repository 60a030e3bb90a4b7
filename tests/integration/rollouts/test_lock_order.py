"""Many workers, workflows and a trainer at once: no deadlock, no lost count, no second member."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from domain.errors import Fenced
from domain.messages import CloseAttempt, FinishGroup
from domain.rollouts import Segment, Status
from storage import attempts, cancelling, groups, segments
from storage.database import Tx

Make = Callable[..., Any]

SIZE, GROUPS, THREADS = 4, 6, 12


def stale(tx: Tx, run: str, seed: int) -> None:
    """As the trainer does at APPLY: cancels running attempts of several groups, in key order."""
    rng = random.Random(seed)
    rows = tx.execute(
        """SELECT group_id, sample, attempt FROM attempts
        WHERE run_id = %s AND state = 'running' AND cancel_cause IS NULL""",
        (run,),
    ).fetchall()
    chosen = [r for r in rows if rng.random() < 0.1]
    cancelling.signal_attempts(
        tx, run, [(r["group_id"], r["sample"], r["attempt"]) for r in chosen], "stale"
    )


@pytest.mark.parametrize("on_stragglers", ["truncate", "discard", "carry_over", None])
def test_no_deadlocks_and_the_counts_agree(make: Make, on_stragglers: str | None) -> None:
    completion = (
        {"mode": "wait"}
        if on_stragglers is None
        else {
            "mode": "deadline",
            "min_members": 2,
            "max_straggler_tokens": 20,
            "on_stragglers": on_stragglers,
        }
    )
    b = make(
        groups={
            "size": SIZE,
            "oversample": 1,
            "max_attempts": 20,
            "max_stale": 50,
            "completion": completion,
        },
        schedule={
            "order": "deadline",
            "stale_policy": "mask_span",
            "allow_trajectory_loss": True,
        },
        trainer={"estimator": "batch"},
    )
    numbers = [b.group() for _ in range(GROUPS)]
    deadlocks: list[str] = []

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return b.ledger.call(function, *args, **kwargs)
        except psycopg.errors.DeadlockDetected as error:
            deadlocks.append(str(error))
            raise

    def attempt(group: int, sample: int, number: int, rng: random.Random) -> Any:
        i = b.key(group, sample, number)
        started = call(attempts.start, i, worker="w")
        if started.ended is not None:
            return call(groups.close_attempt, closing(group, sample, number, "cancelled"))
        ids: list[int] = []
        for seq in range(rng.randrange(1, 5)):
            prompt = [*ids, 7]
            segment = Segment(prompt, [1] * 8, [-0.5] * 8, "stop", 0)
            place = segments.Place(seq=seq, turn=seq, chain=0, context_start=len(ids) if seq else 0)
            progress = call(
                segments.append,
                b.run,
                group,
                sample,
                number,
                started.fence,
                segment,
                place=place,
                engine="e",
            )
            ids = [*prompt, *segment.sampled_ids]
            if progress.cancel_cause is not None or rng.random() < 0.1:
                status = (
                    Status.CANCELLED if progress.cancel_cause is not None else Status.INFRA_ERROR
                )
                call(attempts.finish, i, started.fence, attempts.Ending(status=status))
                cause = "cancelled" if status is Status.CANCELLED else "infra_error"
                return call(groups.close_attempt, closing(group, sample, number, cause))
            if progress.deadline and on_stragglers == "truncate":
                end = attempts.Ending(status=Status.TRUNCATED, cause="group_deadline")
                return call(attempts.finish, i, started.fence, end)
        end = attempts.Ending(status=Status.COMPLETED, reward=1.0)
        ref = call(attempts.finish, i, started.fence, end)
        if not ref.member and ref.resubmit is not None:
            return call(groups.close_attempt, closing(group, sample, number, ref.resubmit))
        return ref

    def closing(group: int, sample: int, number: int, cause: str) -> CloseAttempt:
        return CloseAttempt(
            run=b.run, group=group, gen=0, sample=sample, attempt=number, cause=cause
        )

    def sample(group: int, number: int) -> None:
        rng = random.Random(group * 100 + number)
        following: Any = 0
        while following is not None:
            try:
                answer = attempt(group, number, following, rng)
            except Fenced:
                return
            following = getattr(answer, "next_attempt", None)

    def trainer(seed: int) -> None:
        call(stale, b.run, seed)

    with ThreadPoolExecutor(THREADS) as pool:
        work = [pool.submit(sample, g, s) for g in numbers for s in range(SIZE + 1)]
        work += [pool.submit(trainer, seed) for seed in range(10)]
        random.Random(0).shuffle(work)
        for done in work:
            done.result(timeout=60)
    assert deadlocks == []
    for group in numbers:
        sampled = b.sql(
            """SELECT a.policy_tokens, coalesce(sum(s.tokens), 0) AS tokens FROM attempts a
            LEFT JOIN segments s USING (run_id, group_id, sample, attempt)
            WHERE a.run_id = %s AND a.group_id = %s GROUP BY a.sample, a.attempt, a.policy_tokens""",
            b.run,
            group,
        )
        assert all(row["policy_tokens"] == row["tokens"] for row in sampled)
        members = b.members(group)
        assert len(members) == len(set(members)) <= SIZE
        if on_stragglers is None:
            assert len(members) == SIZE
        live = b.sql(
            """SELECT 1 FROM attempts WHERE run_id = %s AND group_id = %s AND status IS NULL""",
            b.run,
            group,
        )
        assert live == []
        finish = FinishGroup(run=b.run, group=group, gen=0, outcome="complete")
        verdict = b.ledger.call(groups.finish, finish)
        assert verdict.state == "complete"
        assert len(b.queued(group)) == 1
