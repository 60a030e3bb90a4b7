"""The running requests of one policy: prefill, decode, finish.

    queue ──start──▶ prefilling slots ──last prompt id──▶ decoding slots ──▶ finished
      ▲                                                        │
      └──────────────────────── preempted ─────────────────────┘

Decoding requests hold slots 0..d-1, prefilling ones the slots after them. A step is one piece of
prefill and one token for every decoding request. A preempted request loses its KV, nothing else: it
is prefilled again from prompt and sampled ids, and goes on with its own random numbers.
"""

import math
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from engine.metrics import Metrics
from engine.policies import Policy
from engine.prefixes import BLOCK, Lineage, Prefixes, chain
from engine.refusals import PolicyFailed
from engine.requests import Completion, Request, Sequence
from engine.sampling import Settings, draw
from engine.slots import Slots

PREFILL_TOKENS = 512
GATHER_S = 0.005
"""While others decode, a new request waits so long for more to be prefilled together with."""


class Batch:
    """Runs the requests of one policy. Used by the scheduler's thread only."""

    def __init__(
        self,
        policy: Policy,
        *,
        prefixes: Prefixes,
        metrics: Metrics,
        room: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`room` says whether the engine may hold so many more bytes of KV."""
        self.policy = policy
        self._prefixes = prefixes
        self._metrics = metrics
        self._room = room
        self.slots = Slots(policy.shape)
        self._queue: deque[Sequence] = deque()
        self._rows: list[Sequence] = []
        self._decoding = 0
        self._settings: Settings | None = None

    @property
    def size(self) -> int:
        """Requests in progress, queued ones included."""
        return len(self._rows) + len(self._queue)

    def add(self, request: Request) -> None:
        """Take a request in."""
        params, policy = request.params, self.policy
        eos = frozenset[int]() if params.ignore_eos else policy.eos
        self._queue.append(
            Sequence(
                request,
                stops=eos | frozenset(params.stop_token_ids),
                limit=min(params.max_tokens, policy.positions - len(request.prompt)),
                version=policy.version,
            )
        )

    def step(self) -> list[Request]:
        """Advance every request; the requests that ended, answered."""
        ended = self._prefill()
        ended += self._decode()
        return ended

    def remove(self, wanted: Callable[[Request], bool]) -> list[tuple[Request, Completion]]:
        """Stop requests; each with its partial answer, undelivered."""
        gone = [s for s in self._queue if wanted(s.request)]
        self._queue = deque(s for s in self._queue if not wanted(s.request))
        for row in reversed(range(len(self._rows))):
            if wanted(self._rows[row].request):
                gone.append(self._rows[row])
                self._release(row)
        return [(s.request, s.completion("abort")) for s in gone]

    def fail(self, error: PolicyFailed) -> list[Request]:
        """Answer everything with an error and start clean."""
        failed = [*self._queue, *self._rows]
        self._queue.clear()
        self._rows.clear()
        self._decoding = 0
        self._settings = None
        self.slots = Slots(self.policy.shape)
        for sequence in failed:
            sequence.request.deliver(error)
        return [s.request for s in failed]

    def _prefill(self) -> list[Request]:
        if self._decoding == len(self._rows) and self._due():
            self._start()
        rows = self._rows[self._decoding :]
        if not rows:
            return []
        width = min(max(s.pending for s in rows), PREFILL_TOKENS)
        taken = [min(s.pending, width) for s in rows]
        ids_BQ = torch.zeros(len(rows), width, dtype=torch.long)
        for row, (sequence, count) in enumerate(zip(rows, taken, strict=True)):
            done = sequence.computed
            ids_BQ[row, :count] = torch.tensor(sequence.ids[done : done + count])
        last_B = torch.tensor([count - 1 for count in taken])
        keep_K, of_B = torch.unique(last_B, return_inverse=True)
        self.slots.fit(len(self._rows), max(s.computed for s in rows) + width)
        logits_BKV = self._forward(self._decoding, ids_BQ, rows, keep_K)
        for sequence, count in zip(rows, taken, strict=True):
            sequence.computed += count
        if rows[0].pending:  # only a request that is alone is prefilled in pieces
            return []
        first, self._decoding, self._settings = self._decoding, len(self._rows), None
        for row in range(first, self._decoding):
            self._retain(row)
        params = [s.request.params for s in rows]
        return self._sample(first, logits_BKV[torch.arange(len(rows)), of_B], Settings.of(params))

    def _due(self) -> bool:
        """Whether prefill is worth a step: requests of a group arrive one by one."""
        if not self._queue:
            return False
        return not self._decoding or (time.monotonic() - self._queue[0].request.arrived >= GATHER_S)

    def _start(self) -> None:
        """Give slots to queued requests: as many as one piece of prefill can take whole."""
        longest = 0
        claimed: set[bytes] = set()
        waiting: list[Sequence] = []
        while self._queue:
            sequence = self._queue.popleft()
            hashes = chain(sequence.request.salt, sequence.ids[:-1])
            if hashes and hashes[-1] in claimed:
                waiting.append(sequence)  # a sibling computes this prefix now: read it next time
                continue
            claimed.update(hashes)
            row = len(self._rows)
            hit = self._prefixes.find(
                self.policy.run, self.policy.version, sequence.request.kv_max_staleness, hashes
            )
            wide = max(longest, len(sequence.ids) - (hit.tokens if hit else 0))
            together = row - self._decoding + 1
            if (together > 1 and together * wide > PREFILL_TOKENS) or not self._fit(
                row + 1, len(sequence.ids), keep=row == 0
            ):
                waiting.append(sequence)
                break
            longest = wide
            if hit:
                self.slots.write(row, hit.keys, hit.values)
                sequence.extend(hit.tokens, hit.lineage.oldest)
            if not sequence.logprobs:
                sequence.cached_tokens = sequence.computed
                self._metrics.prefix_read(len(sequence.ids), sequence.computed)
            self._rows.append(sequence)
        self._queue.extendleft(reversed(waiting))

    def _decode(self) -> list[Request]:
        while self._decoding and not self._fit(
            len(self._rows),
            max(s.computed for s in self._rows[: self._decoding]) + 1,
            keep=self._decoding == 1,
        ):
            self._preempt()
        if not self._decoding:
            return []
        rows = self._rows[: self._decoding]
        if self._settings is None:
            self._settings = Settings.of([s.request.params for s in rows])
        ids_B1 = torch.tensor([s.ids[-1:] for s in rows])
        logits_BV = self._forward(0, ids_B1, rows, 1)[:, -1]
        for sequence in rows:
            sequence.computed += 1
        return self._sample(0, logits_BV, self._settings)

    def _forward(
        self, first: int, ids_BQ: Tensor, rows: list[Sequence], keep_K: Tensor | int
    ) -> Tensor:
        starts_B = torch.tensor([s.computed for s in rows])
        return self.policy.forward(self.slots, first, ids_BQ, starts_B, keep_K)

    @torch.inference_mode()
    def _sample(self, first: int, logits_BV: Tensor, settings: Settings) -> list[Request]:
        """Append one id to each row from `first` on; answer those that ended."""
        rows = self._rows[first : first + len(logits_BV)]
        ids, logprobs, supports = draw(logits_BV, settings, [s.uniforms.next() for s in rows])
        self._metrics.sampled(rows, time.monotonic())
        answers: list[tuple[int, Completion | PolicyFailed]] = []
        for row, (sequence, token, logprob) in enumerate(zip(rows, ids, logprobs, strict=True)):
            if not math.isfinite(logprob):
                answers.append((first + row, self._broken(sequence, logprob)))
                self.slots.wipe(first + row)
            elif reason := sequence.add(token, logprob, supports.get(row)):
                answers.append((first + row, sequence.completion(reason)))
                self._retain(first + row)
        ended = []
        for row, answer in reversed(answers):
            request = self._rows[row].request
            self._release(row)
            request.deliver(answer)
            ended.append(request)
            reason = answer.finish_reason if isinstance(answer, Completion) else "error"
            self._metrics.ended(request, reason)
        return ended

    def _broken(self, sequence: Sequence, logprob: float) -> PolicyFailed:
        return PolicyFailed(
            f"policy {self.policy.name} gave log-probability {logprob} at token "
            f"{len(sequence.logprobs)} of request {sequence.request.id}; its weights or its "
            "arithmetic are broken, so nothing it samples can be used"
        )

    def _retain(self, row: int) -> None:
        """File the row's KV under the weights that computed it."""
        sequence, policy = self._rows[row], self.policy
        whole = sequence.computed // BLOCK * BLOCK
        lineage = Lineage(policy.run, sequence.kv_version, policy.version)
        if whole and self._prefixes.limit:
            hashes = chain(sequence.request.salt, sequence.ids[:whole])
            if not self._prefixes.holds(lineage, hashes):
                self._prefixes.keep(lineage, hashes, *self.slots.read(row, whole))

    def _release(self, row: int) -> None:
        """Free a slot; the last decoding request moves into the hole, then the last of all."""
        if row < self._decoding:
            self._decoding -= 1
            self._settings = None
            self._move(self._decoding, row)
            row = self._decoding
        self._move(len(self._rows) - 1, row)
        self._rows.pop()
        if not self._rows:
            self.slots.trim(0)

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self.slots.move(source, target, self._rows[source].computed)
            self._rows[target] = self._rows[source]

    def _fit(self, rows: int, columns: int, *, keep: bool) -> bool:
        """Make room in the slots if memory allows it, or if the request is the only one (`keep`)."""
        wanted = self.slots.needed(rows, columns)
        if wanted == (self.slots.rows, self.slots.columns):
            return True
        more = wanted[0] * wanted[1] * self.policy.shape.bytes_per_token - self.slots.nbytes
        if not keep and not self._room(more):
            return False
        self.slots.fit(rows, columns)
        return True

    def _preempt(self) -> None:
        """Take the slot of the request that is to yield first: largest priority, then youngest."""
        row = max(
            range(self._decoding),
            key=lambda r: (self._rows[r].request.priority, self._rows[r].request.arrived),
        )
        sequence = self._rows[row]
        self._release(row)
        self.slots.trim(len(self._rows))
        sequence.computed = 0
        sequence.kv_version = self.policy.version
        self._queue.appendleft(sequence)
        self._metrics.preempted()
