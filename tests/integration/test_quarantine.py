"""A poison task is set aside with its reason and released again; outages put nothing aside."""

from typing import Any

import pytest

from domain.errors import ConfigError
from domain.rollouts import Task
from storage import quarantine, tasks
from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration

POISON = "poison"


class Epochs(Rehearsal):
    """Each batch draws the poison task and a sound one."""

    def tasks(self, batch: int) -> list[Task]:
        return [Task(POISON, {"n": 7}), Task(f"sound{batch}", {"n": batch})]

    def fail(self, group: int, error: str = "Env.reset raised ValueError: 7") -> None:
        """Every sample of the group fails for the last time."""
        self.start(group)
        self.do(
            "UPDATE attempts SET state = 'finished', status = 'infra_error', finished_at = now(), "
            "counts_as_failure = true, error_type = 'INFRA_ERROR', error = %s "
            "WHERE run_id = %s AND group_id = %s AND state = 'running'",
            error,
            self.run,
            group,
        )
        self.abandon(group)

    def next_two(self) -> tuple[int, int]:
        self.hand_over()
        groups = [group for group, place in self.states().items() if place == "submitted"]
        return groups[0], groups[1]

    def poisoned_step(self) -> int:
        """The poison task's group fails while the sound one goes well."""
        poison, sound = self.next_two()
        self.start(poison)
        self.complete(sound)
        self.fail(poison)
        self.train_step()
        return poison

    def train_step(self) -> None:
        self.planned()
        self.serve(self.apply())

    def train_empty(self) -> None:
        assert self.planned() == []
        self.apply(updated=False)

    def set_aside(self) -> list[tuple[str, str]]:
        return self.ledger.call(quarantine.set_aside, self.run, afterwards_s=0.0)


def begin(ledger: Ledger, **groups: Any) -> Epochs:
    config = configuration(
        groups={"quarantine_after": 2} | groups,
        schedule={"ahead": 0, "max_empty_batches": 50},
    )
    rehearsal = Epochs(ledger, config)
    rehearsal.begin()
    return rehearsal


def test_a_task_that_keeps_failing_is_set_aside_with_its_reason_and_not_drawn_again(
    ledger: Ledger,
) -> None:
    run = begin(ledger)
    for step in range(2):
        assert run.set_aside() == []
        run.poisoned_step()
        assert run.now().next_step == step + 1
    ((task, reason),) = run.set_aside()
    assert task == POISON
    assert reason == (
        "2 groups abandoned by its own failures; the last: Env.reset raised ValueError: 7"
    )
    assert run.set_aside() == []
    (row,) = ledger.call(quarantine.listed, run.run)
    assert (row.phase, row.released_at, len(row.task_sha256)) == ("reset", None, 64)
    run.hand_over()
    places = list(run.states().values())
    assert places.count("quarantined") == 1
    assert places.count("submitted") == 1


def test_a_released_task_is_drawn_again_and_counts_afresh(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(2):
        run.poisoned_step()
    run.set_aside()
    run.hand_over()  # sets this batch's group aside
    assert ledger.call(quarantine.release, run.run, POISON) == (1, 0)
    assert run.set_aside() == []
    assert run.group(run.poisoned_step())["task_id"] == POISON
    assert run.set_aside() == []  # one failure since the release
    with pytest.raises(ConfigError, match="not quarantined"):
        ledger.call(quarantine.release, run.run, POISON)


def test_a_group_whose_step_is_past_stays_set_aside(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(2):
        run.poisoned_step()
    run.set_aside()
    run.hand_over()
    (sound,) = [group for group, place in run.states().items() if place == "submitted"]
    run.complete(sound)
    run.train_step()
    assert ledger.call(quarantine.release, run.run, POISON) == (0, 1)


def test_losses_and_outages_put_no_task_aside(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(3):  # everything fails: the platform's fault
        for group in run.next_two():
            run.fail(group, "sampling failed: EngineUnavailable: no engine")
        run.train_empty()
    assert run.set_aside() == []
    for _ in range(2):  # lost, while other tasks go well
        poison, sound = run.next_two()
        run.start(poison)
        run.abandon(poison)
        run.do("UPDATE groups SET closed_cause = 'max_losses' WHERE group_id = %s", poison)
        run.complete(sound)
        run.train_step()
    assert run.set_aside() == []


def test_without_a_limit_no_task_is_set_aside(ledger: Ledger) -> None:
    run = begin(ledger, quarantine_after=None)
    for _ in range(4):
        run.poisoned_step()
    assert run.set_aside() == []


@pytest.mark.parametrize(
    ("error_type", "error", "phase"),
    [
        ("INFRA_ERROR", "Calculator.reset raised OSError: gone", "reset"),
        ("INFRA_ERROR", "Calculator.reward returned nan; a reward must be finite", "reward"),
        ("INFRA_ERROR", "the reward function 'check' returned no reward", "reward"),
        ("INFRA_ERROR", "sampling failed: EngineRefused: 400", "sampling"),
        ("TimeoutError", None, "timeout"),
        ("TIMED_OUT", "not finished", "timeout"),
        ("INFRA_ERROR", "something else", "rollout"),
    ],
)
def test_the_phase_is_read_from_the_error(error_type: str, error: str | None, phase: str) -> None:
    assert quarantine.phase_of(error_type, error) == phase


def test_hand_over_still_counts_what_is_set_aside(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(2):
        run.poisoned_step()
    run.set_aside()
    run.hand_over()
    row = run.rows("SELECT drawn, quarantined FROM balance WHERE run_id = %s", run.run)[0]
    assert row == {"drawn": 6, "quarantined": 1}
    assert ledger.call(tasks.registered, run.run, 0) == 0
