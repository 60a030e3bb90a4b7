"""rollbook: asynchronous RL post-training with durable rollout state. The public API.

Names are handed out lazily, so that `import rollbook` costs neither torch nor a database driver.
"""

from importlib import import_module
from typing import Any

from rollbook.root import claim_root

claim_root()

_HOMES = {
    "AgentError": "domain.errors",
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
    "Tool": "domain.environments",
    "TurnResult": "domain.environments",
    "task_ids": "domain.environments",
    "tool": "domain.environments",
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
