"""A step goes on when every share has planned it: this rank beside one whose votes are given."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import pytest

from storage.plans import Planned, Waiting
from trainer.consumer import Consumer, End
from trainer.ranks import Ranks
from trainer.waiting import Kind, Unfenced, Waits

T = TypeVar("T")
PLAN = Planned(step=3, version_before=2, rows=(), replayed=False)
WAIT = Waiting(kind="wait", reason="1 of 2 groups")
ENDED = Waiting(kind="end", reason="the data has ended")


class Beside(Ranks):
    """Rank 0 of two, the other of which votes as told, the last vote for ever."""

    def __init__(self, votes: Sequence[tuple[str, str]]) -> None:
        super().__init__(0, 2)
        self.votes = list(votes)
        self.pauses: list[tuple[Kind, str]] = []

    def together(self, what: str, act: Callable[[], T]) -> T:
        return act()

    def exchange(self, what: str, value: T) -> list[T]:
        assert what == "vote"
        other: Any = self.votes.pop(0) if len(self.votes) > 1 else self.votes[0]
        return [value, other]

    def pause(self, waits: Waits, kind: Kind, reason: str) -> float:
        self.pauses.append((kind, reason))
        return 0.0


def asked(votes: Sequence[tuple[str, str]], answers: Sequence[Planned | Waiting]) -> Any:
    """What the consumer comes to, and what it waited for."""
    ranks, left = Beside(votes), list(answers)
    waits = Waits(lambda: False, Unfenced(), patience_s=1)
    none = cast(Any, None)
    consumer = Consumer(none, "r", 1, none, waits, ranks)
    consumer._poll = lambda _: left.pop(0) if len(left) > 1 else left[0]  # type: ignore[method-assign, assignment]
    return consumer.next_plan(3), ranks.pauses


PLANNED = ("planned", "")


@pytest.mark.parametrize(
    ("votes", "answers", "waits"),
    [
        ([PLANNED], [PLAN], []),
        ([PLANNED], [WAIT, PLAN], [("groups", "1 of 2 groups")]),
        ([("wait", "0 of 2 groups"), PLANNED], [PLAN], [("groups", "0 of 2 groups")]),
        ([("hold", "g7 would be too old"), PLANNED], [PLAN], [("hold", "g7 would be too old")]),
        # A hold says why the step waits, whatever else another share lacks.
        ([("hold", "g7"), PLANNED], [WAIT, PLAN], [("hold", "g7")]),
        ([("paused", "by a person"), PLANNED], [PLAN], [("paused", "by a person")]),
        # A share whose data has ended answers with a plan without groups while others have some.
        ([PLANNED], [ENDED, PLAN], [("groups", "the data has ended")]),
    ],
)
def test_a_step_waits_for_the_plan_of_every_share(
    votes: list[tuple[str, str]], answers: list[Planned | Waiting], waits: list[Any]
) -> None:
    assert asked(votes, answers) == (PLAN, waits)


def test_a_run_ends_when_every_share_says_so() -> None:
    votes = [PLANNED, ("end", "the data has ended")]
    assert asked(votes, [ENDED]) == (End("the data has ended"), [("groups", "the data has ended")])
