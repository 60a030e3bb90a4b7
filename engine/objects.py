"""Weights and model folders from the object store, into the engine's cache folder."""

from pathlib import Path

from engine.refusals import BadWeights
from engine.weights import Fetched
from storage import manifests
from storage.objects import ObjectStore


class ObjectSource:
    """Fetches sets that the trainer uploaded. Model folders stay cached, weights do not."""

    def __init__(self, store: ObjectStore, cache: Path) -> None:
        self._store = store
        self._cache = cache

    def fetch(self, manifest: str, sha256: str) -> Fetched:
        """Bring weights and their model folder here, every digest verified.

        Raises:
            BadWeights: the manifest is not one of weights.
            DigestMismatch: something is not what was promised.
            ObjectMissing: the manifest or one of its files does not exist.
        """
        weights = self._cache / "weights" / sha256
        found = manifests.fetch(self._store, manifest, weights, sha256=sha256)
        model_key = found.meta.get("model")
        if found.kind != "weights" or not isinstance(model_key, str):
            raise BadWeights(
                f"manifest {manifest!r} is of kind {found.kind!r} and names model "
                f"{model_key!r}; an engine loads manifests of weights that name their model folder"
            )
        # models/{sha256}/manifest.json: the digest is in the key.
        model = self._cache / "models" / model_key.removesuffix("/manifest.json").rpartition("/")[2]
        manifests.fetch(self._store, model_key, model)
        adapter, base_key = found.meta.get("adapter"), found.meta.get("base")
        base = None
        if isinstance(base_key, str):
            # models/reference/{sha256}/manifest.json, as above.
            base = (
                self._cache / "bases" / base_key.removesuffix("/manifest.json").rpartition("/")[2]
            )
            manifests.fetch(self._store, base_key, base)
        return Fetched(
            weights=weights,
            model=model,
            tensors={name: t.model_dump() for name, t in found.tensors.items()},
            probe=found.meta.get("probe"),
            adapter=adapter,
            base=base,
        )
