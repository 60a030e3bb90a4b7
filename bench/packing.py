"""Packing and advantages: tokens per second, rows against the lower bound, and a step's host time.

    python -m bench.packing [--rollouts 1024] [--repeat 5]

Rollouts have 4 turns that merge into one chain of about 2,000 tokens; ids and log-probabilities are
numpy arrays, as the ledger hands them out. CPU time of one core. Exit code 1 when a target is missed.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from domain.config import Trainer
from domain.rollouts import Rollout, Segment, Status
from trainer.advantages import advantages
from trainer.metrics import of_batch
from trainer.packing import chain_lengths, pack, rows_needed

TURNS = 4
GROUP = 8
WIDTH = 16_384
TOKENS_PER_SECOND = 10e6
ROWS_OVER_BOUND = 1.02
RECORD_MS = 20.0


def four_turns(index: int, random: np.random.Generator) -> Rollout:
    """A rollout whose turns all extend the same chain."""
    size = int(np.clip(random.normal(2000, 400), 400, 4000))
    ids = random.integers(0, 150_000, size, dtype=np.int32)
    cuts = np.linspace(0, size, 2 * TURNS + 1).astype(int)  # prompt, turn, tool, turn, …
    segments = [
        Segment(
            ids[: cuts[2 * turn + 1]],
            ids[cuts[2 * turn + 1] : cuts[2 * turn + 2]],
            random.normal(-1, 0.5, cuts[2 * turn + 2] - cuts[2 * turn + 1]).astype(np.float32),
            "stop",
            version=40 + turn // 2,
        )
        for turn in range(TURNS)
    ]
    group, sample = divmod(index, GROUP)
    reward = float(random.random())
    return Rollout(f"t{group}", group, sample, 0, segments, Status.COMPLETED, reward)


def median(call: Callable[[], object], repeat: int) -> float:
    """CPU seconds of the median call: what one core needs, whoever else shares it."""
    seconds = []
    for _ in range(repeat):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def main() -> int:
    """Measure and print; 0 when every target holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    rollouts = [four_turns(i, random) for i in range(options.rollouts)]

    lengths = chain_lengths(rollouts, WIDTH)
    tokens = sum(lengths)
    pack_s = median(lambda: pack(rollouts, WIDTH, trainer_version=42, max_lag=2), options.repeat)
    rate = tokens / pack_s

    rows, bound = rows_needed(lengths, WIDTH), math.ceil(tokens / WIDTH)

    packed = pack(rollouts, WIDTH)
    config = Trainer(width=WIDTH)
    rewards = [
        [rollout.reward for rollout in rollouts[start : start + GROUP]]
        for start in range(0, len(rollouts), GROUP)
    ]
    record_s = median(
        lambda: (advantages(rewards), of_batch(rollouts, packed, config, 42)), options.repeat
    )

    results = [
        (
            "pack",
            f"{rate / 1e6:.1f} M tokens/s ({tokens} tokens in {pack_s * 1e3:.0f} ms)",
            rate / TOKENS_PER_SECOND,
        ),
        (
            "rows",
            f"{rows}, at least {bound} ({100 * (rows / bound - 1):.2f} % over)",
            ROWS_OVER_BOUND / (rows / bound),
        ),
        (
            "advantages + record",
            f"{record_s * 1e3:.1f} ms for {len(rollouts)} rollouts",
            RECORD_MS / (record_s * 1e3),
        ),
    ]
    for name, figure, margin in results:
        print(f"{name:20} {figure:50} {margin:6.2f} x target")
    return 0 if all(margin >= 1 for *_, margin in results) else 1


if __name__ == "__main__":
    sys.exit(main())
