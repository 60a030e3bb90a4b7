"""reverse3 with a training loop of one's own: network, optimizer and checkpoints are all ours.

    python examples/own_loop.py --steps 60

Kill it at any moment, even with -9, and start it again: it loads its own checkpoint, gets the same
rows again for the steps since, and goes on to the same end. No rollout is sampled twice for a step,
no task is skipped.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from reverse3 import source, train
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModelForCausalLM

from domain.config import TinyModel
from rollbook import (
    EnginePublisher,
    RolloutScheduler,
    SchedulerRecord,
    Task,
    policy_loss,
    usable_gradient,
)
from trainer.folders import materialise_tiny

BATCH = 16


class Trained:
    """The state that the loop moves: a tiny GPT-2 and its optimizer."""

    def __init__(self, model: Path) -> None:
        torch.manual_seed(0)
        described = AutoConfig.from_pretrained(model)
        described.pad_token_id = None  # rows are told apart by positions, never padded by a token
        self.network = AutoModelForCausalLM.from_config(described)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3, betas=(0.9, 0.95))
        self.updates = 0

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is published."""
        return dict(self.network.state_dict())

    def update(self, loss: Tensor) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


class Objective:
    """Scores packed rows, and the decoupled PPO loss over them."""

    importance = 5.0

    def packed_log_probs(self, state: Trained, packed: Mapping[str, Any]) -> Tensor:
        """Log-probability of each id, at its own column."""
        ids = torch.from_numpy(packed["input_ids"])
        # Positions restart in every chain of a row, which keeps the chains apart.
        positions = torch.from_numpy(packed["positions"])
        logits = state.network(input_ids=ids, position_ids=positions, use_cache=False).logits
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return pad(log_probs, (1, 0))

    def loss(self, state: Trained, packed: Mapping[str, Any]) -> Tensor:
        """Mean over the tokens that take loss."""
        rows = {name: torch.as_tensor(array) for name, array in packed.items()}
        loss, _ = policy_loss(
            self.packed_log_probs(state, packed),
            rows["old_logprobs"],
            rows["behavior_logprobs"],
            rows["advantages"],
            rows["response_mask"],
            epsilon_high=0.28,
            importance=self.importance,
        )
        return loss


def batches(count: int) -> Iterator[list[Task]]:
    """The tasks in a new order each epoch, always the same ones for a step."""
    tasks, drawn, epoch = train(), 0, 0
    while True:
        order = Random(epoch).sample(tasks, len(tasks))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            if drawn == count:
                return
            yield order[start : start + BATCH]
            drawn += 1
        epoch += 1


def tell(record: SchedulerRecord) -> None:
    """One line a step."""
    print(
        f"step {record.updates}: reward {record.metrics['reward/mean']:.3f}, lag {record.lag}, "
        f"waited {record.waited:.1f} s",
        flush=True,
    )


def main() -> None:
    """Train, from the checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="own-reverse3", help="name of the run")
    parser.add_argument("--steps", type=int, default=60, help="batches to train")
    parser.add_argument("--folder", type=Path, default=Path("own-reverse3"), help="our own files")
    parser.add_argument("--state", type=Path, default=Path(".rollbook"), help="the local stack's")
    options = parser.parse_args()

    torch.set_num_threads(1)
    model, checkpoint = options.folder / "model", options.folder / "checkpoint.pt"
    materialise_tiny(TinyModel(max_positions=16), model)
    state, objective = Trained(model), Objective()
    with RolloutScheduler(
        objective,
        source,
        EnginePublisher(model),
        width=64,
        rows=16,
        tasks=list,
        groups=8,
        estimator="mean",
        truncation="score",
        budget={"max_turns": 1, "max_generated_tokens": 4, "max_context_tokens": 16},
        engine={"threads": 1},
        run=options.run,
        state=options.state,
        log=tell,
    ) as scheduler:
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            state.load_state_dict(saved["trained"])
            scheduler.load_state_dict(saved["scheduler"])
            print(f"from the checkpoint before step {saved['scheduler']['step']}", flush=True)
        for batch in scheduler.tasks(batches(options.steps)):
            packed = scheduler(state, batch)
            learns = usable_gradient(packed)
            if learns:
                state.update(objective.loss(state, packed))
            scheduler.applied(updated=learns)
            whole = {"trained": state.state_dict(), "scheduler": scheduler.state_dict()}
            torch.save(whole, checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
    print("done", flush=True)


if __name__ == "__main__":
    main()
