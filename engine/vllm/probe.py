"""Whether a server computes with the weights it should: the trainer's own numbers, reproduced.

Two checks. The log-probabilities must be the trainer's within rounding. And where they are known
to differ from those of the version served before, they must be nearer to the new ones: a small
update hides below the tolerance, and a server that quietly kept its old weights would pass.
"""

import math
import secrets
from collections.abc import Mapping
from typing import Any

from engine.refusals import BadWeights
from engine.vllm.control import Control

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Nats. Other weights are off by whole nats; bfloat16 alone by up to a tenth."""

NOISE = {"float32": 2e-5, "bfloat16": 0.1, "float16": 0.02}
"""Nats between two programs with equal weights: below, versions cannot be told apart."""


async def verify(
    control: Control,
    model: str,
    name: str,
    dtype: str,
    probe: Mapping[str, Any],
    previous: Mapping[str, Any] | None,
) -> None:
    """Compare a server's log-probabilities with the trainer's.

    Args:
        control: the server.
        model: as it knows the policy.
        name: as we do.
        dtype: it computes in.
        probe: of the version, from its manifest.
        previous: of the version that was served before, or None.

    Raises:
        BadWeights: they are of other weights.
    """
    salt = f"probe-{secrets.token_hex(8)}"
    off = moved = stale = 0.0
    before = _flat(previous) if previous is not None else None
    position = 0
    for ids, promised in zip(probe["token_ids"], probe["logprobs"], strict=True):
        found = await control.logprobs(model, ids, salt)
        for value, wanted in zip(found, promised, strict=True):
            gap = abs(value - wanted)
            off = math.inf if math.isnan(gap) else max(off, gap)
            if before is not None:
                moved = max(moved, abs(wanted - before[position]))
                stale = max(stale, abs(value - before[position]))
            position += 1
    if off > TOLERANCE[dtype]:
        raise BadWeights(
            f"policy {name}: vLLM's log-probabilities of the probe differ from the trainer's by "
            f"{off:.3g} (allowed {TOLERANCE[dtype]:g}); these are other weights"
        )
    if moved > 10 * NOISE[dtype] and stale < off:
        raise BadWeights(
            f"policy {name}: vLLM's log-probabilities of the probe are {off:.3g} away from this "
            f"version's and only {stale:.3g} from those of the one before: it kept the old weights"
        )


def _flat(probe: Mapping[str, Any]) -> list[float] | None:
    return [float(value) for row in probe["logprobs"] for value in row]
