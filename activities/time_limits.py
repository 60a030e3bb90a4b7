"""How long the attempt that runs here may take.

`groups.timeout` counts from the submission. The attempt stops by itself when it is up, so that what
was sampled so far is recorded; Temporal ends the activity a little later (`workflows/options.py`) if
its worker could not.
"""

import time

from temporalio import activity

from activities.session import LONGEST_S
from domain.config import RunConfig


def left_s(config: RunConfig, began: float) -> float | None:
    """Seconds until the time of the attempt that runs here is up; None without a limit.

    Args:
        config: of the run.
        began: monotonic time at which this execution began.
    """
    if config.groups.timeout is None:
        return None
    return max(0.0, config.groups.timeout - _passed(began))


def patience_s(config: RunConfig, began: float) -> float:
    """Seconds for which engines are tried again: a little less than the attempt has, so that they
    are blamed and not its slowness."""
    info = activity.info()
    limits = [left_s(config, began)]
    if info.start_to_close_timeout is not None:
        limits.append(info.start_to_close_timeout.total_seconds() - (time.monotonic() - began))
    left = min((limit for limit in limits if limit is not None), default=LONGEST_S)
    return max(0.0, left - min(2.0, 0.1 * left))


def _passed(began: float) -> float:
    """Seconds since the attempt was submitted to Temporal; waiting for a slot counts."""
    info = activity.info()
    waited = info.started_time - info.scheduled_time  # both by the server's clock
    return waited.total_seconds() + time.monotonic() - began
