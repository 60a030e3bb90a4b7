"""The trainer outlasts a store that is out, up to a limit, and nothing that would stay as it is."""

import pytest

from domain.errors import DigestMismatch, Fenced, ObjectError, ObjectMissing
from trainer.waiting import Unfenced, Waits


class Store:
    """Refuses so many times, then answers."""

    def __init__(self, refusals: int, error: type[ObjectError] = ObjectError) -> None:
        self.asked = 0
        self._refusals, self._error = refusals, error

    def ask(self) -> str:
        self.asked += 1
        if self.asked <= self._refusals:
            raise self._error("503 Slow Down")
        return "the bytes"


def waits(patience_s: float) -> Waits:
    return Waits(lambda: False, Unfenced(), patience_s=patience_s)


def test_a_short_outage_is_outlasted_and_its_seconds_are_booked() -> None:
    store, waiting = Store(2), waits(30)
    assert waiting.outlast(store.ask) == "the bytes"
    assert store.asked == 3
    assert waiting.take()["storage"] > 0


def test_after_the_limit_the_stores_own_words_are_raised() -> None:
    store = Store(1_000)
    with pytest.raises(ObjectError, match="503 Slow Down"):
        waits(0.5).outlast(store.ask)
    assert 1 < store.asked < 1_000


@pytest.mark.parametrize("error", [ObjectMissing, DigestMismatch])
def test_what_is_gone_or_damaged_is_not_asked_for_again(error: type[ObjectError]) -> None:
    store = Store(1, error)
    with pytest.raises(error):
        waits(30).outlast(store.ask)
    assert store.asked == 1


def test_a_trainer_that_lost_its_run_meanwhile_waits_no_longer() -> None:
    class Lost:
        def check(self) -> None:
            raise Fenced("another trainer took over")

    with pytest.raises(Fenced):
        Waits(lambda: False, Lost(), patience_s=30).outlast(Store(1_000).ask)
