"""The main job as people start it, `rollbook run examples/reverse3.toml`, and what it costs.

    python -m bench.demo [--steps 200]

Twice in one state folder: the first run makes everything anew (fresh) and trains to its end, the
second finds what the first has left (warm) and is interrupted after its first step. Seconds count
from the command to the line on the screen. CPU is that of each process and its children, by step;
memory the proportional set size at the end, shared pages counted once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "reverse3.toml"
LOOK_S = 2.0


@dataclass
class Life:
    """One command, from its start to its end."""

    steps: int = 0
    reward: float = 0.0
    first_step_s: float = 0.0
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    pss_mb: dict[str, float] = field(default_factory=dict)

    def look(self, command: psutil.Process) -> None:
        """Read what its processes have used so far. One that ends meanwhile keeps its last figures."""
        for process in [command, *command.children()]:
            with suppress(psutil.Error):
                name = "command" if process == command else label(process.cmdline())
                members = [process] if process == command else family(process)
                self.cpu_s[name] = sum(sum(p.cpu_times()[:2]) for p in members)
                if process != command:
                    reaped = process.cpu_times()
                    self.cpu_s[name] += reaped.children_user + reaped.children_system
                self.pss_mb[name] = sum(p.memory_full_info().pss for p in members) / 1e6


def label(arguments: list[str]) -> str:
    """A process's name: its role in the project, else its program."""
    if arguments[1:3] == ["-m", "rollbook"]:
        return arguments[4] if arguments[3] == "worker" else arguments[3]
    return Path(arguments[0]).name


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants."""
    return [process, *process.children(recursive=True)]


def live(state: Path, name: str, stop_after: int | None) -> Life:
    """Run the demo under a name, to its end or for so many steps."""
    began = looked = time.perf_counter()
    life = Life()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "rollbook", "run", str(DEMO)),
            *("--name", name, "--state", str(state), "--json"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as command:
        assert command.stdout is not None
        for step in documents(command.stdout):
            if "metrics" not in step:
                continue
            now = time.perf_counter()
            life.steps = step["step"] + 1
            life.first_step_s = life.first_step_s or now - began
            life.reward = (step["metrics"] or {}).get("reward/mean", life.reward)
            if life.steps == stop_after or now - looked > LOOK_S:
                looked = now
                life.look(psutil.Process(command.pid))
            if life.steps == stop_after:
                command.send_signal(signal.SIGINT)
    life.seconds = time.perf_counter() - began
    return life


def documents(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """JSON documents, each over one or more lines."""
    text = ""
    for line in lines:
        text += line
        with suppress(ValueError):
            yield json.loads(text)
            text = ""


def main() -> None:
    """Print the figures, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="interrupt the first run after so many")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as folder:
        os.chmod(folder, 0o711)
        state = Path(folder) / "state"
        fresh = live(state, "fresh", steps)
        warm = live(state, "warm", 1)
    print(f"fresh: first step after {fresh.first_step_s:.1f} s, {fresh.steps} steps in")
    print(f"       {fresh.seconds:.0f} s, reward {fresh.reward:.3f}")
    print(f"warm:  first step after {warm.first_step_s:.1f} s")
    print(f"\n{'process':12}{'CPU s a step':>14}{'PSS MB':>10}")
    for name in sorted(fresh.cpu_s, key=lambda name: -fresh.cpu_s[name]):
        print(f"{name:12}{fresh.cpu_s[name] / fresh.steps:14.3f}{fresh.pss_mb[name]:10.0f}")
    total = sum(fresh.cpu_s.values()) / fresh.steps
    print(f"{'all':12}{total:14.3f}{sum(fresh.pss_mb.values()):10.0f}")
    print(json.dumps({"fresh": vars(fresh), "warm": vars(warm)}))


if __name__ == "__main__":
    main()
