"""A loop of one's own with real workers and a real engine; its source exists in this process only."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from domain.environments import Outcome, Recorder
from domain.rollouts import Status, Task
from domain.services import Services
from rollbook import EnginePublisher, RolloutScheduler
from storage.database import Ledger, upgrade
from tests.ledger_fixtures import check_invariants
from tests.own_loop import Scored, Trained, model_folder, update

BATCHES = [[2 * i, 2 * i + 1] for i in range(4)]


class Digits:
    """A session that samples twice, the second time on what came first; later tasks never end."""

    def __init__(self, endless_from: int) -> None:
        self.endless_from = endless_from
        self.waiting = self.cancelled = 0

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        prompt = [1, 2, int(task.id) % 10, 10]
        first = await recorder.sample(prompt, max_tokens=2)
        if int(task.id) >= self.endless_from:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        second = await recorder.sample([*prompt, *first.sampled_ids, 10], max_tokens=2)
        ids = [*first.sampled_ids, *second.sampled_ids]
        return Outcome(Status.COMPLETED, reward=sum(ids) / 48)


def to_tasks(batch: list[int]) -> list[Task]:
    return [Task(str(n)) for n in batch]


@pytest.fixture
def ledger(services: Services) -> Iterator[Ledger]:
    upgrade(services.database_url)
    opened = Ledger.open(services.database_url, pool=2, application="tests")
    yield opened
    opened.call(check_invariants)
    opened.close()


@pytest.mark.timeout(400)
def test_a_session_of_this_process_trains_and_stops_with_the_loop(
    services: Services, ledger: Ledger, tmp_path: Path
) -> None:
    folder, source = model_folder(tmp_path / "model"), Digits(endless_from=4)
    name = f"own{secrets.token_hex(4)}"

    def scheduler() -> RolloutScheduler:
        return RolloutScheduler(
            Scored(),
            source,
            EnginePublisher(folder),
            width=32,
            rows=4,
            tasks=to_tasks,
            estimator="mean",
            run=name,
            services=services,
            state=tmp_path / "state",
            budget={"max_generated_tokens": 8, "max_context_tokens": 32},
            engine={"threads": 1},
        )

    state = Trained(folder)
    with scheduler() as one:
        train(one, state, steps=2)
        saved = one.state_dict()
        wait_until(lambda: source.waiting == 8)  # batch 2, sampled ahead
        began = time.monotonic()
    assert source.cancelled == 8
    assert time.monotonic() - began < 40
    places = rows(
        ledger,
        "SELECT batch, place, count(*) AS n FROM group_place WHERE run_id = %s "
        "GROUP BY 1, 2 ORDER BY 1",
        name,
    )
    assert [(r["batch"], r["place"]) for r in places] == [
        (0, "trained"),
        (1, "trained"),
        (2, "registered"),
        (3, "registered"),
    ][: len(places)]
    assert (
        rows(ledger, "SELECT 1 FROM attempts WHERE run_id = %s AND state = 'running'", name) == []
    )

    source.endless_from = 99
    with scheduler() as again:
        again.load_state_dict(saved)
        assert train(again, state) == 2
    (run,) = rows(ledger, "SELECT state, next_step FROM runs WHERE run_id = %s", name)
    assert run == {"state": "finished", "next_step": 4}


def train(one: RolloutScheduler, state: Trained, *, steps: int = 99) -> int:
    done = 0
    for batch in one.tasks(BATCHES):
        packed = one(state, batch)
        assert packed["response_mask"].any()
        one.applied(updated=update(state, Scored(), packed))
        done += 1
        if done == steps:
            break
    return done


def wait_until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def rows(ledger: Ledger, query: str, *args: Any) -> list[dict[str, Any]]:
    with ledger.transaction() as tx:
        return tx.execute(query, args).fetchall()
