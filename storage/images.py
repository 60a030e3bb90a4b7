"""Images of messages in the object store: one object per digest, whichever run sent it first.

Segments name the digests, so an image stays as long as the ledger does.
"""

from domain.errors import LedgerError
from domain.images import Image
from storage.database import Tx


def key(sha256: str) -> str:
    """Where an image lies in the store."""
    return f"images/{sha256}"


def find(tx: Tx, sha256: str) -> str | None:
    """Key of a stored image; None if nobody stored it."""
    row = tx.execute(
        "SELECT s3_key FROM objects WHERE sha256 = %s", (bytes.fromhex(sha256),)
    ).fetchone()
    return None if row is None else str(row["s3_key"])


def require(tx: Tx, sha256: str) -> str:
    """Key of a stored image.

    Raises:
        LedgerError: nobody stored it.
    """
    found = find(tx, sha256)
    if found is None:
        raise LedgerError(
            f"a message refers to the image {sha256}, which was never stored; give the environment's "
            "messages the image itself (rollbook.Image)"
        )
    return found


def note(tx: Tx, image: Image) -> None:
    """Note that an image is in the store. Idempotent."""
    tx.execute(
        """INSERT INTO objects(sha256, s3_key, bytes, media_type) VALUES (%s, %s, %s, %s)
        ON CONFLICT (sha256) DO NOTHING""",
        (bytes.fromhex(image.sha256), key(image.sha256), len(image.data), image.media_type),
    )
