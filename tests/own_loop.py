"""A loop of one's own for the tests: a tiny network, an optimizer, and what a scheduler needs.

The rest of the world is played (`tests.playing.Fleet`) or real.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from domain.config import TinyModel
from trainer.folders import materialise_tiny
from trainer.objective import policy_loss, usable_gradient

TINY = TinyModel(dim=16, layers=1, heads=2, max_positions=32)


def model_folder(folder: Path) -> Path:
    """The folder of a tiny model."""
    materialise_tiny(TINY, folder)
    return folder


class Trained:
    """State of a loop: network, optimizer, count of updates."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(3)
        torch.set_num_threads(1)
        self.network: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        self.updates = 0

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.network.state_dict())

    def save(self) -> dict[str, Any]:
        parts = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(parts) | {"updates": self.updates}

    def load(self, saved: dict[str, Any]) -> None:
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.updates = saved["updates"]


class Scored:
    """Objective of the loop."""

    importance = 5.0

    def packed_log_probs(self, state: Any, packed: Any) -> torch.Tensor:
        ids = torch.from_numpy(packed["input_ids"])
        positions = torch.from_numpy(packed["positions"])
        logits = state.network(input_ids=ids, position_ids=positions, use_cache=False).logits
        before = logits[:, :-1].float().log_softmax(-1)
        scores = before.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(scores, (1, 0))


def update(state: Trained, objective: Scored, packed: dict[str, Any]) -> bool:
    """One optimizer step; whether it changed the weights."""
    if not usable_gradient(packed):
        return False
    rows = {n: torch.as_tensor(a) for n, a in packed.items()}
    loss, _ = policy_loss(
        objective.packed_log_probs(state, packed),
        rows["old_logprobs"],
        rows["behavior_logprobs"],
        rows["advantages"],
        rows["response_mask"],
        importance=objective.importance,
    )
    state.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    state.optimizer.step()
    state.updates += 1
    return True
