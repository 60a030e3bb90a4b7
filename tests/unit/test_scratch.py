"""Folders that do not outlive their process, even one that was killed."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from storage import scratch

HOLD = """
import sys
from storage import scratch
with scratch.folder("trainer") as path:
    (path / "weights").write_bytes(b"0" * 1000)
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def hold() -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder, and that folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    grown_old = time.time() - 2 * scratch.YOUNG_S
    os.utime(path, (grown_old, grown_old))
    return process, path


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_it_is_gone_afterwards(place: Path) -> None:
    with scratch.folder("trainer") as path:
        (path / "file").touch()
        assert path.stat().st_mode & 0o077 == 0
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(place: Path) -> None:
    process, left = hold()
    end(process)
    assert (left / "weights").exists()
    with scratch.folder("trainer") as path:
        assert list(place.iterdir()) == [path]


def test_what_a_living_process_uses_is_not_touched() -> None:
    process, used = hold()
    try:
        with scratch.folder("trainer"):
            assert (used / "weights").exists()
    finally:
        end(process)


def test_it_may_lie_elsewhere_and_what_was_left_there_is_removed_too(
    place: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (left := elsewhere / f"{scratch.prefix('vllm')}x").mkdir()
    grown_old = time.time() - 2 * scratch.YOUNG_S
    os.utime(left, (grown_old, grown_old))
    with scratch.folder("vllm", elsewhere) as path:
        assert list(elsewhere.iterdir()) == [path]
    assert list(place.iterdir()) == []


def test_another_machine_has_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    here = scratch.prefix("vllm")
    monkeypatch.setattr("socket.gethostname", lambda: "n" * 64)
    assert scratch.prefix("vllm") != here
    assert len(scratch.prefix("vllm")) == len(here)


def test_other_kinds_and_young_folders_are_left_alone(place: Path) -> None:
    process, left = hold()
    end(process)
    (young := place / f"{scratch.prefix('harness')}x").mkdir()
    with scratch.folder("harness"):
        assert left.exists()
        assert young.exists()
