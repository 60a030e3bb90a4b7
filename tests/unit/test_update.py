"""One optimizer step: when it moves nothing, and what it must not depend on."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from domain.config import RunConfig
from domain.errors import LedgerError
from domain.rollouts import Rollout, Segment, Status
from trainer import determinism, folders
from trainer.batch import Batch
from trainer.drift import DriftGuard
from trainer.model import Policy, weights_digest
from trainer.optimizer import Optimizer
from trainer.update import Learner


def learner(
    folder: Path, *, sampling: Mapping[str, object] = MappingProxyType({}), **trainer: object
) -> Learner:
    config = RunConfig.parse(
        {
            "name": "t",
            "steps": 4,
            "tasks": {"source": "a:b", "dataset": "a:c"},
            "model": {"tiny": {"dim": 16, "layers": 1, "heads": 2}},
            "budget": {"max_generated_tokens": 8},
            "sampling": sampling,
            "trainer": {"width": 24, "estimator": "mean", "lr": 1e-2, "weight_decay": 0.1}
            | trainer,
        }
    )
    device = determinism.settle(1, exact=True)
    policy = Policy.build(folders.source_folder(config, folder), config, device)
    return Learner(config, policy, Optimizer(policy.parameters(), config.trainer))


def group(
    number: int = 0, rewards: tuple[float, ...] = (1.0, 0.0, 0.5), *, logprob: float = -2.5
) -> list[Rollout]:
    """Members of different lengths; their tokens follow from number and sample."""
    members = []
    for sample, reward in enumerate(rewards):
        ids = [(3 * number + 5 * sample + i) % 12 for i in range(3 + sample)]
        segment = Segment([1, 2, 3 + number, 10], ids, [logprob] * len(ids), "stop", 0)
        members.append(Rollout(str(number), number, sample, 0, [segment], Status.COMPLETED, reward))
    return members


def state(learner: Learner) -> tuple[bytes, bytes]:
    return weights_digest(learner.policy.weights()), weights_digest(learner.optimizer.state())


@pytest.mark.parametrize(
    ("settings", "groups", "cause"),
    [
        ({}, [], "empty"),
        ({}, [group(rewards=(0.5, 0.5))], "no_usable_gradient"),
        ({"sequence_mask": (0.999, 1.001)}, [group()], "nothing_left"),
        ({"importance": (0.999, 1.001)}, [group(logprob=-9.0)], "zero_gradient"),
    ],
)
def test_a_step_that_has_nothing_to_say_leaves_every_bit(
    tmp_path: Path, settings: dict[str, Any], groups: list[list[Rollout]], cause: str
) -> None:
    trainer = learner(tmp_path, **settings)
    trainer.step(
        Batch(groups=[group()] if not settings else []), 0
    )  # moments that decay would move
    before = state(trainer)
    outcome = trainer.step(Batch(groups=groups), 0)
    assert (outcome.updated, outcome.cause, outcome.optimizer_updates) == (False, cause, 0)
    assert state(trainer) == before


def test_a_gradient_that_is_not_finite_never_reaches_the_moments(tmp_path: Path) -> None:
    trainer = learner(tmp_path)
    with torch.no_grad():
        trainer.policy.network.get_output_embeddings().weight[0, 0] = torch.nan
    before = state(trainer)
    outcome = trainer.step(Batch(groups=[group()]), 0)
    assert (outcome.updated, outcome.cause) == (False, "not_finite")
    assert state(trainer) == before


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_the_update_does_not_depend_on_how_rows_are_cut_into_micro_batches(
    tmp_path: Path, loss: str
) -> None:
    found = []
    for rows in (1, 2, 8):
        trainer = learner(tmp_path, rows=rows, loss=loss)
        outcome = trainer.step(Batch(groups=[group(n) for n in range(4)]), 0)
        assert outcome.updated
        found.append((outcome.metrics["loss"], outcome.metrics["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_minibatches_make_several_updates_and_the_first_is_unclipped(tmp_path: Path) -> None:
    trainer = learner(tmp_path, minibatches=3, rows=1)
    outcome = trainer.step(Batch(groups=[group(n) for n in range(4)]), 0)
    assert outcome.optimizer_updates == 3
    assert trainer.step(Batch(groups=[group(n) for n in range(4)]), 1).metrics["ppo_kl"] != 0.0
    once = learner(tmp_path).step(Batch(groups=[group(n) for n in range(4)]), 0)
    assert once.metrics["pg_clipfrac"] == 0.0
    assert once.metrics["ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def filtered(policy: Policy, rollout: Rollout) -> Rollout:
    """The rollout as this very policy would have sampled it, with three ids kept at each place."""
    (segment,) = rollout.segments
    ids = torch.tensor([[*segment.prompt_ids, *segment.sampled_ids]])
    with torch.no_grad():
        logits = policy.network(ids, use_cache=False).logits[0, len(segment.prompt_ids) - 1 :]
    kept, logprobs = [], []
    for row, sampled in zip(logits, segment.sampled_ids, strict=False):
        support = sorted({int(sampled), *row.topk(2).indices.tolist()})
        kept.append(support)
        logprobs.append(float(row[support].log_softmax(0)[support.index(int(sampled))]))
    return replace(rollout, segments=[replace(segment, logprobs=logprobs, support=kept)])


def test_both_scorings_of_a_step_replay_the_kept_sets_of_filtered_sampling(tmp_path: Path) -> None:
    trainer = learner(tmp_path, sampling={"top_k": 3}, support_capacity=72)
    groups = [[filtered(trainer.policy, rollout) for rollout in group(n)] for n in range(2)]
    told = trainer.step(Batch(groups=groups), 0).metrics
    assert told["mismatch/max"] < 1e-5  # proximal and behaviour
    assert told["drift/mean"] < 1e-5
    assert told["ppo_kl"] == pytest.approx(0.0, abs=1e-6)  # current and proximal
    assert told["pg_clipfrac"] == 0.0


def test_rollouts_that_cannot_be_trained_are_named(tmp_path: Path) -> None:
    trainer = learner(tmp_path)
    late = group()
    late[0] = Rollout("0", 0, 0, 0, [Segment([1], [2], [-1.0], "stop", 7)], Status.COMPLETED, 1.0)
    with pytest.raises(LedgerError, match=r"task '0', group 0, sample 0: version 7 is newer"):
        trainer.step(Batch(groups=[late]), 0)


def test_the_drift_guard_waits_for_a_second_step() -> None:
    guard = DriftGuard("float32")
    assert guard.alarm({"drift/mean": 0.5}) is None
    assert guard.alarm({"drift/mean": 0.001}) is None
    assert guard.alarm({"drift/mean": 0.5}) is None
    assert guard.alarm({}) is None  # no token of the trainer's own version
    assert "0.5 nats" in (guard.alarm({"drift/mean": 0.5}) or "")
