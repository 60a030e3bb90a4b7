"""Named places where a process can be made to die, so that every crash in the protocol is testable.

`FAILPOINT=name` (or `name:n` for the n-th time) in the environment ends the process with exit code
137 when it gets there, as `kill -9` would: no cleanup, no flush, no rollback but Postgres' own.
Without the variable `reach` compares two strings. Names that end in `_mid` lie inside a
transaction, before its commit.
"""

import os
from collections import Counter
from difflib import get_close_matches

from domain.errors import ConfigError

POINTS = {
    "c_uploaded": "creation: checkpoint 0 and weights 0 are in the object store, no row names them",
    "c_row": "creation: the run has its first checkpoint and version, nothing is published",
    "c_served": "creation: version 0 is served, nothing is handed over",
    "resume_done": "start: the lease is taken, nothing is restored",
    "restored": "start: weights, optimizer and generators are back, nothing is replayed",
    "replay_mid": "replay: one step is computed and verified, others may follow",
    "h_mid": "hand-over: inside its transaction",
    "h_done": "hand-over: committed, the relay may not have started the workflows",
    "plan_start": "plan: before its transaction",
    "plan_reopen": "plan: stale members are re-opened, inside the transaction",
    "plan_mid": "plan: inside its transaction",
    "plan_done": "plan: committed, nothing is computed",
    "mid_step": "compute: the proximal policy is scored, no gradient yet",
    "optimizer": "compute: the optimizer has moved the weights, nothing is recorded",
    "apply_mid": "apply: inside its transaction",
    "apply_done": "apply: committed, no checkpoint, nothing published",
    "ck_part": "checkpoint: some files are uploaded, no manifest",
    "ck_uploaded": "checkpoint: the manifest is uploaded, no row names it",
    "ck_mid": "checkpoint: inside its transaction",
    "ck_done": "checkpoint: committed",
    "p_uploaded": "publish: the weights are uploaded, the version is not recorded",
    "p_loading": "publish: recorded, engines are asked to load",
    "p_served": "publish: served, nothing is handed over",
    "close_mid": "close: inside its transaction",
    "close_done": "close: committed, the process has not ended",
}
"""Where a trainer may die."""

ROLLOUT_POINTS = {
    "attempt_started": "attempt: its start is committed, nothing is sampled",
    "segment_sampled": "attempt: an engine has answered, the segment is not committed",
    "segment_done": "attempt: a segment is committed, its caller has not seen it",
    "attempt_finished": "attempt: its finish is committed, Temporal does not know",
}
"""Where a rollout worker may die."""

ENGINE_POINTS = {
    "load_fetched": "engine: a version's weights are fetched and checked, it is not routable",
    "load_done": "engine: a version is routable, its caller does not know",
}
"""Where an engine may die."""

LEDGER_POINTS = {
    "load_unacknowledged": "ledger worker: an engine holds a version, the ledger does not know",
    "relay_mid": "ledger worker: commands are delivered to Temporal, none is marked done",
    "sweep_reopened": "ledger worker: the sweep has opened a lost group again",
}
"""Where a ledger worker may die: steward, relay, engine loads."""

ALL = POINTS | ROLLOUT_POINTS | ENGINE_POINTS | LEDGER_POINTS

_hits: Counter[str] = Counter()


def _armed(setting: str) -> tuple[str, int]:
    name, _, count = setting.partition(":")
    known = [*ALL]
    if name and name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"points are {', '.join(known)}"
        raise ConfigError(f"FAILPOINT={setting!r} names no point; {hint}")
    if count and not (count.isdecimal() and int(count) > 0):
        raise ConfigError(f"FAILPOINT={setting!r}: the count after ':' must be 1 or more")
    return name, int(count or 1)


_NAME, _COUNT = _armed(os.environ.get("FAILPOINT", ""))


def reach(name: str) -> None:
    """Die here if the environment says so; otherwise return at once."""
    if name != _NAME:
        return
    _hits[name] += 1
    if _hits[name] == _COUNT:
        os._exit(137)
