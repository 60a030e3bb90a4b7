"""The run that every case is tried on."""

from tests.telling_moment import moment

__all__ = ["moment"]
