"""The drift guard: an engine that samples from other weights than it says must not train the run.

Where the trainer scores tokens with the very version that sampled them, both must agree up to
rounding. They are compared at every step that has such tokens; when the mean difference stays above
the bound, the run is paused for a person to look, before the damage is learnt.
"""

import logging
from collections.abc import Mapping

from storage import runs
from storage.database import Ledger, Tx

log = logging.getLogger(__name__)

BOUND_NATS = {"float32": 0.02, "bfloat16": 0.1}
"""Mean difference, by the precision of the weights. Kernels differ by far less, wrong weights,
templates or temperatures by far more."""
STEPS = 2
"""So many such steps in a row pause the run: a single one may be an accident of few tokens."""


class DriftGuard:
    """Watches the steps of one process."""

    def __init__(self, dtype: str) -> None:
        self._bound = BOUND_NATS[dtype]
        self._above = 0

    def watch(self, ledger: Ledger, run: str, metrics: Mapping[str, float]) -> None:
        """Take in an applied step's figures, and pause the run when `alarm` says so."""
        alarm = self.alarm(metrics)
        if alarm is None:
            return
        log.error("run %s is paused: %s; `rollbook unpause %s` goes on", run, alarm, run)

        def pause(tx: Tx) -> None:
            if runs.lock(tx, run).state == "running":
                runs.pause(tx, run)

        ledger.call(pause)

    def alarm(self, metrics: Mapping[str, float]) -> str | None:
        """What is wrong, when it is time to stop; steps without comparable tokens count neither way."""
        drift = metrics.get("drift/mean")
        if drift is None:
            return None
        if drift <= self._bound:
            self._above = 0
            return None
        self._above += 1
        if self._above < STEPS:
            return None
        self._above = 0
        return (
            f"trainer and engines disagree by {drift:.3g} nats a token over the last {STEPS} steps "
            f"with tokens of the trainer's own version (bound {self._bound:g}): an engine holds "
            "other weights than it says, or another temperature or template"
        )
