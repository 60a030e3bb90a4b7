"""The holding rule in numbers: W1 to W20 of the specification, with the slack and what binds."""

from typing import NamedTuple


class Vector(NamedTuple):
    """What is outstanding beside the groups that would train now, and what follows from it."""

    name: str
    current: int
    groups: int
    bound: int
    outstanding: list[int]
    """Version of the oldest token of each group."""
    slack: int
    """Places left at the tightest deadline."""
    deadline: int | None
    """That deadline, the earliest of them; None when nothing is outstanding."""

    @property
    def holds(self) -> bool:
        """Whether the trainer must hold."""
        return self.slack < 0


VECTORS = [
    Vector("W1 nothing outstanding", 12, 2, 2, [], 4, None),
    Vector("W2 one fresh group", 12, 2, 2, [12], 3, 14),
    Vector("W3 one group at its last version", 12, 2, 2, [10], -1, 12),
    Vector("W4 two expire next, B=2", 12, 2, 2, [11, 11], 0, 13),
    Vector("W5 three expire next, B=2", 12, 2, 2, [11, 11, 11], -1, 13),
    Vector("W6 v10 may train at 12", 11, 1, 2, [10], 0, 12),
    Vector("W7 v10 may not train at 13", 12, 1, 2, [10], -1, 12),
    Vector("W8 one due 13, two due 14, B=1", 12, 1, 2, [11, 12, 12], -1, 14),
    Vector("W9 one due 13, one due 14, B=1", 12, 1, 2, [11, 12], 0, 13),
    Vector("W10 three v11 fit", 11, 1, 3, [11, 11, 11], 0, 14),
    Vector("W11 a fourth does not", 11, 1, 3, [11, 11, 11, 11], -1, 14),
    Vector("W12 S=0, one outstanding", 5, 4, 0, [5], -1, 5),
    Vector("W13 S=0, none", 5, 4, 0, [], 0, None),
    Vector("W14 ahead=2, S=1", 0, 2, 1, [0] * 4, -2, 1),
    Vector("W15 ahead=2, S=2", 0, 2, 2, [0] * 4, 0, 2),
    Vector("W16 sync_every=2, ahead=1", 7, 2, 2, [6, 6], 0, 8),
    Vector("W17 sync_every=2, ahead=2", 7, 2, 2, [6] * 4, -2, 8),
    Vector("W18 mixed ages", 20, 4, 3, [18] * 4 + [19] * 4 + [20] * 4, 0, 21),
    Vector("W19 one more at the tightest", 20, 4, 3, [18] * 5 + [19] * 4 + [20] * 3, -1, 21),
    Vector("W20 overflow at the middle deadline", 20, 4, 3, [18] * 4 + [19] * 5, -1, 22),
]
