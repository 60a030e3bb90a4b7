"""The object store against the real S3 server: what is promised is what is read, or an error."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from botocore.config import Config

from domain.errors import ConfigError, DigestMismatch, ObjectError, ObjectMissing
from domain.services import Services
from storage import manifests, transfers
from storage.objects import ObjectStore, digest
from tests.chaos.clocks import wrong_clock


@pytest.fixture(scope="module")
def store(s3_services: Services) -> ObjectStore:
    opened = ObjectStore(s3_services)
    opened.prepare()
    return opened


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"tests/{request.node.name}-{os.urandom(4).hex()}"


def overwrite(services: Services, key: str, body: bytes) -> None:
    """Replace an object behind rollbook's back."""
    client = boto3.client(
        "s3",
        endpoint_url=services.s3_endpoint,
        aws_access_key_id=services.s3_access_key,
        aws_secret_access_key=services.s3_secret_key,
        region_name=services.s3_region,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    client.put_object(Bucket=services.s3_bucket, Key=key, Body=body)


def test_put_is_idempotent_and_never_overwrites(store: ObjectStore, prefix: str) -> None:
    key = f"{prefix}/a"
    assert store.put_new(key, b"one", sha256=digest(b"one")) is True
    assert store.put_new(key, b"one", sha256=digest(b"one")) is False
    with pytest.raises(DigestMismatch, match="exists already with other bytes"):
        store.put_new(key, b"two", sha256=digest(b"two"))
    assert store.get(key, sha256=digest(b"one")) == b"one"


def test_a_body_that_is_not_what_was_promised_is_not_stored(
    store: ObjectStore, prefix: str
) -> None:
    with pytest.raises(DigestMismatch, match="not the promised"):
        store.put_new(f"{prefix}/a", b"one", sha256=digest(b"two"))
    assert not store.exists(f"{prefix}/a")


def test_a_large_file_that_changed_since_its_digest_was_taken_is_not_stored(
    store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    """Its digest is taken while its parts travel, so they are given up when the last one is sent."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(transfers.PART_BYTES + 12345))
    promised = digest(source)
    with source.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(DigestMismatch, match="not the promised"):
        store.put_new(f"{prefix}/big", source, sha256=promised)
    assert not store.exists(f"{prefix}/big")
    assert store.unfinished(f"{prefix}/") == []


def race(store: ObjectStore, key: str, bodies: list[bytes]) -> list[bool]:
    """Whether each of the writers, all at once, was told that it created the object."""
    start = threading.Barrier(len(bodies))

    def write(body: bytes) -> bool:
        start.wait()
        try:
            return store.put_new(key, body, sha256=digest(body))
        except DigestMismatch:
            return False

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [*pool.map(write, bodies)]


def test_of_racing_writers_exactly_one_wins(store: ObjectStore, prefix: str) -> None:
    bodies = [bytes([i]) * 100 for i in range(8)]
    won = race(store, f"{prefix}/a", bodies)
    assert won.count(True) == 1
    assert store.get(f"{prefix}/a") == bodies[won.index(True)]


def test_racing_uploads_in_parts_leave_one_writer_s_bytes(store: ObjectStore, prefix: str) -> None:
    key, bodies = f"{prefix}/a", [bytes([i]) * (transfers.PART_BYTES + 1) for i in range(4)]
    won = race(store, key, bodies)
    held = bodies.index(store.get(key))
    assert won[held]  # the store may let two through; whose bytes are gone is told by their digest
    for body in bodies[:held] + bodies[held + 1 :]:
        with pytest.raises(DigestMismatch):
            store.get(key, sha256=digest(body))


def test_a_large_object_travels_in_parts(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(os.urandom(2 * transfers.PART_BYTES + 12345))
    own = digest(source)
    assert store.put_new(f"{prefix}/big", source, sha256=own) is True
    assert store.put_new(f"{prefix}/big", source, sha256=own) is False
    store.download(f"{prefix}/big", copy, sha256=own)
    assert digest(copy) == own
    assert {*tmp_path.iterdir()} == {source, copy}


def test_an_empty_object_can_be_stored_and_fetched(
    store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    store.put_new(f"{prefix}/empty", b"", sha256=digest(b""))
    store.download(f"{prefix}/empty", tmp_path / "empty", sha256=digest(b""))
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_changed_byte_is_detected_and_no_file_appears(
    store: ObjectStore, s3_services: Services, prefix: str, tmp_path: Path
) -> None:
    key, body = f"{prefix}/a", bytearray(os.urandom(100_000))
    promised = digest(bytes(body))
    store.put_new(key, bytes(body), sha256=promised)
    body[77_777] ^= 1
    overwrite(s3_services, key, bytes(body))
    with pytest.raises(DigestMismatch, match=key):
        store.get(key, sha256=promised)
    with pytest.raises(DigestMismatch, match="go back to an earlier version"):
        store.download(key, tmp_path / "a", sha256=promised)
    assert [*tmp_path.iterdir()] == []


def test_missing_objects_are_named(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissing, match=f"{prefix}/none"):
        store.get(f"{prefix}/none")
    with pytest.raises(ObjectMissing, match=f"{prefix}/none"):
        store.download(f"{prefix}/none", tmp_path / "x", sha256=digest(b""))
    assert store.exists(f"{prefix}/none") is False


def test_listing_and_deleting(store: ObjectStore, prefix: str) -> None:
    for name in ("b", "a", "c"):
        store.put_new(f"{prefix}/{name}", name.encode(), sha256=digest(name.encode()))
    assert [e.key for e in store.list(f"{prefix}/")] == [f"{prefix}/{n}" for n in "abc"]
    store.delete([f"{prefix}/a", f"{prefix}/b", f"{prefix}/never-there"])
    assert [(e.key, e.bytes) for e in store.list(f"{prefix}/")] == [(f"{prefix}/c", 1)]


@pytest.mark.parametrize(
    ("wrong", "variable"),
    [
        ({"s3_secret_key": "wrong"}, "AWS_SECRET_ACCESS_KEY"),
        ({"s3_access_key": "wrong"}, "AWS_ACCESS_KEY_ID"),
        ({"s3_endpoint": "http://127.0.0.1:1"}, "ROLLBOOK_S3_ENDPOINT"),
        ({"s3_endpoint": "no address"}, "ROLLBOOK_S3_ENDPOINT"),
    ],
)
def test_a_wrong_address_or_key_is_refused_by_name(
    s3_services: Services, wrong: dict[str, str], variable: str
) -> None:
    with pytest.raises(ConfigError, match=variable):
        ObjectStore(s3_services.model_copy(update=wrong), attempts=1).prepare()


PREPARE = """import os
from domain.services import Services
from storage.objects import ObjectStore
ObjectStore(Services.from_environment(os.environ), attempts=1).prepare()"""


def test_a_wrong_clock_is_what_is_blamed(s3_services: Services, tmp_path: Path) -> None:
    environ = {**os.environ, **s3_services.environment(), **wrong_clock(tmp_path / "clock", 7200.0)}
    told = subprocess.run(
        [sys.executable, "-c", PREPARE], env=environ, capture_output=True, text=True, check=False
    )
    assert re.search(r"clock differs from the store's by \+7\d\d\d s; set it", told.stderr)


class FlippingProxy:
    """Passes bytes on, but flips a bit of one byte a connection sends (or receives)."""

    def __init__(
        self, target: str, *, sent: int | None = None, received: int | None = None
    ) -> None:
        self._address = target.removeprefix("http://").split(":")
        self._at = (sent, received)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.flipped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._address[0], int(self._address[1])))
                for source, sink, at in ((near, far, self._at[0]), (far, near, self._at[1])):
                    threading.Thread(
                        target=self._pass, args=(source, sink, at), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, at: int | None) -> None:
        passed = 0
        with source, contextlib.suppress(OSError):
            while some := bytearray(source.recv(65536)):
                if at is not None and passed <= at < passed + len(some):
                    some[at - passed] ^= 1
                    self.flipped += 1
                sink.sendall(some)
                passed += len(some)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxied(
    s3_services: Services, request: pytest.FixtureRequest
) -> Iterator[tuple[Callable[[], ObjectStore], FlippingProxy]]:
    proxy = FlippingProxy(s3_services.s3_endpoint, **request.param)
    services = s3_services.model_copy(update={"s3_endpoint": proxy.url})
    yield lambda: ObjectStore(services, attempts=2), proxy
    proxy.close()


@pytest.mark.parametrize("proxied", [{"sent": 60_000}], indirect=True)
@pytest.mark.parametrize("size", [200_000, transfers.PART_BYTES + 200_000])
def test_what_is_damaged_on_its_way_in_is_sent_again(
    store: ObjectStore,
    proxied: tuple[Callable[[], ObjectStore], FlippingProxy],
    prefix: str,
    size: int,
) -> None:
    connect, proxy = proxied
    body = os.urandom(size)
    assert connect().put_new(f"{prefix}/a", body, sha256=digest(body)) is True
    assert proxy.flipped > 0
    assert store.get(f"{prefix}/a", sha256=digest(body)) == body


@pytest.mark.parametrize("proxied", [{"received": 60_000}], indirect=True)
def test_what_is_damaged_on_its_way_out_is_fetched_again(
    store: ObjectStore,
    proxied: tuple[Callable[[], ObjectStore], FlippingProxy],
    prefix: str,
    tmp_path: Path,
) -> None:
    connect, proxy = proxied
    body = os.urandom(200_000)
    store.put_new(f"{prefix}/a", body, sha256=digest(body))
    assert connect().get(f"{prefix}/a", sha256=digest(body)) == body
    connect().download(f"{prefix}/a", tmp_path / "a", sha256=digest(body))
    assert proxy.flipped == 2
    assert (tmp_path / "a").read_bytes() == body


def test_what_is_damaged_in_the_store_is_never_handed_on(
    store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    store.put_new(f"{prefix}/a", b"damaged", sha256=digest(b"damaged"))
    with pytest.raises(DigestMismatch):
        store.get(f"{prefix}/a", sha256=digest(b"whole"))
    with pytest.raises(DigestMismatch):
        store.download(f"{prefix}/a", tmp_path / "a", sha256=digest(b"whole"))
    assert [*tmp_path.iterdir()] == []


FILES = {"shard-0.safetensors": b"zero" * 1000, "sub/shard-1.safetensors": b"one" * 1000}


def weights(store: ObjectStore, prefix: str, **changed: object) -> manifests.Stored:
    tensors = {"w": {"dtype": "F32", "shape": [2, 3], "file": "shard-0.safetensors"}}
    meta = changed.get("meta", {"model": "models/x/manifest.json"})
    assert isinstance(meta, dict)
    return manifests.upload(
        store, prefix, FILES, kind="weights", sha256="ab" * 32, tensors=tensors, meta=meta
    )


def test_a_set_comes_back_as_it_was(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    stored = weights(store, prefix)
    assert weights(store, prefix) == stored
    assert stored.bytes == sum(map(len, FILES.values()))
    for promised in (None, "ab" * 32, stored.manifest_sha256):
        found = manifests.fetch(store, stored.manifest_key, tmp_path / "w", sha256=promised)
        assert found.meta == {"model": "models/x/manifest.json"}
        assert found.tensors["w"].shape == (2, 3)
    assert {name: (tmp_path / "w" / name).read_bytes() for name in FILES} == FILES
    assert not (tmp_path / "w.tmp").exists()


def test_a_set_described_anew_keeps_its_first_manifest(store: ObjectStore, prefix: str) -> None:
    first = weights(store, prefix)
    assert weights(store, prefix, meta={"probe": [1]}) == first
    with pytest.raises(DigestMismatch, match="prefix is used once"):
        manifests.upload(store, prefix, {}, kind="weights", sha256="cd" * 32)


def test_half_an_upload_is_no_set(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    for name, body in FILES.items():
        store.put_new(f"{prefix}/{name}", body, sha256=digest(body))
    with pytest.raises(ObjectMissing, match="never completely uploaded"):
        manifests.fetch(store, f"{prefix}/manifest.json", tmp_path / "w")
    assert not (tmp_path / "w").exists()
    assert weights(store, prefix).bytes > 0


def test_a_set_with_a_missing_or_damaged_file_never_appears(
    store: ObjectStore, s3_services: Services, prefix: str, tmp_path: Path
) -> None:
    stored = weights(store, prefix)
    overwrite(s3_services, f"{prefix}/sub/shard-1.safetensors", b"two" * 1000)
    with pytest.raises(DigestMismatch, match="sub/shard-1"):
        manifests.fetch(store, stored.manifest_key, tmp_path / "w")
    store.delete([f"{prefix}/sub/shard-1.safetensors"])
    with pytest.raises(ObjectMissing, match="sub/shard-1"):
        manifests.fetch(store, stored.manifest_key, tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_a_replaced_manifest_is_refused(
    store: ObjectStore, s3_services: Services, prefix: str, tmp_path: Path
) -> None:
    stored = weights(store, prefix)
    manifest = manifests.read(store, stored.manifest_key)
    other = manifest.model_copy(update={"sha256": "ef" * 32})
    overwrite(s3_services, stored.manifest_key, other.encode())
    with pytest.raises(DigestMismatch, match="it was replaced"):
        manifests.fetch(store, stored.manifest_key, tmp_path / "w", sha256="ab" * 32)
    outside = manifest.model_copy(
        update={"files": {"../x": manifests.File(sha256="0" * 64, bytes=1)}}
    )
    overwrite(s3_services, stored.manifest_key, outside.encode())
    with pytest.raises(ObjectError, match="plain path"):
        manifests.fetch(store, stored.manifest_key, tmp_path / "w")


def test_a_damaged_local_copy_is_replaced(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    stored = weights(store, prefix)
    manifests.fetch(store, stored.manifest_key, tmp_path / "w")
    (tmp_path / "w" / "shard-0.safetensors").write_bytes(b"zerO" * 1000)
    manifests.fetch(store, stored.manifest_key, tmp_path / "w")
    assert (tmp_path / "w" / "shard-0.safetensors").read_bytes() == FILES["shard-0.safetensors"]


def test_concurrent_fetches_share_one_folder(
    store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    stored = weights(store, prefix)
    with ThreadPoolExecutor(4) as pool:
        tried = [
            pool.submit(manifests.fetch, store, stored.manifest_key, tmp_path / "w")
            for _ in range(4)
        ]
    assert len({one.result().encode() for one in tried}) == 1


def test_a_removed_set_is_gone(store: ObjectStore, prefix: str) -> None:
    manifests.remove(store, weights(store, prefix).manifest_key)
    assert store.list(prefix) == []


def test_what_is_no_manifest_is_never_removed_as_a_set(store: ObjectStore, prefix: str) -> None:
    weights(store, prefix)
    for key in (prefix, f"{prefix}/", "manifest.json"):
        with pytest.raises(ObjectError, match="is no manifest"):
            manifests.remove(store, key)
    assert store.list(prefix)
