"""The slack that people see, in the view `waiting` and in the step record, against W1 to W20."""

from storage import holds
from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration
from tests.wait_vectors import VECTORS, Vector


def outstanding(ledger: Ledger, name: str, *shares: Vector) -> Rehearsal:
    """A run at the vectors' version; in each share one vector's groups are sampled, nothing else is."""
    current, groups, bound = shares[0].current, shares[0].groups, shares[0].bound
    assert {w[1:4] for w in shares} == {(current, groups, bound)}
    config = configuration(
        name=name,
        tasks={"batch_size": groups},
        groups={"size": 1},
        schedule={"order": "deadline", "stale_policy": "wait", "max_lag": bound, "ahead": bound},
        trainer={"estimator": "mean"},
    )
    run = Rehearsal(ledger, config).begin(shares=len(shares))
    for share in range(len(shares)):
        run.share = share
        run.hand_over()
    run.do(
        """INSERT INTO policy_versions(run_id, version, weights_sha256, state, trainer_epoch)
        SELECT run_id, n, weights_sha256, 'computed', 1 FROM policy_versions,
            generate_series(1, %s) AS n WHERE run_id = %s AND version = 0""",
        current,
        name,
    )
    run.do("UPDATE runs SET version = %s, next_step = %s WHERE run_id = %s", current, current, name)
    for share, w in enumerate(shares):
        ids = run.rows(
            "SELECT group_id FROM groups WHERE run_id = %s AND share = %s AND state = 'submitted' "
            "ORDER BY 1",
            name,
            share,
        )
        for place, row in enumerate(ids):
            group = row["group_id"]
            if place >= len(w.outstanding):
                run.abandon(group)
                continue
            run.start(group)
            run.do(
                "UPDATE attempts SET oldest_version = %s, newest_version = %s "
                "WHERE run_id = %s AND group_id = %s",
                *[w.outstanding[place]] * 2,
                name,
                group,
            )
    return run


def seen(run: Rehearsal) -> list[tuple[int | None, int | None]]:
    """Of each share."""
    rows = run.rows(
        "SELECT slack, binding_deadline FROM waiting WHERE run_id = %s ORDER BY share", run.run
    )
    return [(row["slack"], row["binding_deadline"]) for row in rows]


def shown(w: Vector) -> tuple[int | None, int | None]:
    return (w.slack if w.outstanding else None, w.deadline)


def test_what_people_see_is_the_rule(ledger: Ledger) -> None:
    for number, w in enumerate(VECTORS, 1):
        run = outstanding(ledger, f"w{number}", w)
        assert seen(run) == [shown(w)], w.name
        assert ledger.call(holds.gauge, run.now()) == {"staleness/slack": w.slack}, w.name


def test_of_two_shares_the_record_tells_the_one_with_less(ledger: Ledger) -> None:
    roomy, tight, full = VECTORS[1:4]
    for name, shares in (("a", (roomy, tight)), ("b", (tight, roomy)), ("c", (full, full))):
        run = outstanding(ledger, name, *shares)
        assert seen(run) == [shown(w) for w in shares]
        least = min(w.slack for w in shares)
        assert ledger.call(holds.gauge, run.now()) == {"staleness/slack": least}


def test_where_nothing_is_waited_for_there_is_no_slack(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"order": "deadline"})).begin()
    run.hand_over()
    assert seen(run)[0][0] is None
    assert ledger.call(holds.gauge, run.now()) == {}
