"""Weights replaced under a running request: what the ledger says of its tokens afterwards."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from activities.attempt import Attempts
from activities.chat import PlainChat
from activities.inference import Crossing, EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.setups import Setup
from domain.environments import Outcome, Recorder
from domain.rollouts import Segment, Status, Task
from storage import segments
from tests.attempted import One, Session, limited, with_engines
from tests.integration.engine.lab import Weights, reach
from tests.integration.rollouts.conftest import Bench
from tests.vllm.lab import CONTEXT, LONG, QWEN3, Lab, probe_of

EXACT = 1e-4
OLD, NEW = Weights.random(QWEN3, 10), Weights.random(QWEN3, 11)
NO_WORDS = Tokenizer(models.WordLevel({"w": 0}, unk_token="w"))
PROMPT = [5, 9, 31, 7, 50, 2, 44]


async def swapped(b: Bench, lab: Lab, client: EngineClient, crossing: Crossing) -> Segment:
    """One request of an attempt, under which version 1 takes the place of version 0."""

    async def sample(task: Task, recorder: Recorder) -> Outcome:
        await recorder.sample(PROMPT, max_tokens=LONG)
        return Outcome(Status.COMPLETED, reward=1.0)

    probe = probe_of(NEW)
    await lab.serve(f"{b.run}@0", OLD, sha256=bytes(32).hex())
    with_engines(b, lab.url)
    group = b.group()
    setup = One(
        Setup(config=b.config, source=Session(sample), chat=PlainChat(NO_WORDS, frozenset()))
    )
    attempts = Attempts(Sampler(b.ledger, client, Router(b.ledger)), setup, worker="w1")  # type: ignore[arg-type]
    playing = asyncio.create_task(limited(60).run(attempts.run_attempt, b.key(group, 0)))
    await reach(client, lab.url, lambda health: health.running == 1)
    await asyncio.to_thread(b.serve, 1, sha256=bytes.fromhex(NEW.sha256))
    await lab.serve(f"{b.run}@1", NEW, crossing=crossing, probe=probe)
    ref = await playing
    assert ref.status == "completed", ref
    (segment,) = b.ledger.call(segments.read, b.run, group, 0, 0)
    row = b.attempt(group, 0)
    # Age is that of the oldest token: newer ones never make it younger.
    assert (row["oldest_version"], row["newest_version"]) == (0, 1)
    return segment


@pytest.mark.parametrize("refill", [False, True], ids=["hold", "refill"])
async def test_a_swap_inside_a_request_is_recorded_span_by_span(
    make: Callable[..., Bench], in_place: Lab, client: EngineClient, refill: bool
) -> None:
    kv: dict[str, Any] = (
        {"max_staleness": 0, "on_limit": "refill", "allow_reprefill": True}
        if refill
        else {"max_staleness": 1}
    )
    b = make(
        sampling={"policy": "segment", "kv_cache": kv},
        budget={"max_generated_tokens": LONG, "segment_tokens": LONG},
        trainer={"width": CONTEXT},
    )
    crossing = Crossing(kv_max_staleness=kv["max_staleness"], refill=refill)
    found = await swapped(b, in_place, client, crossing)
    assert found.version_spans is not None
    (old, before), (new, after) = found.version_spans
    assert (old, new, before + after) == (0, 1, LONG)
    assert min(before, after) > 0
    assert found.kv_version == (1 if refill else 0)

    got = torch.tensor([float(value) for value in found.logprobs])
    sampled = tuple(int(i) for i in found.sampled_ids)
    by_old, by_new = (w.of(PROMPT, sampled) for w in (OLD, NEW))
    assert float((got - by_old)[:before].abs().max()) < EXACT
    assert float((got - by_old)[before:].abs().max()) > 0.1
    if refill:
        assert float((got - by_new)[before:].abs().max()) < EXACT
    else:  # new weights on KV of the old: exactly what a replay with that KV gives
        assert float((got - replayed(before, sampled)).abs().max()) < EXACT


@torch.no_grad()
def replayed(before: int, sampled: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of ids whose first `before` were sampled, and their KV computed, by OLD."""
    ids = torch.tensor([[*PROMPT, *sampled]])
    swap = len(PROMPT) + before - 1  # the last id's KV is computed by whoever samples the next
    head = OLD.model(ids[:, :swap], use_cache=True)
    tail = NEW.model(ids[:, swap:], past_key_values=head.past_key_values, use_cache=True)
    table = torch.cat([head.logits, tail.logits], dim=1)[0, :-1].log_softmax(-1)
    wanted: torch.Tensor = table[len(PROMPT) - 1 :].gather(-1, torch.tensor(sampled)[:, None])
    return wanted[:, 0]
