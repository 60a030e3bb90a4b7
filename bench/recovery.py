"""What a kill -9 of the whole stack costs: `python -m bench.recovery [--runs N]`.

The run is killed in full work with everything under it (Postgres, Temporal, the object store, the
engine, the workers, the trainer), then resumed by `rollbook resume`, which starts all of it again.

    stack_s        resume begins → the servers answer
    sampling_s     → a rollout that was half way has its next segment
    cpu_s          seconds of CPU that all processes have used by then, mostly for starting
    training_s     → the next step is applied, after the replay of those beyond the checkpoint
    lost_tokens    sampled by the engine and not committed when it died; of `sampled_tokens`
    replayed       steps that were recomputed, without sampling
"""

import argparse
import json
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from rollbook.stack.state import StateFolder
from tests.chaos.walk import pause
from tests.chaos.whole import Whole, write_toml

Figures = dict[str, float]
_GENERATED = re.compile(r"^vllm:generation_tokens_total (\d+)", re.MULTILINE)


def measure(folder: Path) -> Figures:
    """One life and one resurrection."""
    path = write_toml(folder, "recovery", steps=40)
    pause(folder, 0.3)
    with Whole.folder() as whole:
        first = whole.rollbook("run", str(path))
        whole.until(whole.in_full_work, "the run is in full work")
        (engine,) = whole.ask("SELECT engine_id FROM engines")
        sampled = generated(engine["engine_id"])
        whole.kill(first)
        began = time.perf_counter()
        second = whole.rollbook("resume", "recovery")

        def since(what: str, holds: str, *args: Any) -> float:
            whole.until(lambda: whole.ask(holds, *args), what)
            return time.perf_counter() - began

        whole.until(
            lambda: (up := StateFolder(whole.state).published()) and whole.ask("SELECT 1") and up,
            "the stack is up",
        )
        figures = {"stack_s": time.perf_counter() - began}
        (run,) = whole.ask(
            "SELECT next_step, durable_step, (SELECT max(created_at) FROM segments) AS last, "
            "(SELECT sum(tokens) FROM segments) AS tokens FROM runs"
        )
        figures["sampling_s"] = since(
            "a rollout goes on",
            "SELECT 1 FROM segments WHERE seq > 0 AND created_at > %s LIMIT 1",
            run["last"],
        )
        figures["cpu_s"] = cpu_seconds(second.pid)
        figures["training_s"] = since(
            "a step is applied", "SELECT 1 FROM runs WHERE next_step > %s", run["next_step"]
        )
        return figures | {
            "sampled_tokens": sampled,
            "lost_tokens": max(0, sampled - int(run["tokens"])),
            "replayed": run["next_step"] - run["durable_step"],
        }


def cpu_seconds(pid: int) -> float:
    """Of a process and everything it started that still runs."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in family)


def generated(engine: str) -> int:
    """Tokens the engine has sampled so far."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=5) as answer:
        found = _GENERATED.search(answer.read().decode())
    assert found is not None
    return int(found[1])


def main() -> None:
    """Print the figures, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    count = parser.parse_args().runs
    figures = []
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="rollbook-recovery-") as folder:
            figures.append(measure(Path(folder)))
    worst = {name: max(each[name] for each in figures) for name in figures[0]}
    for name, value in worst.items():
        print(f"{name:16} {value:8.1f}   (worst of {count})")
    print(json.dumps({"recovery": figures}))


if __name__ == "__main__":
    main()
