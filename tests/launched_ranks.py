"""Runs of several trainer processes, started by torchrun as `rollbook run` does."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from domain.config import RunConfig
from domain.services import Services
from rollbook.launch import torchrun
from storage import runs
from storage.database import Ledger
from tests.playing import configuration
from trainer.waiting import Unfenced, Waits

History = list[tuple[Any, ...]]
TRAIN_ONCE = Path(__file__).with_name("train_once.py")


def create(ledger: Ledger, folder: Path, **sections: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"t{secrets.token_hex(4)}"
    trainer = {"ranks": 2, "grad_clip": None} | sections.pop("trainer", {})
    config: RunConfig = configuration(name, folder, trainer=trainer, **sections)
    ledger.call(runs.create, config, world={})
    return name


@contextmanager
def started(
    name: str, services: Services, *, program: Path = TRAIN_ONCE, ranks: int = 2, **environ: str
) -> "Iterator[subprocess.Popen[str]]":
    """torchrun with the ranks of a program, as `rollbook run` starts the trainer."""
    process = subprocess.Popen(
        [sys.executable, *torchrun(ranks), str(program), name],
        env=os.environ | services.environment() | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def train(name: str, services: Services, *, ranks: int = 2) -> str:
    with started(name, services, ranks=ranks, TELL_PUTS="1") as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output[-4000:]
    return output


def stored(output: str) -> dict[str, str]:
    """Which rank stored each object, of what ranks said; none may be stored twice."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        if line.startswith("put "):
            _, rank, key = line.split()
            assert key not in found, f"{key} by {found[key]} and {rank}"
            found[key] = rank
    return found


def reader() -> Waits:
    """The waits of a process that trains nothing."""
    return Waits(lambda: False, Unfenced(), patience_s=20)


def history(ledger: Ledger, name: str) -> History:
    """What must be equal in every execution of one run on two ranks."""
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT step, version_before, updated, groups, weights_sha256, metrics->>'loss' AS loss, "
            "ARRAY(SELECT (share, group_id) FROM queue q WHERE (q.run_id, q.step) = "
            "(s.run_id, s.step) ORDER BY share, pos)::text AS plan "
            "FROM steps s WHERE run_id = %s ORDER BY step",
            (name,),
        ).fetchall()
    return [tuple(row.values()) for row in rows]
