"""The number by which the ledger tells one life of an engine from the next."""

import secrets
import time


def new_incarnation() -> int:
    """A positive 63-bit number that no earlier life of this engine had."""
    return (int(time.time()) << 24 | secrets.randbits(24)) & (2**63 - 1)
