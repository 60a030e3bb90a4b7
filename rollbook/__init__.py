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

_HOMES = {
    "AgentError": "domain.errors",
    "BudgetExhausted": "domain.errors",
    "Env": "domain.environments",
    "HarnessSource": "domain.environments",
    "InfrastructureError": "domain.errors",
    "Outcome": "domain.environments",
    "PromptSource": "domain.environments",
    "Recorder": "domain.environments",
    "Reward": "domain.rollouts",
    "Rollout": "domain.rollouts",
    "RolloutView": "domain.environments",
    "RunConfig": "domain.config",
    "Segment": "domain.rollouts",
    "Services": "domain.config",
    "SessionSource": "domain.environments",
    "Status": "domain.rollouts",
    "Task": "domain.rollouts",
    "Tool": "domain.tools",
    "TurnResult": "domain.environments",
    "task_ids": "domain.environments",
    "tool": "domain.tools",
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
