"""Sets of files in the object store that exist as a whole or not at all.

A set (weights, a checkpoint, a model folder) is its `manifest.json`: the files, their sizes and
digests. The files are stored first, the manifest last, so an upload that dies halfway leaves no
manifest and is no set. Fetching verifies every digest before the folder appears under its name; a
folder that is there is complete.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from domain import failpoints
from domain.errors import DigestMismatch, ObjectError
from storage.objects import ObjectStore, again, digest

NAME = "manifest.json"
_FILES_AT_ONCE = 4

Kind = Literal["weights", "checkpoint", "model"]


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class File(_Stored):
    """One file of a set."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


class Tensor(_Stored):
    """One tensor, and the file that holds it, or its first slice."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class Manifest(_Stored):
    """What a set consists of."""

    format: Literal["rollbook-manifest-1"] = "rollbook-manifest-1"
    kind: Kind
    sha256: str
    """What the set as a whole is known by, e.g. the digest of the weights in the ledger."""
    files: dict[str, File]
    """By path below the set's prefix."""
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """The stored form; equal manifests have equal bytes."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
        ).encode()

    @classmethod
    def decode(cls, key: str, content: bytes) -> "Manifest":
        """Parse the stored form.

        Raises:
            DigestMismatch: it is no manifest, or names a file outside the set.
        """
        try:
            manifest = cls.model_validate_json(content)
            for name in manifest.files:
                _check_name(name)
        except (ValidationError, ObjectError) as error:
            raise DigestMismatch(
                f"{key!r} is no manifest that this version can read: {error}; restore the object, or "
                "go back to an earlier version or checkpoint"
            ) from error
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A set that is completely in the store."""

    manifest_key: str
    manifest_sha256: str
    bytes: int


def upload(
    store: ObjectStore,
    prefix: str,
    files: Mapping[str, bytes | Path],
    *,
    kind: Kind,
    sha256: str,
    tensors: Mapping[str, Mapping[str, Any]] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Stored:
    """Store a set: files in parallel, then the manifest. Safe to repeat after any interruption.

    Args:
        store: where.
        prefix: the set's place, without the last slash; the manifest is `prefix/manifest.json`.
        files: contents by their path below the prefix.
        kind: what it is.
        sha256: what the set as a whole is known by.
        tensors: `{dtype, shape, file}` by tensor name.
        meta: anything else, as JSON.

    Raises:
        DigestMismatch: the prefix holds another set already.
        ObjectError: the store refused or could not be reached; there is no manifest then.
    """
    stored = put(store, prefix, files, kind=kind)
    return seal(store, prefix, stored, kind=kind, sha256=sha256, tensors=tensors, meta=meta)


def put(
    store: ObjectStore, prefix: str, files: Mapping[str, bytes | Path], *, kind: Kind
) -> dict[str, File]:
    """Store files of a set that several processes put together; it is none until it is sealed.

    Raises:
        DigestMismatch: the prefix holds another file of such a name already.
        ObjectError: the store refused or could not be reached.
    """
    for name in files:
        _check_name(name)
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="upload") as pool:
        described = dict(zip(files, pool.map(_describe, files.values()), strict=True))
        for _ in pool.map(
            lambda name: store.put_new(
                f"{prefix}/{name}", files[name], sha256=described[name].sha256
            ),
            files,
        ):
            if kind == "checkpoint":
                failpoints.reach("ck_part")
    return described


def seal(
    store: ObjectStore,
    prefix: str,
    files: Mapping[str, File],
    *,
    kind: Kind,
    sha256: str,
    tensors: Mapping[str, Mapping[str, Any]] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Stored:
    """Make a set of files that are all stored: write its manifest. Arguments and errors as `upload`."""
    manifest = Manifest(
        kind=kind,
        sha256=sha256,
        files=dict(files),
        tensors={name: Tensor.model_validate(dict(t)) for name, t in (tensors or {}).items()},
        meta=dict(meta or {}),
    )
    key, content = f"{prefix}/{NAME}", manifest.encode()
    own = hashlib.sha256(content).hexdigest()
    try:
        store.put_new(key, content, sha256=own)
    except DigestMismatch:
        # An earlier upload of the same set that described it otherwise (its meta) stands.
        own = _adopt(store, key, manifest)
    return Stored(manifest_key=key, manifest_sha256=own, bytes=manifest.size)


def read(store: ObjectStore, manifest_key: str, *, sha256: str | None = None) -> Manifest:
    """The manifest alone.

    Args:
        store: where.
        manifest_key: of `manifest.json`.
        sha256: what was promised: the digest of the manifest's bytes, or of the set it describes.

    Raises:
        ObjectMissing: no manifest: the set was never completely uploaded, or deleted since.
        DigestMismatch: it is not the promised one.
    """
    return _read(store, manifest_key, sha256)[0]


def fetch(
    store: ObjectStore,
    manifest_key: str,
    dest: Path,
    *,
    sha256: str | None = None,
    wanted: Callable[[str], bool] = lambda _: True,
) -> Manifest:
    """Bring a set into a folder, verified. Idempotent; concurrent fetches share one download.

    Args:
        store: where.
        manifest_key: of `manifest.json`.
        dest: the folder; it appears (with the manifest in it) once every digest is verified. One
            that is there already is verified again, and replaced if it is damaged.
        sha256: what was promised: the digest of the manifest's bytes, or of the set it describes.
        wanted: which of the files to bring; the same for every fetch into `dest`.

    Raises:
        ObjectMissing: the manifest, or a file it names, is not in the store.
        DigestMismatch: the manifest or a file is not what was promised.
    """
    manifest, content = _read(store, manifest_key, sha256)
    files = {name: file for name, file in manifest.files.items() if wanted(name)}
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _locked(dest.with_name(dest.name + ".lock")):
        if _holds(dest, files, content):
            return manifest
        draft = dest.with_name(dest.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        prefix = manifest_key.removesuffix(NAME)
        for name in files:
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="fetch") as pool:
            for _ in pool.map(
                lambda item: store.download(
                    prefix + item[0], draft / item[0], sha256=item[1].sha256
                ),
                files.items(),
            ):
                pass
        (draft / NAME).write_bytes(content)
        shutil.rmtree(dest, ignore_errors=True)
        draft.rename(dest)
    return manifest


def remove(store: ObjectStore, manifest_key: str) -> None:
    """Delete a set, its manifest first: half a deletion leaves no set.

    Raises:
        ObjectError: the key names no manifest, so what lies beside it is no set.
    """
    if PurePosixPath(manifest_key).name != NAME or manifest_key == NAME:
        raise ObjectError(f"{manifest_key!r} is no manifest of a set; nothing is deleted")
    store.delete([manifest_key])
    store.delete(entry.key for entry in store.list(manifest_key.removesuffix(NAME)))


def _read(store: ObjectStore, key: str, promised: str | None) -> tuple[Manifest, bytes]:
    return again(lambda: _checked(store.get(key), key, promised))


def _checked(content: bytes, key: str, promised: str | None) -> tuple[Manifest, bytes]:
    manifest = Manifest.decode(key, content)
    found = hashlib.sha256(content).hexdigest()
    if promised is not None and promised not in (found, manifest.sha256):
        raise DigestMismatch(
            f"manifest {key!r} has sha256 {found} and describes {manifest.kind} "
            f"{manifest.sha256}, but {promised} was promised: it was replaced; restore it, or go "
            "back to an earlier version or checkpoint"
        )
    return manifest, content


def _adopt(store: ObjectStore, key: str, ours: Manifest) -> str:
    theirs, content = _read(store, key, None)
    same = ("kind", "sha256", "files", "tensors")
    if any(getattr(theirs, field) != getattr(ours, field) for field in same):
        raise DigestMismatch(
            f"{key!r} exists already and describes {theirs.kind} {theirs.sha256}, ours is "
            f"{ours.sha256}; a prefix is used once, upload under another"
        )
    return hashlib.sha256(content).hexdigest()


def _describe(body: bytes | Path) -> File:
    size = len(body) if isinstance(body, bytes) else body.stat().st_size
    return File(sha256=digest(body), bytes=size)


def _holds(folder: Path, files: Mapping[str, File], content: bytes) -> bool:
    """Whether the folder is that of this manifest and holds these files, every byte of them."""
    try:
        return (folder / NAME).read_bytes() == content and all(
            _describe(folder / name) == file for name, file in files.items()
        )
    except OSError:
        return False


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) in (".", NAME):
        raise ObjectError(f"{name!r} cannot be a file of a set: give a plain path below its prefix")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock among processes and threads."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
