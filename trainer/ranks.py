"""The trainer processes of one run: which one this is, and everything they do together.

Each rank owns a share of the data and trains its own rows; the step's batch is all ranks' rows
together. `Ranks` holds every collective there is, and at size 1 each is the identity, so that one
process and many run the same code. Two kinds of traffic:

    control    JSON and plain bytes over gloo: votes, causes, masses, digests, figures
    gradients  summed in place, over NCCL where there are GPUs and gloo elsewhere; those of sharded
               weights are divided and summed by FSDP itself (`trainer.sharding`)

A failure raises on every rank, with one type and one text, by one of two ways:

    vote   what raises inside `together` is exchanged; all ranks raise it at the same point of the
           program and go on together, to close the run
    note   what breaks anywhere else (in the middle of a sum, where nobody can vote) is noted in the
           store where the ranks met, the first note standing; the process leaves, its connections
           close, and a rank whose collective then raises reads the note and raises that instead

A process that was killed leaves no note: the first survivor does (`trainer.note`). All of them
leave, and whoever launched them starts the world again under a new epoch. A peer that hangs without
dying is given up after `timeout_s`. Nothing that may wait for long (rollouts, engines) waits inside
a collective: it is a poll, `pause`d between two exchanges.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from domain.errors import RunStopped
from trainer import launcher
from trainer.devices import place
from trainer.note import Note, RankLost, described, rebuilt
from trainer.waiting import Kind, Stopped, Waits

T = TypeVar("T")

_GOES_LAST = {RunStopped.__name__: 1, Stopped.__name__: 2}
"""What may only follow from another rank's error (it fails its share, it is told to end)."""


class RanksApart(RuntimeError):
    """Two ranks are at different points of the program: a defect, which ends the process."""


class Ranks:
    """This process among the trainer processes of a run."""

    def __init__(
        self, rank: int = 0, size: int = 1, store: Store | None = None, *, readers: int = 1
    ) -> None:
        """By default the only one; `joined` makes the others. `readers` of them in a row read one share."""
        self.rank = rank
        self.size = size
        self.readers = readers
        self.apart = False
        """Whether collectives are over: a failure could not be voted on, each leaves by itself."""
        self._note = None if store is None else Note(store)
        self._leaving = Event()
        self._agreed: Exception | None = None

    @classmethod
    @contextmanager
    def joined(
        cls, environ: Mapping[str, str], *, timeout_s: float, readers: int = 1
    ) -> Iterator[Self]:
        """Meet the other ranks that torchrun started; alone where it started none.

        Args:
            environ: torchrun's variables, or none of them.
            timeout_s: longest wait for a peer in any collective.
            readers: ranks that read one share of the data (`trainer.readers`).

        Raises:
            ConfigError: some of the variables are missing, the ranks could not be started again, or
                there are fewer GPUs than ranks on this machine.
        """
        if "RANK" not in environ:
            yield cls()
            return
        launcher.check(environ)
        launcher.die_with_it()
        limit = timedelta(seconds=timeout_s)
        here = place(int(environ["LOCAL_RANK"]), torch.cuda.device_count())
        if here.bound is not None:
            torch.cuda.set_device(here.bound)
        store, rank, size = next(rendezvous("env://", timeout=limit))
        ranks = cls(rank, size, store, readers=readers)
        dist.init_process_group(
            here.backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=here.bound,
        )
        if here.bound is not None:
            ranks.watch()
        try:
            yield ranks
        finally:
            ranks._leaving.set()
            dist.destroy_process_group()
            if ranks.apart and rank == 0 and not launcher.keeps_the_store(environ):
                Note(store).stay(size)

    @property
    def share(self) -> int:
        """Which part of the data this rank reads."""
        return self.rank // self.readers

    @property
    def shares(self) -> int:
        """Parts of the data."""
        return self.size // self.readers

    @property
    def reader(self) -> int:
        """Which reader of its share this is; the first plans for all of them."""
        return self.rank % self.readers

    def of_shares(self, answers: Sequence[T]) -> list[T]:
        """Of everyone's answers, those of each share's first reader."""
        return list(answers[:: self.readers])

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Do something on every rank at once; each gets its own result, or all the same error.

        Args:
            what: names the point of the program, the same on every rank.
            act: must not use a collective itself.

        Raises:
            Exception: what it raised, on whichever rank. An error goes before what follows from it.
        """
        result, _ = self._vote(what, act, lambda _: None)
        return result

    def gather(self, what: str, act: Callable[[], T]) -> list[T]:
        """`together`, and everyone's result (JSON), by rank."""
        result, answers = self._vote(what, act, lambda found: found)
        return [result] if self.size == 1 else answers

    def first(self, what: str, act: Callable[[], T]) -> T | None:
        """Do something on rank 0 while the others wait, which get None, or the same error."""
        return self.together(what, act if self.rank == 0 else lambda: None)

    def decide(self, what: str, act: Callable[[], T]) -> T:
        """What rank 0 finds (JSON), on every rank, or the same error."""
        found: T | None = self.gather(what, act if self.rank == 0 else lambda: None)[0]
        return found  # type: ignore[return-value]  # rank 0's is never the others' None

    def pause(self, waits: Waits, kind: Kind, reason: str) -> float:
        """Sleep once on every rank; for how many seconds rank 0 has waited for this.

        Its clock decides: every rank must be idle, or lose patience, at the same poll.

        Raises:
            Stopped, Fenced: as `Waits.pause`, on whichever rank.
        """
        return self.gather("wait", lambda: waits.pause(kind, reason))[0]

    @contextmanager
    def sums(self) -> Iterator[None]:
        """Around what adds up over the ranks: what breaks in it on one rank is raised on all."""
        try:
            yield
        except Exception as error:
            if self.size == 1 or error is self._agreed or self._leave(error) is error:
                raise
            assert self._agreed is not None
            raise self._agreed from error

    def exchange(self, what: str, value: T) -> list[T]:
        """Everyone's value (JSON), by rank.

        Raises:
            Exception: what another rank has failed with meanwhile.
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

    def add_up(self, gradients: Iterable[Tensor]) -> None:
        """Add up tensors over the ranks, in place. All ranks pass as many, of the same shapes."""
        if self.size == 1:
            return
        # Over gloo, which notices a peer that has left; a GPU would wait for it in the sum below.
        self.exchange("gradients", None)
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()

    def tell(self, error: Exception) -> None:
        """Let the others know of an error that was raised outside a vote, if they do not."""
        if self.size > 1 and error is not self._agreed:
            self._leave(error)

    def watch(self) -> None:
        """Have a thread leave with what another rank notes while a GPU keeps this one waiting."""
        assert self._note is not None
        Thread(target=self._note.watch, args=(self._leaving,), name="note", daemon=True).start()

    def _vote(
        self, what: str, act: Callable[[], T], say: Callable[[T], Any]
    ) -> tuple[T, list[Any]]:
        if self.size == 1:
            return act(), []
        try:
            result = act()
        except Exception as error:
            self._exchange(what, None, error)
            raise AssertionError("the exchange raises") from error
        return result, self._exchange(what, say(result))

    def _exchange(self, what: str, value: Any, error: Exception | None = None) -> list[Any]:
        mine: dict[str, Any] = {"what": what, "value": value}
        if error is not None:
            mine["error"] = described(error)
        raw = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        with self.sums():
            answers = [json.loads(part.numpy().tobytes()) for part in self._gather(raw)]
        failures = [(r, a["error"]) for r, a in enumerate(answers) if "error" in a]
        failures.sort(key=lambda failure: _GOES_LAST.get(failure[1][1], 0))
        if failures:
            rank, told = failures[0]
            agreed = error if error and rank == self.rank else rebuilt(told)
            self._agreed = agreed
            raise agreed
        points = [answer["what"] for answer in answers]
        if len(set(points)) > 1:
            raise RanksApart(f"the ranks are at {points}, one each; please report this")
        return [answer["value"] for answer in answers]

    def _leave(self, error: Exception) -> Exception:
        """Part from the others; the error that all ranks leave with, this one if it is the first."""
        assert self._note is not None
        self.apart = True
        self._leaving.set()
        self._agreed = self._note.leave(error)
        # What waits for this rank fails at once, and what this one waits for on its device ends.
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()
        return self._agreed

    def _gather(self, raw: Tensor) -> list[Tensor]:
        """Everyone's bytes; their numbers may differ.

        Raises:
            RankLost: another rank has left, or has been silent for too long.
        """
        try:
            return self._gathered(raw)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} has lost another one of {self.size} trainer processes "
                f"({str(error).partition('. ')[0]}). It ends too; whoever started them starts all "
                "again, and the step is computed anew"
            ) from error

    def _gathered(self, raw: Tensor) -> list[Tensor]:
        length = torch.tensor([raw.numel()])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(n) for n in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part[: int(n)].clone() for part, n in zip(parts, lengths, strict=True)]
