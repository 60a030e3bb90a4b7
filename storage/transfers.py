"""Large objects in parts, several at once, their digests taken while they travel.

Of one object no more parts are in memory than can be on their way.
"""

import base64
import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import BotoCoreError, ClientError

from domain.errors import DigestMismatch

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client
    from types_boto3_s3.type_defs import CompletedPartTypeDef

PART_BYTES = 16 * 2**20
_MOST_PARTS = 9000  # S3 allows 10,000
_CHUNK = 2**20


@dataclass(frozen=True)
class Transfers:
    """Uploads and downloads of one bucket."""

    s3: "S3Client"
    bucket: str
    threads: int
    """Parts of one object in flight at once."""

    def upload(self, key: str, body: bytes | Path, sha256: str) -> None:
        """Create an object; the condition that it is absent is checked by the store, when it is whole.

        Raises:
            DigestMismatch: the body is not what was promised.
            ClientError: the store's; code 412 if the object was there first.
        """
        size = size_of(body)
        part_bytes = max(PART_BYTES, -(-size // _MOST_PARTS))
        upload = self.s3.create_multipart_upload(
            Bucket=self.bucket, Key=key, Metadata={"sha256": sha256}
        )["UploadId"]

        def send(number: int, content: bytes) -> "CompletedPartTypeDef":
            answer = self.s3.upload_part(
                Bucket=self.bucket,
                Key=key,
                UploadId=upload,
                PartNumber=number,
                Body=content,
                ContentMD5=base64.b64encode(
                    hashlib.md5(content, usedforsecurity=False).digest()
                ).decode(),
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        done = False
        try:
            parts, found = self._send_parts(send, body, size, part_bytes)
            keep_promise(key, found, sha256)
            self.s3.complete_multipart_upload(
                Bucket=self.bucket,
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                IfNoneMatch="*",
            )
            done = True
        finally:
            if not done:
                with contextlib.suppress(ClientError, BotoCoreError):
                    self.s3.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)

    def _send_parts(
        self,
        send: "Callable[[int, bytes], CompletedPartTypeDef]",
        body: bytes | Path,
        size: int,
        part_bytes: int,
    ) -> "tuple[Sequence[CompletedPartTypeDef], str]":
        """Send all parts, and take the digest of the whole while they travel."""
        whole, sent = hashlib.sha256(), deque[Future["CompletedPartTypeDef"]]()
        parts = []
        with ThreadPoolExecutor(self.threads, thread_name_prefix="s3") as pool:
            for number, start in enumerate(range(0, size, part_bytes), 1):
                if len(sent) > self.threads:  # no more in memory than can be on their way
                    parts.append(sent.popleft().result())
                content = _slice(body, start, part_bytes)
                sent.append(pool.submit(send, number, content))
                whole.update(content)
            parts += [part.result() for part in sent]
        return parts, whole.hexdigest()

    def download(self, key: str, path: Path) -> str:
        """Bring an object here.

        Returns:
            The digest of what was written, in hex.

        Raises:
            ClientError: the store's.
        """
        head = self.s3.head_object(Bucket=self.bucket, Key=key)
        size, tag = head["ContentLength"], head["ETag"]
        with path.open("wb") as file:
            os.truncate(file.fileno(), size)

            def receive(start: int) -> None:
                end = min(start + PART_BYTES, size) - 1
                # If-Match: all parts are of one object, even if somebody replaces it meanwhile.
                answer = self.s3.get_object(
                    Bucket=self.bucket, Key=key, Range=f"bytes={start}-{end}", IfMatch=tag
                )
                position = start
                for chunk in answer["Body"].iter_chunks(_CHUNK):
                    os.pwrite(file.fileno(), chunk, position)
                    position += len(chunk)

            with ThreadPoolExecutor(self.threads, thread_name_prefix="s3") as pool:
                list(pool.map(receive, range(0, size, PART_BYTES)))
        # Not part by part while others arrive: that cost half as much CPU again.
        return digest(path)


def digest(body: bytes | Path) -> str:
    """SHA-256 of bytes or of a file, in hex."""
    if isinstance(body, bytes):
        return hashlib.sha256(body).hexdigest()
    with body.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keep_promise(key: str, found: str, promised: str) -> None:
    """Refuse to store what is not the bytes that were promised."""
    if found != promised:
        raise DigestMismatch(
            f"what was to be stored as {key!r} has sha256 {found}, not the promised {promised}; "
            "it changed after its digest was taken"
        )


def _slice(body: bytes | Path, start: int, length: int) -> bytes:
    if isinstance(body, bytes):
        return body[start : start + length]
    with body.open("rb") as file:
        file.seek(start)
        return file.read(length)


def size_of(body: bytes | Path) -> int:
    """Bytes."""
    return len(body) if isinstance(body, bytes) else body.stat().st_size
