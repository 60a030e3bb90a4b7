"""Where an attempt's next segment stands: it extends what is recorded, or starts another chain."""

from array import array
from collections.abc import Sequence

from domain.images import PlacedImage
from domain.rollouts import Segment
from storage.segments import Place


class Chain:
    """The newest chain of one attempt, by its ids."""

    def __init__(self, recorded: Sequence[Segment], places: Sequence[Place]) -> None:
        """Go on from what earlier executions committed."""
        self._last: Place | None = None
        self._ids = array("i")
        self._images: tuple[PlacedImage, ...] = ()
        self._ended_turn = False
        if recorded:
            self.append(recorded[-1], places[-1])

    @property
    def turns(self) -> int:
        """Number of the turn that follows."""
        return 0 if self._last is None else self._last.turn + 1

    @property
    def segments(self) -> int:
        """How many are recorded."""
        return 0 if self._last is None else self._last.seq + 1

    def place(self, segment: Segment) -> Place:
        """Where a segment goes that was sampled now."""
        last = self._last
        if last is None:
            return Place(seq=0, turn=0, chain=0, context_start=0)
        prompt = array("i", segment.prompt_ids)
        same = segment.images[: len(self._images)] == self._images
        extends = same and prompt[: len(self._ids)] == self._ids
        continues = extends and len(prompt) == len(self._ids) and not self._ended_turn
        return Place(
            seq=last.seq + 1,
            turn=last.turn + (not continues),
            chain=last.chain + (not extends),
            context_start=len(self._ids) if extends else 0,
        )

    def append(self, segment: Segment, place: Place) -> None:
        """Go on after a segment that was committed there."""
        self._ids = array("i", segment.prompt_ids)
        self._ids.extend(segment.sampled_ids)
        self._images = segment.images
        self._ended_turn = segment.finish_reason == "stop"
        self._last = place
