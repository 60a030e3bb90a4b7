"""Where a program samples for an attempt, and as whom."""

from dataclasses import dataclass
from hashlib import sha256

from domain.messages import AttemptIn


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """An attempt's way to the recording gateway, which then writes its segments."""

    base_url: str
    api_key: str


def session_path(i: AttemptIn) -> str:
    """The path of an attempt's own base URL."""
    return f"/attempts/{i.run}/{i.group}/{i.sample}/{i.attempt}/v1"


def key_sha256(key: str) -> bytes:
    """What the ledger keeps of a key."""
    return sha256(key.encode()).digest()
