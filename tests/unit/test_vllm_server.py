"""The vLLM process beside a front, played by a small program with a child and sockets of its own."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from domain.errors import ConfigError, EngineUnavailable
from engine.refusals import NotResident
from engine.vllm import server
from engine.vllm.command import Settings
from engine.vllm.residents import Residents
from engine.vllm.server import OwnServer
from engine.vllm.sets import WeightSet
from engine.vllm.strategies import InPlace
from storage import scratch

LIKE_VLLM = f"""#!{sys.executable}
import os, socket, sys, uuid
from http.server import BaseHTTPRequestHandler, HTTPServer

if "-c" in sys.argv:
    print(os.environ.get("BUILD", "cpu"))
    raise SystemExit
listening = socket.socket(socket.AF_UNIX)
listening.bind(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], str(uuid.uuid4())))
if os.environ.get("BROKEN"):
    print("Error: no memory")
    raise SystemExit(3)
if os.fork() == 0:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()


class Routes(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        broken = self.path == "/collective_rpc" and os.environ.get("NO_RELOAD")
        self.send_response(500 if broken else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_):
        pass


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Routes).serve_forever()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's servers make their folders; pytest's are too long for sockets."""
    with scratch.folder("server") as folder:
        monkeypatch.setattr(server, "socket_place", lambda: folder)
        yield folder


def own_server(place: Path, *, masks: bool = False, **environment: str) -> OwnServer:
    program = place / "python"
    program.write_text(LIKE_VLLM)
    program.chmod(0o700)
    settings = Settings(python=program, max_batch=1, sampling_masks=masks)
    return OwnServer(settings, {**os.environ, **environment}, place / "vllm.log")


def folders(place: Path) -> list[Path]:
    return list(place.glob(f"{scratch.prefix('vllm')}*"))


async def test_its_sockets_lie_in_a_folder_that_goes_with_it(place: Path) -> None:
    own = own_server(place)
    assert await own.ensure(Path("/m"), "float32")
    (folder,) = folders(place)
    (made,) = folder.iterdir()
    assert made.is_socket()
    assert not await own.ensure(Path("/m"), "float32")  # it runs
    assert folders(place) == [folder]
    await own.stop()
    assert folders(place) == []


async def test_a_killed_one_leaves_its_sockets_to_the_next_start(place: Path) -> None:
    own = own_server(place)
    await own.ensure(Path("/m"), "float32")
    (left,) = folders(place)
    process = own._process
    assert process is not None
    process.kill()
    await process.wait()
    assert not await own.alive()
    assert list(left.iterdir())
    assert await own.ensure(Path("/m"), "float32")
    (fresh,) = folders(place)
    assert fresh != left
    await own.stop()
    assert folders(place) == []


async def test_one_that_does_not_come_up_leaves_nothing_and_says_why(place: Path) -> None:
    own = own_server(place, BROKEN="1")
    with pytest.raises(EngineUnavailable, match="ended with 3 while it started: Error: no memory"):
        await own.ensure(Path("/m"), "float32")
    assert folders(place) == []


async def test_what_it_started_ends_with_it_although_that_ignores_the_signal(place: Path) -> None:
    own = own_server(place)
    await own.ensure(Path("/m"), "float32")
    assert own._process is not None
    group = own._process.pid
    os.killpg(group, 0)
    await own.stop()
    async with asyncio.timeout(10):
        while _lives(group):  # noqa: ASYNC110 - init reaps what it has lost, in its own time
            await asyncio.sleep(0.01)


def _lives(group: int) -> bool:
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            return True
    return False


@dataclass
class Folders:
    """Weights in a folder of their own, of a model that names its architecture."""

    place: Path

    def fetch(self, manifest: str, sha256: str | None) -> WeightSet:
        folder = self.place / manifest
        folder.mkdir()
        return WeightSet(
            sha256=manifest, folder=folder, shapes={"a": ("float32", (1,))}, model="m", probe=None
        )

    def fetch_model(self, manifest: str) -> Path:
        folder = self.place / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
        return folder


async def test_where_the_version_before_cannot_be_put_back_the_server_is_ended(
    place: Path,
) -> None:
    """A server whose reload failed has no weights; its next computation would end it anyway."""
    source, own = Folders(place), own_server(place, NO_RELOAD="1")
    residents = Residents(InPlace(own, source, place), own, source, most=8, capabilities=())
    await residents.load("run@0", "w0", "w0", None)
    process = own._process
    with pytest.raises(EngineUnavailable, match="run@1 could not be loaded"):
        await residents.load("run@1", "w1", "w1", None)
    assert process is not None
    assert process.returncode is not None
    assert residents.policies() == {}
    with pytest.raises(NotResident):
        async with residents.request("run@0", 0):
            pass


def test_what_is_no_vllm_is_refused_before_anything_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILD", "none")
    with pytest.raises(ConfigError, match=r"has no vLLM; set ROLLBOOK_VLLM_PYTHON"):
        own_server(place)
    with pytest.raises(ConfigError, match=r"cannot be asked for its vLLM"):
        OwnServer(Settings(python=place / "absent"), {}, place / "vllm.log")


def test_a_cpu_build_is_not_started_for_kept_sets_which_it_cannot_report(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"does not report kept sets.*builtin"):
        own_server(place, masks=True)
    monkeypatch.setenv("BUILD", "gpu")
    own_server(place, masks=True)


@pytest.mark.parametrize(("length", "fits"), [(34, True), (35, False)])
def test_a_sockets_address_is_short_wherever_temporary_files_lie(
    monkeypatch: pytest.MonkeyPatch, length: int, fits: bool
) -> None:
    """One of more than 107 letters, on macOS 103, cannot be bound."""
    place = "/" + "t" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", place)
    found = server.socket_place()
    assert found == Path(place if fits else "/tmp")
    address = found / (scratch.prefix("vllm") + "12345678") / "01234567-89ab-cdef-0123-456789abcdef"
    assert len(str(address)) <= 103
