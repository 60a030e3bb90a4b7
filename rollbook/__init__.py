"""rollbook: asynchronous RL post-training with durable rollout state. The public API.

Names are handed out lazily, so that `import rollbook` costs neither torch nor a database driver.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollbook.root import claim_root

claim_root()

if TYPE_CHECKING:  # the same names, for type checkers
    from domain.config import RunConfig as RunConfig
    from domain.config import TinyModel as TinyModel
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
    from domain.images import Image as Image
    from domain.rollouts import Reward as Reward
    from domain.rollouts import Rollout as Rollout
    from domain.rollouts import Segment as Segment
    from domain.rollouts import Status as Status
    from domain.rollouts import Task as Task
    from domain.services import Services as Services
    from domain.tools import Tool as Tool
    from domain.tools import tool as tool
    from rollbook.async_trainer import AsyncTrainer as AsyncTrainer
    from rollbook.async_trainer import Step as Step
    from rollbook.objective import Objective as Objective
    from rollbook.objective import State as State
    from rollbook.publishers import EnginePublisher as EnginePublisher
    from rollbook.publishers import Publisher as Publisher
    from rollbook.record import SchedulerRecord as SchedulerRecord
    from rollbook.rollout_engine import RolloutEngine as RolloutEngine
    from rollbook.scheduler import RolloutScheduler as RolloutScheduler
    from rollbook.settings import AdamW as AdamW
    from rollbook.settings import Batchwise as Batchwise
    from rollbook.settings import Budget as Budget
    from rollbook.settings import GroupCentered as GroupCentered
    from rollbook.settings import GroupCompletion as GroupCompletion
    from rollbook.settings import KVCache as KVCache
    from rollbook.settings import LeaveOneOut as LeaveOneOut
    from rollbook.settings import Loss as Loss
    from trainer.objective import policy_loss as policy_loss
    from trainer.objective import usable_gradient as usable_gradient

_HOMES = {
    "AdamW": "rollbook.settings",
    "AgentError": "domain.errors",
    "AsyncTrainer": "rollbook.async_trainer",
    "Batchwise": "rollbook.settings",
    "Budget": "rollbook.settings",
    "BudgetExhausted": "domain.errors",
    "EnginePublisher": "rollbook.publishers",
    "Env": "domain.environments",
    "GroupCentered": "rollbook.settings",
    "GroupCompletion": "rollbook.settings",
    "HarnessSource": "domain.environments",
    "Image": "domain.images",
    "InfrastructureError": "domain.errors",
    "KVCache": "rollbook.settings",
    "LeaveOneOut": "rollbook.settings",
    "Loss": "rollbook.settings",
    "Objective": "rollbook.objective",
    "Outcome": "domain.environments",
    "PromptSource": "domain.environments",
    "Publisher": "rollbook.publishers",
    "Recorder": "domain.environments",
    "Reward": "domain.rollouts",
    "Rollout": "domain.rollouts",
    "RolloutEngine": "rollbook.rollout_engine",
    "RolloutScheduler": "rollbook.scheduler",
    "RolloutView": "domain.environments",
    "RunConfig": "domain.config",
    "SchedulerRecord": "rollbook.record",
    "Segment": "domain.rollouts",
    "Services": "domain.services",
    "SessionSource": "domain.environments",
    "State": "rollbook.objective",
    "Status": "domain.rollouts",
    "Step": "rollbook.async_trainer",
    "Task": "domain.rollouts",
    "TinyModel": "domain.config",
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
