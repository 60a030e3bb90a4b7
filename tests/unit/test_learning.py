"""Does the optimizer step learn? `reverse3` with an in-test sampler, one version behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from domain.config import RunConfig
from domain.rollouts import Rollout, Segment, Status
from trainer import determinism, folders
from trainer.batch import Batch
from trainer.model import Policy, weights_digest
from trainer.optimizer import Optimizer
from trainer.update import Learner

EOS, EQUALS = 11, 10


def config(seed: int = 0, **trainer: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "name": "reverse3",
            "seed": seed,
            "steps": 400,
            "tasks": {"source": "a:b", "dataset": "a:c", "batch_size": 16},
            "groups": {"size": 8},
            "schedule": {"max_lag": 2},
            "model": {"tiny": {}},
            "budget": {"max_generated_tokens": 4},
            "trainer": {
                "width": 64,
                "rows": 16,
                "estimator": "mean",
                "truncation": "score",
                "epsilon_high": 0.28,
                "lr": 1e-3,
            }
            | trainer,
        }
    )


def learner(folder: Path, config: RunConfig) -> Learner:
    device = determinism.settle(1, exact=True)
    policy = Policy.build(folders.source_folder(config, folder), config, device)
    return Learner(config, policy, Optimizer(policy.parameters(), config.trainer))


def reward(prompt: list[int], sampled: list[int]) -> float:
    answer, wanted = [t for t in sampled if t != EOS], prompt[2::-1]
    right = sum(a == b for a, b in zip(answer, wanted, strict=False)) / 3
    return right if len(answer) == 3 and sampled[-1] == EOS else right / 2


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: list[list[int]],
    generator: torch.Generator | None,
    greedy: bool = False,
) -> list[tuple[list[int], list[float]]]:
    """Up to four tokens after each prompt, with their log-probabilities."""
    ids = torch.tensor(prompts)
    logprobs = []
    for _ in range(4):
        scores = policy.network(ids, use_cache=False).logits[:, -1].log_softmax(-1)
        drawn = (
            scores.argmax(-1, keepdim=True)
            if greedy
            else torch.multinomial(scores.exp(), 1, generator=generator)
        )
        logprobs.append(scores.gather(-1, drawn))
        ids = torch.cat([ids, drawn], dim=1)
    out = []
    for row, scores in zip(ids[:, 4:].tolist(), torch.cat(logprobs, 1).tolist(), strict=True):
        n = row.index(EOS) + 1 if EOS in row else 4
        out.append((row[:n], scores[:n]))
    return out


def draw_batch(
    policy: Policy,
    rng: np.random.Generator,
    generator: torch.Generator,
    version: int,
    *,
    batch: int = 16,
    size: int = 8,
) -> list[list[Rollout]]:
    prompts = [[*map(int, rng.integers(0, 10, 3)), EQUALS] for _ in range(batch)]
    drawn = sample(policy, [p for p in prompts for _ in range(size)], generator)
    groups = []
    for g, prompt in enumerate(prompts):
        members = []
        for s in range(size):
            ids, logprobs = drawn[g * size + s]
            done = ids[-1] == EOS
            segment = Segment(prompt, ids, logprobs, "stop" if done else "length", version)
            status = Status.COMPLETED if done else Status.TRUNCATED
            cause = None if done else "tokens"
            members.append(
                Rollout(str(g), g, s, 0, [segment], status, reward(prompt, ids), cause=cause)
            )
        groups.append(members)
    return groups


def train(folder: Path, updates: int, seed: int) -> tuple[Learner, list[float]]:
    """Mean sampled reward of each batch; every batch is sampled one version before it trains."""
    trainer = learner(folder, config(seed))
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    waiting = draw_batch(trainer.policy, rng, generator, 0)
    rewards: list[float] = []
    version = 0
    for _ in range(updates):
        following = draw_batch(trainer.policy, rng, generator, version)
        outcome = trainer.step(Batch(groups=waiting), version)
        version += outcome.updated
        rewards.append(outcome.metrics["reward/mean"])
        waiting = following
    return trainer, rewards


def test_sixty_updates_raise_the_reward_severalfold(tmp_path: Path) -> None:
    _, rewards = train(tmp_path, 60, seed=0)
    assert np.mean(rewards[-5:]) > 3 * np.mean(rewards[:5])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_reverse3_is_solved_within_200_updates_at_lag_one(tmp_path: Path, seed: int) -> None:
    trainer, rewards = train(tmp_path, 200, seed)
    prompts = [[int(d) for d in f"{n:03d}"] + [EQUALS] for n in range(0, 1000, 4)]
    greedy = sample(trainer.policy, prompts, None, greedy=True)
    exact = np.mean([ids == [*p[2::-1], EOS] for p, (ids, _) in zip(prompts, greedy, strict=True)])
    assert np.mean(rewards[-10:]) >= 0.9
    assert exact >= 0.95


def test_two_executions_of_the_same_plans_are_bit_equal(tmp_path: Path) -> None:
    digests = {
        weights_digest(train(tmp_path / str(i), 4, seed=3)[0].policy.weights()) for i in range(2)
    }
    assert len(digests) == 1
