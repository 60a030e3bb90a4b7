"""How fast the local stack starts and stops, and what it weighs: `python -m bench.stack [--runs N]`.

Fresh is a new state folder (a new database cluster included), warm one that was used before. The
weight is the proportional set size (shared pages counted once) of the services and all their
children, after a rest, without clients.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import psutil

from rollbook.stack.stack import Stack

REST_S = 10.0


def measure(state: Path, *, rest_s: float = 0.0) -> dict[str, float]:
    """One life of a stack: seconds to ready and to stopped, and MB by child after `rest_s`."""
    began = time.perf_counter()
    stack = Stack.up(state, environ={})
    figures = {"ready_s": time.perf_counter() - began}
    assert stack.supervisor is not None
    if rest_s:
        used = cpu_seconds(stack)
        time.sleep(rest_s)
        figures["idle_cpu_percent"] = 100 * (cpu_seconds(stack) - used) / rest_s
        for report in stack.supervisor.reports():
            assert report.pid is not None
            figures[f"{report.name}_pss_mb"] = sum(map(pss_mb, family(report.pid)))
        figures["pss_mb"] = sum(v for k, v in figures.items() if k.endswith("_pss_mb"))
    began = time.perf_counter()
    stack.down()
    return figures | {"stop_s": time.perf_counter() - began}


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def pss_mb(process: psutil.Process) -> float:
    """Proportional set size; Linux only."""
    return process.memory_full_info().pss / 1e6


def cpu_seconds(stack: Stack) -> float:
    """CPU time of all services so far."""
    assert stack.supervisor is not None
    pids = [r.pid for r in stack.supervisor.reports() if r.pid is not None]
    return sum(sum(p.cpu_times()[:2]) for pid in pids for p in family(pid))


def main() -> None:
    """Print the figures, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="warm starts")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as folder:
        os.chmod(folder, 0o711)
        state = Path(folder) / "state"
        fresh = measure(state)
        warm = [measure(state) for _ in range(runs - 1)]
        warm.append(measure(state, rest_s=REST_S))
    times = sorted(life["ready_s"] for life in warm)
    result = warm[-1] | {
        "fresh_ready_s": fresh["ready_s"],
        "ready_s": times[len(times) // 2],
        "slowest_ready_s": times[-1],
        "cpus": os.cpu_count() or 0,
        "load": os.getloadavg()[0],
    }
    for name, value in sorted(result.items()):
        print(f"{name:20} {value:8.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
