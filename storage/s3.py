"""The S3 client, and what its errors mean."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from domain.errors import ObjectError, ObjectMissing
from domain.services import Services

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
PRESENT = frozenset({"412", "PreconditionFailed"})
REFUSED = frozenset(
    {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed"}
)
AGAIN = frozenset({"409", "ConditionalRequestConflict", "NoSuchUpload", "BadDigest"})
"""Settled by doing it again: another conditional write was under way; the answer to the completion
of an upload was lost; the bytes were damaged on their way."""
SIGNABLE_S = 300.0
"""A clock that is wrong by less is not blamed."""


def connect(services: Services, *, threads: int, attempts: int) -> "S3Client":
    """A client; nothing is sent yet."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=services.s3_endpoint,
        aws_access_key_id=services.s3_access_key,
        aws_secret_access_key=services.s3_secret_key,
        aws_session_token=services.s3_session_token,
        region_name=services.s3_region,
        config=Config(
            signature_version="s3v4",
            # Without TLS botocore would sign a SHA-256 of every body, beside the checksum that the
            # store looks at. With TLS it does not either.
            s3={"addressing_style": "path", "payload_signing_enabled": False}
            if services.s3_endpoint.startswith("http://")
            else {"addressing_style": "path"},
            retries={"mode": "standard", "total_max_attempts": attempts},
            # The newer defaults send trailing checksums that several stores refuse.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=4 * threads,
            connect_timeout=5,
            read_timeout=30,
        ),
    )


@contextlib.contextmanager
def asking(endpoint: str, bucket: str, key: str) -> Iterator[None]:
    """Turn the client's errors into ours; the object is named."""
    try:
        yield
    except ClientError as error:
        told = code(error)
        if told in MISSING:
            raise ObjectMissing(
                f"no object {key!r} in bucket {bucket!r} at {endpoint}; it was never "
                "completely uploaded, or deleted since"
            ) from error
        if told == "NoSuchBucket":
            raise ObjectMissing(
                f"no bucket {bucket!r} at {endpoint}; check ROLLBOOK_S3_BUCKET"
            ) from error
        why = wrong_clock(error) or str(error)
        raise ObjectError(f"{endpoint} refused {key!r}: {why}") from error
    except BotoCoreError as error:
        raise ObjectError(f"{endpoint} failed for {key!r}: {error}") from error


def code(error: ClientError) -> str:
    """What the store calls it."""
    return error.response.get("Error", {}).get("Code", "")


def wrong_clock(error: ClientError) -> str | None:
    """What to do if the store refused a request because of this machine's clock; None if not so.

    A signature carries the time, and is good for a quarter of an hour.
    """
    if code(error) not in REFUSED:
        return None
    try:
        theirs = parsedate_to_datetime(error.response["ResponseMetadata"]["HTTPHeaders"]["date"])
    except (KeyError, ValueError):
        return None
    ahead_s = (datetime.now(UTC) - theirs).total_seconds()
    if abs(ahead_s) < SIGNABLE_S:
        return None
    return f"this machine's clock differs from the store's by {ahead_s:+.0f} s; set it (NTP)"
