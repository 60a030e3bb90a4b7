"""PLAN, APPLY and hand-over through the ledger: the vectors of the scheduler on real tables."""

from storage.database import Ledger
from storage.steps import Waiting
from tests.rehearsal import Rehearsal, configuration


def test_a_run_trains_batch_after_batch(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(), batches=3).begin()
    assert run.hand_over().submitted == 4  # batches 0 and 1: ahead = 1
    trained = []
    for step in range(3):
        for group in (2 * step + 1, 2 * step):
            run.complete(group)
        trained.append(run.planned())
        assert run.apply() == step + 1
        run.serve(step + 1)
        run.checkpoint()
        run.hand_over()
    assert trained == [[0, 1], [2, 3], [4, 5]]
    end = run.plan()
    assert isinstance(end, Waiting)
    assert end.kind == "end"
    assert set(run.states().values()) == {"trained"}
