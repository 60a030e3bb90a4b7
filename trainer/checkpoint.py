"""Checkpoints: everything a step depends on, as safetensors and JSON, complete or absent.

Checkpoint N is the state before step N: weights, optimizer, generators, data position. Its files go
to a prefix of their own (epoch and a random part), the manifest last, and it counts only once a
fenced transaction of the ledger names its manifest's digest. So a half-written, replaced or foreign
set can never be loaded, and there is no pointer that could move too early. Nothing is pickled.
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from domain.errors import DigestMismatch
from storage import manifests
from storage.objects import ObjectStore
from trainer import determinism
from trainer.model import Policy, weights_digest
from trainer.optimizer import Optimizer

FORMAT = 1
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A complete set in the object store that no row names yet."""

    prefix: str
    manifest_sha256: bytes
    bytes: int
    rng: dict[str, Any]
    """What the ledger keeps of the generators: enough to compare, not to restore."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint says besides tensors."""

    step: int
    version: int
    position: dict[str, Any]
    weights_sha256: bytes


def save(
    store: ObjectStore,
    scratch: Path,
    policy: Policy,
    optimizer: Optimizer,
    *,
    run: str,
    step: int,
    version: int,
    epoch: int,
    position: Mapping[str, Any],
    born: datetime,
) -> Saved:
    """Upload the state before `step`.

    Args:
        store: where.
        scratch: a local folder for the files on their way.
        policy: gives the weights.
        optimizer: gives moments and masters.
        run: names the prefix, with the step and the epoch.
        step: steps below it are in the checkpoint.
        version: policy version of the weights.
        epoch: the trainer's fencing token.
        position: where the next batch of data begins.
        born: when the run was created; says whose this is if no row ever names it.
    """
    name = f"{epoch}-{uuid.uuid4().hex[:12]}"
    prefix = f"checkpoints/{run}/{step:08d}/{name}"
    weights = policy.weights()
    digest = weights_digest(weights)
    generators = determinism.generators()
    state = {
        "format": FORMAT,
        "run": run,
        "step": step,
        "version": version,
        "position": dict(position),
        "generators": generators,
        "weights_sha256": digest.hex(),
    }
    folder = scratch / f"checkpoint-{step}-{name}"
    folder.mkdir(parents=True)
    try:
        write_tensors(folder / WEIGHTS, weights)
        write_tensors(folder / OPTIMIZER, optimizer.state())
        stored = manifests.upload(
            store,
            prefix,
            {
                WEIGHTS: folder / WEIGHTS,
                OPTIMIZER: folder / OPTIMIZER,
                STATE: json.dumps(state, sort_keys=True).encode(),
            },
            kind="checkpoint",
            sha256=digest.hex(),
            tensors=describe(weights, WEIGHTS),
            meta={"run": run, "step": step, "version": version, "born": born.isoformat()},
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Saved(
        prefix=prefix,
        manifest_sha256=bytes.fromhex(stored.manifest_sha256),
        bytes=stored.bytes,
        rng={"generators_sha256": _fingerprint(generators)},
    )


def load(
    store: ObjectStore,
    scratch: Path,
    policy: Policy,
    optimizer: Optimizer,
    *,
    prefix: str,
    manifest_sha256: bytes,
) -> State:
    """Fetch a checkpoint, verify every byte, and put it into policy, optimizer and generators.

    Raises:
        ObjectMissing: its manifest or a file is gone.
        DigestMismatch: something is not what the ledger or the manifest promises.
    """
    folder = scratch / f"restore-{uuid.uuid4().hex[:12]}"
    try:
        manifest = manifests.fetch(
            store, f"{prefix}/manifest.json", folder, sha256=manifest_sha256.hex()
        )
        state = json.loads((folder / STATE).read_bytes())
        if state["format"] != FORMAT:
            raise DigestMismatch(
                f"checkpoint {prefix!r} has format {state['format']}, this code reads {FORMAT}; "
                "resume it with the rollbook that wrote it"
            )
        weights = _tensors(prefix, folder / WEIGHTS)
        if not (weights_digest(weights).hex() == manifest.sha256 == state["weights_sha256"]):
            raise DigestMismatch(
                f"checkpoint {prefix!r}: the weights do not have the digest {manifest.sha256} that "
                "its manifest states"
            )
        try:
            policy.load(weights)
            optimizer.restore(_tensors(prefix, folder / OPTIMIZER))
        except ValueError as error:
            raise DigestMismatch(f"checkpoint {prefix!r}: {error}") from error
        determinism.restore_generators(state["generators"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return State(
        step=state["step"],
        version=state["version"],
        position=state["position"],
        weights_sha256=bytes.fromhex(manifest.sha256),
    )


def _tensors(prefix: str, file: Path) -> dict[str, Tensor]:
    """The tensors of a file that the manifest vouches for. It can hold nothing that would run."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise DigestMismatch(
            f"checkpoint {prefix!r}: {file.name} is no safetensors file ({error}); nothing else is "
            "ever read. Restore the objects below that prefix, or go back to an earlier checkpoint"
        ) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors as a safetensors file, in name order: equal tensors give equal bytes."""
    save_file(
        {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)},
        path,
        metadata={"format": "pt"},
    )


def describe(tensors: Mapping[str, Tensor], file: str) -> dict[str, dict[str, Any]]:
    """Name, dtype and shape of each tensor, as a manifest states them."""
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "file": file,
        }
        for name, tensor in tensors.items()
    }


def _fingerprint(generators: Mapping[str, Any]) -> str:
    return sha256(json.dumps(generators, sort_keys=True).encode()).hexdigest()
