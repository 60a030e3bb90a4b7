"""Batched generation over slots must equal plain forwards, or the architecture is refused.

Run once per architecture, before it serves: a mask or position that a model ignores does not raise,
it gives log-probabilities that are off by nats.
"""

import torch

from engine.batch import Batch
from engine.metrics import Metrics
from engine.policies import Policy
from engine.prefixes import Prefixes
from engine.refusals import PolicyFailed, Unsupported
from engine.requests import Completion, Request
from engine.sampling import SamplingParams

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 5e-2}
LENGTHS = (1, 9, 20, 4)
NEW_TOKENS = 5


def check_cached_generation(policy: Policy) -> None:
    """Sample a few ids in a batch of unequal prompts and score them again without a cache.

    Raises:
        Unsupported: the two differ by more than rounding.
    """
    batch = Batch(policy, prefixes=Prefixes(0), metrics=Metrics())
    answers: dict[int, Completion | PolicyFailed] = {}
    prompts = []
    for index, length in enumerate(LENGTHS):
        length = min(length, policy.positions - NEW_TOKENS)
        prompts.append(tuple((7 * index + 3 * k) % policy.vocabulary for k in range(length)))
        batch.add(
            Request(
                id=f"check-{index}",
                policy=policy.name,
                prompt=prompts[-1],
                params=SamplingParams(max_tokens=NEW_TOKENS, seed=index, ignore_eos=True),
                deliver=lambda answer, index=index: answers.__setitem__(index, answer),  # type: ignore[misc]
            )
        )
    kind = type(policy.model).__name__
    try:
        while batch.size:
            batch.step()
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Unsupported(
            f"the built-in engine cannot run {kind} ({error}); serve it with vLLM"
        ) from error
    for index, prompt in enumerate(prompts):
        answer = answers[index]
        if isinstance(answer, PolicyFailed):
            raise Unsupported(str(answer))
        scored = policy.score([*prompt, *answer.token_ids])[len(prompt) - 1 :]
        off = float((scored - torch.tensor(answer.logprobs)).abs().max())
        if not off <= TOLERANCE[policy.shape.dtype]:
            raise Unsupported(
                f"{kind} gives other log-probabilities with batched KV than without (off by "
                f"{off:.3g}), so the built-in engine cannot serve it; serve it with vLLM"
            )
