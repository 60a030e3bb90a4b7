"""rollbook: asynchronous RL post-training with durable rollout state. The public API.

Names are handed out lazily, so that `import rollbook` costs neither torch nor a database driver.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollbook.root import claim_root

claim_root()

if TYPE_CHECKING:  # the same names, for type checkers
    from domain.config import RunConfig as RunConfig
    from domain.config import Services as Services
    from domain.environments import Env as Env
    from domain.environments import HarnessSource as HarnessSource
    from domain.environments import Outcome as Outcome
    from domain.environments import PromptSource as PromptSource
    from domain.environments import Recorder as Recorder
    from domain.environments import RolloutView as RolloutView
    from domain.environments import SessionSource as SessionSource
    from domain.environments import TurnResult as TurnResult
    from domain.environments import task_ids as task_ids
    from domain.errors import AgentError as AgentError
    from domain.errors import BudgetExhausted as BudgetExhausted
    from domain.errors import InfrastructureError as InfrastructureError
    from domain.rollouts import Reward as Reward
    from domain.rollouts import Rollout as Rollout
    from domain.rollouts import Segment as Segment
    from domain.rollouts import Status as Status
    from domain.rollouts import Task as Task
    from domain.tools import Tool as Tool
    from domain.tools import tool as tool
    from rollbook.objective import Objective as Objective
    from rollbook.objective import State as State
    from rollbook.publishers import EnginePublisher as EnginePublisher
    from rollbook.publishers import Publisher as Publisher
    from rollbook.record import SchedulerRecord as SchedulerRecord
    from rollbook.scheduler import RolloutScheduler as RolloutScheduler
    from trainer.objective import policy_loss as policy_loss
    from trainer.objective import usable_gradient as usable_gradient

_HOMES = {
    "AgentError": "domain.errors",
    "BudgetExhausted": "domain.errors",
    "EnginePublisher": "rollbook.publishers",
    "Env": "domain.environments",
    "HarnessSource": "domain.environments",
    "InfrastructureError": "domain.errors",
    "Objective": "rollbook.objective",
    "Outcome": "domain.environments",
    "PromptSource": "domain.environments",
    "Publisher": "rollbook.publishers",
    "Recorder": "domain.environments",
    "Reward": "domain.rollouts",
    "Rollout": "domain.rollouts",
    "RolloutScheduler": "rollbook.scheduler",
    "RolloutView": "domain.environments",
    "RunConfig": "domain.config",
    "SchedulerRecord": "rollbook.record",
    "Segment": "domain.rollouts",
    "Services": "domain.config",
    "SessionSource": "domain.environments",
    "State": "rollbook.objective",
    "Status": "domain.rollouts",
    "Task": "domain.rollouts",
    "Tool": "domain.tools",
    "TurnResult": "domain.environments",
    "policy_loss": "trainer.objective",
    "task_ids": "domain.environments",
    "tool": "domain.tools",
    "usable_gradient": "trainer.objective",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rollbook' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
