"""Every error rollbook raises on purpose.

    RollbookError
    ├── ConfigError            refused at the edge, before anything is started (exit code 2)
    ├── LedgerError
    │   ├── Fenced             another trainer or execution owns this now; stop writing
    │   ├── RunNotFound
    │   ├── RunExists
    │   ├── RunHeld            a live trainer holds the lease
    │   ├── RunStopped         failed, closed or finished: nothing is handed over or planned
    │   ├── ReplayDiverged     a replayed step did not reproduce the weights it made before
    │   ├── DataChanged        the data set differs from the one the ledger recorded
    │   └── SchemaMismatch     the ledger's schema is newer or older than this code
    ├── ObjectError
    │   ├── ObjectMissing
    │   └── DigestMismatch     the bytes are not the ones that were promised
    ├── EngineError
    │   ├── EngineUnavailable  connection, 5xx, time-out: another engine may do
    │   ├── EngineRefused      4xx: the request itself is wrong
    │   └── WrongVersion       the engine answered with weights that were not asked for
    ├── PlatformAway           nothing has moved for longer than schedule.max_outage
    ├── SourceBroken           a source broke its contract: the run fails with this
    ├── BudgetExhausted        a rollout used up a budget: truncated, with its cause
    ├── AgentError             raised by user code: the agent broke by itself, scored
    └── InfrastructureError    raised by user code: not the policy's fault, resubmitted

Each message names the thing, the value and the remedy. All are picklable: they cross processes.
Temporal matches error types by exact class name, so a name is part of the protocol.
"""


class RollbookError(Exception):
    """Root of all deliberate errors."""


class ConfigError(RollbookError, ValueError):
    """The configuration, the data or a service address is wrong."""


class LedgerError(RollbookError):
    """The ledger refused."""


class Fenced(LedgerError):
    """A newer epoch or fence owns this row; this process must stop writing."""


class RunNotFound(LedgerError, LookupError):
    """No run of that name in the ledger."""


class RunExists(LedgerError):
    """A run of that name exists already; resume it or choose another name."""


class RunHeld(LedgerError):
    """Another trainer holds the run's lease."""


class RunStopped(LedgerError):
    """The run failed, was closed or has finished; nothing is handed over or planned any more."""


class ReplayDiverged(LedgerError):
    """A replayed step did not reproduce the recorded weights."""


class DataChanged(LedgerError):
    """The data set or its order differs from what the ledger recorded."""


class SchemaMismatch(LedgerError):
    """The ledger's schema and this code do not belong together."""


class ObjectError(RollbookError):
    """The object store refused."""


class ObjectMissing(ObjectError, LookupError):
    """A referenced object does not exist."""


class DigestMismatch(ObjectError):
    """Stored bytes do not have the digest the ledger or manifest promises."""


class EngineError(RollbookError):
    """An inference engine failed."""


class EngineUnavailable(EngineError):
    """Connection error, time-out or 5xx: the request may be tried on another engine."""


class EngineBusy(EngineUnavailable):
    """The engine has as many requests as it takes: nothing is wrong with it."""


class EngineRefused(EngineError):
    """4xx: the engine will refuse this request every time."""


class WrongVersion(EngineError):
    """The engine used other weights than those named in the request."""


class PlatformAway(RollbookError):
    """A part of the platform was away for longer than `schedule.max_outage`."""


class SourceBroken(RollbookError):
    """A source broke its contract (wrong types, impossible ids, a result for another task)."""


class BudgetExhausted(RollbookError):
    """A rollout used up a budget. A SessionSource may let it pass: the rollout is truncated."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class AgentError(RollbookError):
    """The agent broke by itself: the rollout is scored, status agent_error."""


class InfrastructureError(RollbookError):
    """Not the policy's fault: the rollout is resubmitted, never scored."""
