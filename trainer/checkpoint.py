"""Checkpoints: everything a step depends on, as safetensors and JSON, complete or absent.

Checkpoint N is the state before step N: weights, optimizer, generators, data position. Its files go
to a prefix of their own (epoch and a random part), the manifest last, and it counts only once a
fenced transaction of the ledger names its manifest's digest. So a half-written, replaced or foreign
set can never be loaded, and there is no pointer that could move too early. Nothing is pickled.

Where the weights are divided among ranks, each rank stores the files of its slices (`put_part`) and
rank 0 seals them with the manifest. Slices follow each other along the first dimension, so any number
of ranks, one included, can read what any other number wrote, each only the files it needs.
"""

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from domain.errors import DigestMismatch
from storage import manifests
from storage.manifests import File
from storage.objects import ObjectStore
from trainer import determinism, sharding, tensor_files
from trainer.model import Policy, weights_digest
from trainer.optimizer import Optimizer
from trainer.sharding import WHOLE, Slice

FORMAT = 2
_READS = (1, 2)  # the first had no slices
Part = Mapping[str, Mapping[str, Any]]
"""Files that a process has stored, by name, with their digests and sizes (JSON)."""
_WEIGHTS, _OPTIMIZER, STATE = "weights", "optimizer", "state.json"


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
    """Upload the state before `step` from one process that holds all of it.

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
    prefix = fresh_prefix(run, step, epoch)
    return seal(
        store,
        policy,
        [put_part(store, scratch, policy, optimizer, prefix=prefix)],
        prefix=prefix,
        weights_sha256=weights_digest(policy.weights()),
        run=run,
        step=step,
        version=version,
        position=position,
        born=born,
    )


def fresh_prefix(run: str, step: int, epoch: int) -> str:
    """A place that no other attempt to save this step has had."""
    return f"checkpoints/{run}/{step:08d}/{epoch}-{uuid.uuid4().hex[:12]}"


def put_part(
    store: ObjectStore, scratch: Path, policy: Policy, optimizer: Optimizer, *, prefix: str
) -> Part:
    """Upload what this process holds of the weights and the optimizer; the files, for `seal`."""
    folder = scratch / f"checkpoint-{uuid.uuid4().hex[:12]}"
    folder.mkdir(parents=True)
    contents = {
        _WEIGHTS: {name: sharding.local(t) for name, t in policy.weights().items()},
        _OPTIMIZER: optimizer.state(),
    }
    try:
        files: dict[str, bytes | Path] = {}
        for stem, tensors in contents.items():
            name = _name(stem, policy.slice)
            files[name] = folder / name
            tensor_files.write(folder / name, tensors)
        stored = manifests.put(store, prefix, files, kind="checkpoint")
        return {name: file.model_dump() for name, file in stored.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seal(
    store: ObjectStore,
    policy: Policy,
    parts: Sequence[Part],
    *,
    prefix: str,
    weights_sha256: bytes,
    run: str,
    step: int,
    version: int,
    position: Mapping[str, Any],
    born: datetime,
) -> Saved:
    """Complete a checkpoint at `prefix` whose parts are all stored: its state, then its manifest.

    `parts` are what `put_part` gave every process that holds a slice, `weights_sha256` is the digest
    of the weights put together, the rest is as for `save`.
    """
    digest = weights_sha256.hex()
    generators = determinism.generators()
    state = {
        "format": FORMAT,
        "run": run,
        "step": step,
        "version": version,
        "position": dict(position),
        "generators": generators,
        "weights_sha256": digest,
        "parts": len(parts),
    }
    meta = {"run": run, "step": step, "version": version, "born": born.isoformat()}
    encoded: dict[str, bytes | Path] = {STATE: json.dumps(state, sort_keys=True).encode()}
    files = manifests.put(store, prefix, encoded, kind="checkpoint")
    for part in parts:
        files |= {name: File.model_validate(dict(file)) for name, file in part.items()}
    stored = manifests.seal(
        store,
        prefix,
        files,
        kind="checkpoint",
        sha256=digest,
        tensors=describe(policy.weights(), _name(_WEIGHTS, Slice(0, len(parts)))),
        meta=meta,
    )
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

    A process that holds a slice of the weights fetches the files of that slice, or all of them if
    they were divided otherwise.

    Raises:
        ObjectMissing: its manifest or a file is gone.
        DigestMismatch: something is not what the ledger or the manifest promises.
    """
    folder = scratch / f"restore-{uuid.uuid4().hex[:12]}"
    own = {_name(stem, policy.slice) for stem in (_WEIGHTS, _OPTIMIZER)}
    try:
        manifest = manifests.read(store, f"{prefix}/manifest.json", sha256=manifest_sha256.hex())
        same = own <= manifest.files.keys()
        manifests.fetch(
            store,
            f"{prefix}/manifest.json",
            folder,
            sha256=manifest_sha256.hex(),
            wanted=lambda name: not same or name == STATE or name in own,
        )
        state = json.loads((folder / STATE).read_bytes())
        if state["format"] not in _READS:
            raise DigestMismatch(
                f"checkpoint {prefix!r} has format {state['format']}, this code reads {FORMAT}; "
                "resume it with the rollbook that wrote it"
            )
        parts = state.get("parts", 1)
        stored = [policy.slice] if same else [Slice(part, parts) for part in range(parts)]
        wanted = WHOLE if same else policy.slice
        weights = _tensors(prefix, [folder / _name(_WEIGHTS, s) for s in stored], wanted)
        digests = {manifest.sha256, state["weights_sha256"]}
        if not policy.sharded:
            digests.add(weights_digest(weights).hex())
        if len(digests) > 1:
            raise wrong_weights(prefix, manifest.sha256)
        moments = _tensors(prefix, [folder / _name(_OPTIMIZER, s) for s in stored], wanted)
        try:
            policy.load(weights)
            optimizer.restore(moments)
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


def wrong_weights(prefix: str, promised: str) -> DigestMismatch:
    """The weights of a checkpoint, put together, are not those of its manifest."""
    return DigestMismatch(
        f"checkpoint {prefix!r}: the weights do not have the digest {promised} that its manifest "
        "states"
    )


def _name(stem: str, part: Slice) -> str:
    return (
        f"{stem}.safetensors"
        if part.parts == 1
        else f"{stem}-{part.part}-of-{part.parts}.safetensors"
    )


def _tensors(prefix: str, files: Sequence[Path], part: Slice) -> dict[str, Tensor]:
    """The tensors of files that the manifest vouches for. They can hold nothing that would run."""
    try:
        return tensor_files.read(files, part)
    except SafetensorError as error:
        raise DigestMismatch(
            f"checkpoint {prefix!r}: {files[0].name} is no safetensors file ({error}); nothing else "
            "is ever read. Restore the objects below that prefix, or go back to an earlier checkpoint"
        ) from error


def describe(tensors: Mapping[str, Tensor], file: str) -> dict[str, dict[str, Any]]:
    """Name, dtype and whole shape of each tensor, as a manifest states them."""
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
