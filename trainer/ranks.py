"""The trainer processes of one run: which one this is, and everything they do together.

Each rank owns a share of the data and trains its own rows; the step's batch is all ranks' rows
together. `Ranks` holds every collective there is, and at size 1 each is the identity, so that one
process and many run the same code. Two kinds of traffic:

    control    JSON and plain bytes over gloo: votes, causes, masses, digests, figures
    gradients  summed in place, over NCCL where there are GPUs and gloo elsewhere

A failure travels as a vote: what raises on one rank raises on every rank, with the same text, at
the same point of the program (`together`). So no rank is left waiting, and each of them can still
take part in closing the run. What cannot vote any more, a process that was killed or that broke in
the middle of a sum, is noticed by the others when its connection closes: their collective raises,
they exit, and whoever launched them starts the world again under a new epoch. A peer that hangs
without dying is given up after `timeout_s`.
"""

import ctypes
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from domain import errors
from domain.errors import ConfigError, RollbookError
from trainer.waiting import Stopped

T = TypeVar("T")

_SET_PDEATHSIG = 1
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RanksApart(RuntimeError):
    """Two ranks are at different points of the program: a defect, which ends the process."""


class Ranks:
    """This process among the trainer processes of a run."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """By default the only one; `joined` makes the others."""
        self.rank = rank
        self.size = size
        self._agreed: BaseException | None = None

    @classmethod
    @contextmanager
    def joined(cls, environ: Mapping[str, str], *, timeout_s: float) -> Iterator[Self]:
        """Meet the other ranks that torchrun started; alone where it started none.

        Args:
            environ: torchrun's variables, or none of them.
            timeout_s: longest wait for a peer in any collective.

        Raises:
            ConfigError: some of the variables are missing.
        """
        if "RANK" not in environ:
            yield cls()
            return
        if missing := [name for name in _VARIABLES if name not in environ]:
            raise ConfigError(
                f"RANK = {environ['RANK']!r} is set without {', '.join(missing)}; start the trainer "
                "with torchrun, or unset RANK to train in one process"
            )
        die_with_parent()
        ranks = cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
        if torch.cuda.is_available():
            torch.cuda.set_device(int(environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        try:
            yield ranks
        finally:
            dist.destroy_process_group()

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Do something on every rank at once; each gets its own result, or all the same error.

        Args:
            what: names the point of the program, the same on every rank.
            act: must not use a collective itself.

        Raises:
            RollbookError, Stopped: what it raised, on whichever rank. An error goes before a stop.
        """
        if self.size == 1:
            return act()
        try:
            result = act()
        except (RollbookError, Stopped) as error:
            self._exchange(what, None, error)
            raise AssertionError("the exchange raises") from error
        self._exchange(what, None)
        return result

    def first(self, what: str, act: Callable[[], T]) -> T | None:
        """Do something on rank 0 while the others wait, which get None, or the same error."""
        return self.together(what, act if self.rank == 0 else lambda: None)

    def exchange(self, what: str, value: T) -> list[T]:
        """Everyone's value (JSON), by rank.

        Raises:
            RollbookError, Stopped: another rank has failed meanwhile.
        """
        return [value] if self.size == 1 else self._exchange(what, value)

    def any(self, what: str, mine: bool) -> bool:
        """Whether it holds on any rank."""
        return any(self.exchange(what, mine))

    def total(self, what: str, mine: Tensor) -> Tensor:
        """The sum of a scalar over the ranks, added in the order of ranks in float64."""
        if self.size == 1:
            return mine
        return torch.tensor(
            sum(self.exchange(what, float(mine))), dtype=mine.dtype, device=mine.device
        )

    def concatenate(self, mine: Tensor) -> Tensor:
        """The one-dimensional tensors of all ranks, one after the other, in rank order."""
        if self.size == 1:
            return mine
        raw = mine.detach().cpu().double().view(torch.uint8)
        return torch.cat([part.view(torch.float64) for part in self._gather(raw)]).to(mine)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up every parameter's gradient over the ranks, in place.

        A rank that has no gradient takes part with zeros: the collectives never depend on the data.
        """
        if self.size == 1:
            return
        works = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()

    def tell(self, error: RollbookError) -> None:
        """Let the others know of an error that was raised outside `together`, if they do not."""
        if self.size == 1 or error is self._agreed:
            return
        try:
            self._exchange("failed", None, error)
        except (RollbookError, Stopped):
            return

    def _exchange(self, what: str, value: Any, error: Exception | None = None) -> list[Any]:
        mine: dict[str, Any] = {"what": what, "value": value}
        if error is not None:
            mine["error"] = [type(error).__name__, str(error)]
        raw = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        answers = [json.loads(part.numpy().tobytes()) for part in self._gather(raw)]
        failures = [(r, a["error"]) for r, a in enumerate(answers) if "error" in a]
        failures.sort(key=lambda failure: failure[1][0] == Stopped.__name__)
        if failures:
            rank, (kind, text) = failures[0]
            self._agreed = error if rank == self.rank and error is not None else _error(kind, text)
            raise self._agreed
        points = [answer["what"] for answer in answers]
        if len(set(points)) > 1:
            raise RanksApart(f"the ranks are at {points}, one each; please report this")
        return [answer["value"] for answer in answers]

    def _gather(self, raw: Tensor) -> list[Tensor]:
        """Everyone's bytes; their numbers may differ."""
        length = torch.tensor([raw.numel()])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(n) for n in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part[: int(n)].clone() for part, n in zip(parts, lengths, strict=True)]


def die_with_parent() -> None:
    """Have the kernel end this process when its launcher dies, which could not end it any more.

    torchrun gives each rank a session of its own, so nothing else would. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _error(kind: str, text: str) -> Exception:
    """Another rank's error, as this rank raises it."""
    if kind == Stopped.__name__:
        return Stopped(text)
    found: type[RollbookError] = getattr(errors, kind, RollbookError)
    return found(text)
