"""Weights from the object store onto this machine's disk, verified before a server hears of them.

vLLM loads a checkpoint that lacks a tensor without an error and then samples garbage. So the bytes
are compared with the manifest's digests, and the tensors in the files with those it promises.
"""

import json
import os
import re
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from domain.errors import DigestMismatch
from engine.refusals import BadWeights, Unsupported
from storage import manifests
from storage.manifests import NAME, Manifest
from storage.objects import ObjectStore

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape by tensor name."""

_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}


_EYES_AND_EARS = re.compile(r"[._](vision|visual|audio|image|connector|multi_modal_projector)")
"""In the name of a tensor that is part of what turns images or sounds into tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSet:
    """One version's files, verified."""

    sha256: str
    folder: Path
    shapes: Shapes
    model: str
    """Manifest key of the model folder (config and tokenizer)."""
    probe: Mapping[str, Any] | None
    """The trainer's log-probabilities of fixed texts: `token_ids` and `logprobs`."""
    adapter: Mapping[str, Any] | None = None
    """Rank of a LoRA adapter and what it changes; None: these are full weights."""
    base: str | None = None
    """Manifest key of the weights that the adapter changes."""

    @property
    def dtype(self) -> str:
        """Of the weights; adapters have that of their base."""
        return next(iter(self.shapes.values()))[0]


class Source(Protocol):
    """Where weights come from."""

    def fetch(self, manifest: str, sha256: str | None) -> WeightSet:
        """Bring a version here. Raises BadWeights or ObjectMissing."""
        ...

    def fetch_model(self, manifest: str) -> Path:
        """Bring a model folder here, without weights."""
        ...


class ObjectSource:
    """Fetches what the trainer uploaded."""

    def __init__(self, store: ObjectStore, cache: Path) -> None:
        self._store = store
        self._cache = cache

    def fetch(self, manifest: str, sha256: str | None) -> WeightSet:
        """Bring a version here, every digest and every tensor's shape verified.

        Args:
            manifest: its key.
            sha256: what the ledger promises; None: whatever the manifest names.

        Raises:
            BadWeights: it is not what was promised.
            ObjectMissing: the manifest or one of its files does not exist.
        """
        folder = self._cache / "weights" / manifest.removesuffix(f"/{NAME}").replace("/", "_")
        try:
            found = manifests.fetch(self._store, manifest, folder, sha256=sha256)
        except DigestMismatch as error:
            raise BadWeights(str(error)) from error
        return weight_set(manifest, found, folder)

    def fetch_model(self, manifest: str) -> Path:
        """Bring a model folder here."""
        folder = self._cache / "models" / manifest.removesuffix(f"/{NAME}").rpartition("/")[2]
        manifests.fetch(self._store, manifest, folder)
        return folder


def weight_set(key: str, manifest: Manifest, folder: Path) -> WeightSet:
    """A fetched set as what it says it is.

    Raises:
        BadWeights: it is no set of weights, or its files hold other tensors than it lists.
    """
    model, adapter = manifest.meta.get("model"), manifest.meta.get("adapter")
    if manifest.kind != "weights" or not isinstance(model, str) or not manifest.tensors:
        raise BadWeights(
            f"manifest {key!r} is of kind {manifest.kind!r}, names model {model!r} and lists "
            f"{len(manifest.tensors)} tensors; an engine loads manifests of weights that name both"
        )
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in sorted(manifest.files):
        if name.endswith(".safetensors"):
            shapes |= read_shapes(folder / name)
    promised = {name: (t.dtype, t.shape) for name, t in manifest.tensors.items()}
    if difference := differing(promised, shapes):
        raise BadWeights(f"manifest {key!r} and its files differ in {difference}")
    return WeightSet(
        sha256=manifest.sha256,
        folder=folder,
        shapes=shapes,
        model=model,
        probe=manifest.meta.get("probe"),
        adapter=adapter,
        base=manifest.meta.get("base"),
    )


def differing(expected: Shapes, found: Shapes) -> str | None:
    """The first tensor that is missing, unknown, or of another type or shape; None: all agree."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return f"tensor {name}: {expected.get(name)} expected, {found.get(name)} found"
    return None


def beside_text(adapter: Shapes) -> str | None:
    """The first tensor of an adapter that is of no layer of the text model; None: there is none."""
    return next((name for name in sorted(adapter) if _EYES_AND_EARS.search(name)), None)


def read_shapes(file: Path) -> Shapes:
    """Types and shapes of a safetensors file, from its header alone.

    Raises:
        BadWeights: it is none.
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > file.stat().st_size:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        return {
            name: (_TYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, AttributeError, KeyError, TypeError, struct.error) as error:
        raise BadWeights(f"{file.name} is no safetensors file: {error}") from error


def assemble(model: Path, weights: Path, into: Path) -> Path:
    """One folder with a model's description and its weights, as a server starts from it.

    Raises:
        Unsupported: the description names no architecture; vLLM would not generate with it.
    """
    if not json.loads((model / "config.json").read_bytes()).get("architectures"):
        raise Unsupported(
            f"config.json of the model in {model} names no architectures; add them, as "
            'save_pretrained does: ["LlamaForCausalLM"] for a Llama'
        )
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for folder in (model, weights):
        for file in folder.iterdir():
            if file.is_file() and file.name != NAME:
                os.link(file, into / file.name)
    return into
