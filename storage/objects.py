"""The object store: S3 with create-only writes and verified digests.

An object is written once and never changed: every put carries `If-None-Match: *`, so of several
writers exactly one wins, and a writer that finds its own bytes there already has succeeded (it, or
an earlier try whose answer was lost). No read returns bytes whose SHA-256 was promised and differs.
Large objects travel in parts, in parallel; stores that check the condition of such an upload before
they commit it can let two racing writers through. Nothing rests on it: the keys of large objects
hold their digest or their writer's id, and what makes a set of them count is its small manifest.
Everything here is synchronous and thread-safe.
"""

import base64
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from domain.errors import ConfigError, DigestMismatch, ObjectError, ObjectMissing
from domain.services import Services
from storage import s3
from storage.transfers import PART_BYTES, Transfers, digest, keep_promise, size_of

__all__ = ["Entry", "ObjectStore", "Unfinished", "again", "digest"]

R = TypeVar("R")

_TRIES = 5
_DAMAGED_PAUSES_S = (0.1, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object in a listing."""

    key: str
    bytes: int
    modified: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An upload in parts that has not ended."""

    key: str
    upload: str
    begun: datetime


class ObjectStore:
    """One bucket."""

    def __init__(self, services: Services, *, threads: int = 4, attempts: int = 10) -> None:
        """Open a client; nothing is sent yet.

        Args:
            services: address, bucket and keys.
            threads: parts of one object in flight at once.
            attempts: tries of one request against connection errors, 5xx and throttling, with
                exponential back-off; ten outlast a restart of the store.

        Raises:
            ConfigError: the address is no URL.
        """
        if not services.s3_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"ROLLBOOK_S3_ENDPOINT = {services.s3_endpoint!r} is no address; write "
                "http://host:port or https://host"
            )
        self.bucket = services.s3_bucket
        self.endpoint = services.s3_endpoint
        self._s3 = s3.connect(services, threads=threads, attempts=attempts)
        self._transfers = Transfers(self._s3, self.bucket, threads)

    def prepare(self) -> None:
        """Make sure that the bucket exists, can be written, and honours create-only puts.

        Raises:
            ConfigError: the store cannot be reached, refuses the keys, or overwrites an object
                that was to be created only if absent.
        """
        where = f"the S3 store {self.endpoint} (ROLLBOOK_S3_ENDPOINT)"
        try:
            self._ensure_bucket()
            key = f".rollbook/probe-{uuid.uuid4()}"
            won = [self._create(key, b"probe", digest(b"probe")) for _ in range(2)]
            self._s3.delete_object(Bucket=self.bucket, Key=key)
        except ClientError as error:
            if (why := s3.wrong_clock(error)) is not None:
                raise ConfigError(f"{where} refuses every request: {why}") from error
            if s3.code(error) in s3.REFUSED:
                raise ConfigError(
                    f"{where} refuses the keys for bucket {self.bucket!r} ({s3.code(error)}); check "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (without them, what boto3's own chain "
                    "of credentials finds), and their rights on the bucket"
                ) from error
            raise ConfigError(f"{where} does not serve bucket {self.bucket!r}: {error}") from error
        except NoCredentialsError as error:
            raise ConfigError(
                f"{where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what "
                "boto3's own chain looks for (AWS_PROFILE, a web identity, a role of the machine)"
            ) from error
        except BotoCoreError as error:
            raise ConfigError(f"{where} cannot be used: {error}") from error
        if won != [True, False]:
            raise ConfigError(
                f"{where} ignores If-None-Match: a second put overwrote the first; rollbook needs a "
                "store with conditional writes (S3, SeaweedFS, MinIO, R2)"
            )

    def put_new(self, key: str, body: bytes | Path, *, sha256: str) -> bool:
        """Create an object. Idempotent: the same bytes under the same key are a success.

        Args:
            key: where.
            body: bytes, or a file that is not changed meanwhile.
            sha256: hex digest the body must have.

        Returns:
            Whether this call created it; False if it was there already.

        Raises:
            DigestMismatch: the body is not what was promised, or the key holds other bytes.
            ObjectError: the store refused or could not be reached.
        """
        with self._asking(key):
            if size_of(body) > PART_BYTES:
                created = self._create_in_parts(key, body, sha256)
            else:
                content = body if isinstance(body, bytes) else body.read_bytes()
                keep_promise(key, digest(content), sha256)
                created = self._create(key, content, sha256)
        if not created:
            self._require_same(key, sha256)
        return created

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        """The bytes of an object, verified if their digest is known.

        Raises:
            ObjectMissing: there is no such object.
            DigestMismatch: its bytes are not the promised ones.
        """

        def fetch() -> bytes:
            with self._asking(key):
                content = self._s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            if sha256 is not None:
                self._require(key, digest(content), sha256)
            return content

        return again(fetch)

    def download(self, key: str, path: Path, *, sha256: str) -> None:
        """Fetch an object into a file; the file appears only once its digest is verified.

        Raises:
            ObjectMissing: there is no such object.
            DigestMismatch: its bytes are not the promised ones.
        """
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")

        def fetch() -> None:
            with self._asking(key):
                found = self._transfers.download(key, draft)
            self._require(key, found, sha256)

        try:
            again(fetch)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            with self._asking(key):
                self._s3.head_object(Bucket=self.bucket, Key=key)
        except ObjectMissing:
            return False
        return True

    def list(self, prefix: str) -> list[Entry]:
        """All objects whose key starts with the prefix, in key order."""
        with self._asking(prefix):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix
            )
            return [
                Entry(key=item["Key"], bytes=item["Size"], modified=item["LastModified"])
                for page in pages
                for item in page.get("Contents", [])
            ]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already do not matter.

        Raises:
            ObjectError: names the objects the store kept.
        """
        names = [*keys]
        for start in range(0, len(names), 1000):
            some = names[start : start + 1000]
            with self._asking(some[0]):
                answer = self._s3.delete_objects(
                    Bucket=self.bucket,
                    Delete={"Objects": [{"Key": key} for key in some], "Quiet": True},
                )
            if kept := answer.get("Errors"):
                told = ", ".join(f"{e.get('Key')} ({e.get('Code')})" for e in kept[:5])
                raise ObjectError(f"{len(kept)} objects were not deleted: {told}")

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """Uploads in parts that were neither completed nor aborted."""
        with self._asking(prefix):
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=prefix
            )
            return [
                Unfinished(key=item["Key"], upload=item["UploadId"], begun=item["Initiated"])
                for page in pages
                for item in page.get("Uploads", [])
            ]

    def abort(self, upload: Unfinished) -> None:
        """Give up an upload and free its parts; one that is over already does not matter."""
        with self._asking(upload.key):
            try:
                self._s3.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload.key, UploadId=upload.upload
                )
            except self._s3.exceptions.NoSuchUpload:
                return

    def _ensure_bucket(self) -> None:
        try:
            self._s3.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if s3.code(error) not in s3.MISSING | {"NoSuchBucket"}:
                raise
            with contextlib.suppress(self._s3.exceptions.BucketAlreadyOwnedByYou):
                self._s3.create_bucket(Bucket=self.bucket)

    def _create(self, key: str, content: bytes, sha256: str) -> bool:
        """Put if absent; whether it was. The store checks the digest of what arrives."""
        return self._conditionally(
            lambda: self._s3.put_object(
                Bucket=self.bucket,
                Key=key,
                Body=content,
                IfNoneMatch="*",
                ChecksumSHA256=base64.b64encode(bytes.fromhex(sha256)).decode(),
                Metadata={"sha256": sha256},
            )
        )

    def _create_in_parts(self, key: str, body: bytes | Path, sha256: str) -> bool:
        # Parts are work: look before. And look after: see the module on racing uploads.
        if self.exists(key) or not self._conditionally(
            lambda: self._transfers.upload(key, body, sha256)
        ):
            return False
        self._require_same(key, sha256)
        return True

    def _conditionally(self, create: Callable[[], object]) -> bool:
        """Run a create-only request; False if the object was there first."""
        for attempt in range(_TRIES):
            try:
                create()
            except ClientError as error:
                if s3.code(error) in s3.PRESENT:
                    return False
                if s3.code(error) not in s3.AGAIN or attempt == _TRIES - 1:
                    raise
            else:
                return True
        raise AssertionError("unreachable")

    def _require_same(self, key: str, sha256: str) -> None:
        """The object that was there first must hold the same bytes."""
        with self._asking(key):
            head = self._s3.head_object(Bucket=self.bucket, Key=key)
        held = head["Metadata"].get("sha256") or digest(self.get(key))
        if held != sha256:
            raise DigestMismatch(
                f"{key!r} exists already with other bytes (sha256 {held}, ours {sha256}); objects "
                "are never overwritten: another writer used this key, write under a new one"
            )

    def _require(self, key: str, found: str, promised: str) -> None:
        if found != promised:
            raise DigestMismatch(
                f"object {key!r} in bucket {self.bucket!r} has sha256 {found}, the ledger or "
                f"manifest promises {promised}: it was damaged or replaced; restore the object, or "
                "go back to an earlier version or checkpoint"
            )

    def _asking(self, key: str) -> AbstractContextManager[None]:
        """Turn the client's errors into ours; the object is named."""
        return s3.asking(self.endpoint, self.bucket, key)


def again(fetch: Callable[[], R]) -> R:
    """Fetch something, once more and once more if it arrives damaged.

    Bytes that were damaged on their way arrive whole the next time; those damaged in the store never
    do, and then it is the last error that tells.
    """
    for pause in _DAMAGED_PAUSES_S:
        try:
            return fetch()
        except DigestMismatch:
            time.sleep(pause)
    return fetch()
