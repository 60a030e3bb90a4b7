"""From a manifest in the object store to a policy that may be served.

    fetch ─▶ file digests ─▶ weights digest ─▶ names, shapes, types ─▶ model ─▶ probe ─▶ self-check

A policy is refused at the first doubt: weights that load without an error may still be the wrong
ones, and a run that trains on their samples cannot tell.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from domain.errors import DigestMismatch
from domain.ids import policy_version
from engine.adapters import merge
from engine.policies import Policy, kv_shape
from engine.refusals import BadWeights, Unsupported
from engine.selfcheck import check_cached_generation

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
UNBOUNDED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Weights and their model folder on the local disk, every digest verified."""

    weights: Path
    """Folder of safetensors shards; deleted once they are in memory."""
    model: Path
    """Folder with config.json."""
    tensors: Mapping[str, Mapping[str, Any]]
    """What the manifest promises: name to dtype and shape."""
    probe: Mapping[str, Any] | None
    """`token_ids` and `logprobs`, both lists of lists."""
    adapter: Mapping[str, Any] | None = None
    """Rank, alpha and layout, if the weights are a LoRA adapter's factors."""
    base: Path | None = None
    """Folder of the weights that the adapter changes; stays."""


class Store(Protocol):
    """Where weights come from."""

    def fetch(self, manifest: str, sha256: str) -> Fetched:
        """Bring weights here. Raises ObjectMissing or DigestMismatch."""
        ...


class Loader:
    """Builds policies. Used by one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._checked: set[str] = set()

    def load(self, name: str, manifest: str, sha256: str) -> Policy:
        """Fetch, check and build one policy.

        Raises:
            BadWeights: bytes, tensors or log-probabilities are not what was promised.
            Unsupported: the engine cannot serve this architecture.
            ObjectMissing: the manifest or one of its files does not exist.
        """
        try:
            fetched = self._store.fetch(manifest, sha256)
        except DigestMismatch as error:
            raise BadWeights(f"policy {name}: {error}") from error
        try:
            tensors = _read(name, fetched.weights)
        finally:
            shutil.rmtree(fetched.weights, ignore_errors=True)
        _check_promise(name, tensors, fetched.tensors)
        found = weights_digest(tensors)
        if found != sha256:
            raise BadWeights(f"policy {name}: its tensors have digest {found}, not {sha256}")
        if fetched.adapter is not None and fetched.base is not None:
            tensors = merge(name, _read(name, fetched.base), tensors, fetched.adapter)
        policy = build(name, sha256, fetched.model, tensors)
        if fetched.probe is not None:
            check_probe(policy, fetched.probe)
        architecture = (fetched.model / "config.json").read_text(encoding="utf-8")
        if architecture not in self._checked:
            check_cached_generation(policy)
            self._checked.add(architecture)
        return policy


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes in name order, as the trainer computes it.

    The files' own digests are in the manifest, which only names the weights' digest: this ties the
    numbers in memory to the name in the ledger.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        kind = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{kind}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def build(name: str, sha256: str, folder: Path, tensors: Mapping[str, Tensor]) -> Policy:
    """Make a policy of a model folder's config.json and weights by name.

    Raises:
        BadWeights: a tensor is missing, unknown, or of another shape or type than the model's.
        Unsupported: the engine cannot serve this architecture.
    """
    run, version = policy_version(name)
    dtype = _common_dtype(name, tensors)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = _empty_model(config, dtype)
    model.tie_weights()
    expected: dict[str, Tensor] = model.state_dict()
    _check_tensors(name, type(model).__name__, expected, tensors)
    model.load_state_dict(tensors, strict=False)
    model.requires_grad_(False).eval()
    return Policy(
        name=name,
        run=run,
        version=version,
        sha256=sha256,
        model=model,
        shape=kv_shape(model),
        eos=_eos(folder, config),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        positions=getattr(config, "max_position_embeddings", None) or UNBOUNDED,
    )


def _empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The architecture with memory for weights, and torch's own attention where it has that."""
    refusals = []
    for attention in ("sdpa", "eager"):
        try:
            with no_init_weights():
                return AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=attention
                )
        except ValueError as error:
            refusals.append(str(error))
    raise Unsupported(f"transformers cannot build {config.model_type!r}: {refusals[-1]}")


def check_probe(policy: Policy, probe: Mapping[str, Any]) -> None:
    """The model must give the trainer's log-probabilities of a fixed text.

    `logprobs[i]` scores `token_ids[i][1:]`; a leading entry for the first id is ignored.

    Raises:
        BadWeights: they differ by more than rounding.
    """
    tolerance = PROBE_TOLERANCE[policy.shape.dtype]
    for ids, promised in zip(probe["token_ids"], probe["logprobs"], strict=True):
        found = policy.score(ids)
        wanted = torch.tensor(promised[len(promised) - len(found) :], dtype=found.dtype)
        off = float((found - wanted).abs().max())
        if not off <= tolerance:  # NaN is refused too
            raise BadWeights(
                f"policy {policy.name}: its log-probabilities of the probe differ from the "
                f"trainer's by {off:.3g} (allowed {tolerance:g}); these are other weights, or "
                "another arithmetic"
            )


def _read(name: str, folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shards = sorted(folder.rglob("*.safetensors"))
    if not shards:
        raise BadWeights(f"policy {name}: its manifest lists no .safetensors file")
    for shard in shards:
        try:
            found = load_file(shard)
        except SafetensorError as error:
            raise BadWeights(f"policy {name}: {shard.name} cannot be read: {error}") from error
        twice = tensors.keys() & found.keys()
        if twice:
            raise BadWeights(f"policy {name}: {min(twice)} is in more than one shard")
        tensors |= found
    return tensors


def _check_promise(
    name: str, tensors: Mapping[str, Tensor], promised: Mapping[str, Mapping[str, Any]]
) -> None:
    """The shards hold what the manifest lists, where it lists anything."""
    if promised and promised.keys() != tensors.keys():
        odd = sorted(promised.keys() ^ tensors.keys())
        raise BadWeights(f"policy {name}: manifest and shards differ in tensors {_some(odd)}")
    for key, entry in promised.items():
        shape = tuple(entry["shape"])
        if shape != tuple(tensors[key].shape):
            raise BadWeights(
                f"policy {name}: {key} has shape {tuple(tensors[key].shape)}, the manifest says "
                f"{shape}"
            )


def _common_dtype(name: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    found = {t.dtype for t in tensors.values() if t.is_floating_point()}
    if len(found) != 1 or found - PROBE_TOLERANCE.keys():
        raise BadWeights(
            f"policy {name}: its tensors have types {_some(sorted(map(str, found)))}; all must "
            "have the same one of float32, bfloat16, float16"
        )
    return found.pop()


def _check_tensors(
    name: str, kind: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    unknown = sorted(tensors.keys() - expected.keys())
    if unknown:
        raise BadWeights(f"policy {name}: {kind} has no tensor {_some(unknown)}")
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape or tensor.dtype != expected[key].dtype:
            raise BadWeights(
                f"policy {name}: {key} is {tuple(tensor.shape)} {tensor.dtype}, {kind} needs "
                f"{tuple(expected[key].shape)} {expected[key].dtype}"
            )
    # A tied tensor (output head = input embedding) may be stored once.
    given = {expected[key].data_ptr() for key in tensors}
    missing = sorted(
        key for key, t in expected.items() if key not in tensors and t.data_ptr() not in given
    )
    if missing:
        raise BadWeights(f"policy {name}: tensor {_some(missing)} of {kind} is missing")


def _eos(folder: Path, config: Any) -> frozenset[int]:
    """End-of-sequence ids: the generation config's where there is one, else the model's."""
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = generation.get("eos_token_id", getattr(config, "eos_token_id", None))
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _some(names: Sequence[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
