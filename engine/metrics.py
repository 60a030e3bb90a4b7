"""Counters in the Prometheus text format, under vLLM's names.

Written by the scheduler's thread, read by the event loop: single values, so a reader sees at worst
a slightly older one.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from engine.requests import Request, Sequence

BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Durations in seconds, in fixed buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> Iterable[str]:
        """The exposition of this histogram."""
        yield f"# TYPE {name} histogram"
        running = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self.counts, strict=True):
            running += count
            yield f'{name}_bucket{{le="{bound}"}} {running}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {running}"


class Metrics:
    """What the engine has done since it started."""

    def __init__(self) -> None:
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._first_token = Histogram()
        self._queued = Histogram()

    def prefix_read(self, prompt: int, cached: int) -> None:
        """A prompt was looked up in the prefix cache."""
        self._prompt_tokens += prompt
        self._cached_tokens += cached

    def sampled(self, rows: Iterable[Sequence], now: float) -> None:
        """Each row got one more id."""
        for sequence in rows:
            self._generated_tokens += 1
            if sequence.first_token_at is None:
                sequence.first_token_at = now
                self._first_token.add(now - sequence.request.arrived)

    def admitted(self, request: Request) -> None:
        """A request left the waiting queue."""
        self._queued.add(time.monotonic() - request.arrived)

    def ended(self, request: Request, reason: str) -> None:
        """A request was answered."""
        self._finished[reason] += 1

    def preempted(self) -> None:
        """A running request lost its KV."""
        self._preemptions += 1

    def exposition(self, gauges: Mapping[str, float]) -> str:
        """All values, with the gauges of the moment."""
        counters = {
            "vllm:prompt_tokens_total": self._prompt_tokens,
            "vllm:prompt_tokens_cached_total": self._cached_tokens,
            "vllm:prefix_cache_queries_total": self._prompt_tokens,
            "vllm:prefix_cache_hits_total": self._cached_tokens,
            "vllm:generation_tokens_total": self._generated_tokens,
            "vllm:num_preemptions_total": self._preemptions,
        }
        lines = []
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        for name, value in counters.items():
            lines += [f"# TYPE {name} counter", f"{name} {value}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in sorted(self._finished.items()):
            lines.append(f'vllm:request_success_total{{finished_reason="{reason}"}} {count}')
        lines += self._first_token.lines("vllm:time_to_first_token_seconds")
        lines += self._queued.lines("vllm:request_queue_time_seconds")
        return "\n".join(lines) + "\n"
