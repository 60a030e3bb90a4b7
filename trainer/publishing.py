"""Publishing: weights into the object store, then engines are asked to load them and waited for.

A version is published when it is `sync_every` or more ahead of what is served, compared with the
ledger and only after every replay: a restarted trainer never serves the older weights it restored.
Every version carries the trainer's log-probabilities of a fixed probe, which each engine must
reproduce when it loads, so that weights that arrived wrong never sample.
"""

import logging
import shutil
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from domain import failpoints, tracing
from domain.errors import EngineUnavailable
from storage import manifests, outages, runs, versions
from storage.database import Ledger, Tx
from storage.manifests import Stored
from storage.objects import ObjectStore
from trainer import lora, tensor_files
from trainer.checkpoint import describe
from trainer.model import Policy, probe_ids, weights_digest
from trainer.ranks import Ranks
from trainer.waiting import Waits

WEIGHTS = "model.safetensors"
"""The name that Hugging Face readers expect, so that a version beside its model folder loads."""

HELD = "held"
"""Instead of a version's state: uploaded, and no engine has a free slot for it."""

log = logging.getLogger(__name__)


def probe(policy: Policy, longest: int) -> dict[str, Any]:
    """The fixed sequences and what the trainer's weights say about them."""
    ids = probe_ids(policy.vocabulary, longest)
    return {"token_ids": ids, "logprobs": policy.probe(ids)}


def upload(
    store: ObjectStore,
    scratch: Path,
    policy: Policy,
    prefix: str,
    *,
    model: str,
    probe: dict[str, Any],
    sha256: bytes | None = None,
    base: str | None = None,
) -> Stored:
    """Store the policy's weights under `prefix/DIGEST`. Content-addressed: safe to repeat.

    Args:
        store: where.
        scratch: a local folder for the file on its way.
        policy: gives the weights, of which this process must hold all.
        prefix: `weights/RUN/VERSION`.
        model: manifest key of the model folder they belong to.
        probe: goes into the manifest.
        sha256: the weights' digest, where it is known; engines compare it with what they read.
        base: manifest key of the weights that an adapter changes; None: these are full weights.
    """
    file = draft(scratch)
    try:
        tensor_files.write(file, policy.weights())
        digest = (sha256 or weights_digest(policy.weights())).hex()
        return put(store, policy, file, digest, prefix, model=model, probe=probe, base=base)
    finally:
        file.unlink(missing_ok=True)


def draft(scratch: Path) -> Path:
    """A file for weights on their way to the store."""
    return scratch / f"weights-{uuid.uuid4().hex[:12]}.safetensors"


def put(
    store: ObjectStore,
    policy: Policy,
    file: Path,
    digest: str,
    prefix: str,
    *,
    model: str,
    probe: dict[str, Any],
    base: str | None,
) -> Stored:
    """Store a file of weights with all that belongs to it. Arguments as `upload`."""
    name, files = WEIGHTS, dict[str, bytes]()
    meta: dict[str, Any] = {"model": model, "probe": probe}
    if policy.lora is not None:
        described = lora.describe(policy.network, policy.lora)
        name, files = lora.WEIGHTS, {lora.CONFIG: lora.config_file(described)}
        meta |= {"adapter": described, "base": base}
    return manifests.upload(
        store,
        f"{prefix}/{digest}",
        {name: file, **files},
        kind="weights",
        sha256=digest,
        tensors=describe(policy.weights(), name),
        meta=meta,
    )


@dataclass
class Publisher:
    """Publishes the versions of one run."""

    ledger: Ledger
    store: ObjectStore
    scratch: Path
    policy: Policy
    waits: Waits
    run: str
    epoch: int
    model: str
    """Manifest key of the model folder."""
    longest: int
    """Longest context, which bounds the probe."""
    sync_every: int
    base: str | None = None
    """Manifest key of the weights that the run's adapters change."""
    ranks: Ranks = field(default_factory=Ranks)

    def publish_if_due(self, version: int, *, first: bool = False) -> None:
        """`publish`, if the served version is too far behind."""
        if self.ranks.decide("publish", partial(self._is_due, version)):
            with tracing.span("publish", run=self.run, version=version):
                self.publish(version, first=first)

    def publish(self, version: int, *, first: bool = False) -> None:
        """Publish `version`, which the policy holds, and wait until it is served.

        Rank 0 acts; every rank polls with it, so that none waits in a collective for engines.

        Raises:
            EngineUnavailable: no engine served it within the limit.
            Stopped, Fenced, RunStopped, SourceBroken: as the poll.
        """
        if self.ranks.decide("uploaded", partial(self._state, version)) == "computed":
            self._upload(version)
        while (state := self.ranks.decide("ask", partial(self._ask, version))) == HELD:
            reason = f"no engine has a free slot for version {version}"
            self.ranks.pause(self.waits, "resident_limit", reason)
        failpoints.reach("p_loading")
        while state == "loading":
            reason = f"engines are loading version {version}"
            waited = self.ranks.pause(self.waits, "publish", reason)
            state = self.ranks.decide("loading", partial(self._look, version, waited))
        self.waits.over()
        log.info("version %d is %s", version, state)
        failpoints.reach("c_served" if first else "p_served")

    def _is_due(self, version: int) -> bool:
        served = self.ledger.call(versions.served, self.run)
        return served is None or version - served >= self.sync_every

    def _state(self, version: int) -> str:
        return self.ledger.call(versions.state, self.run, version)

    def _ask(self, version: int) -> str:
        """Have engines load it; its state, or `HELD`."""
        self._ensure_open()
        if not self.ledger.call(versions.publish, self.run, self.epoch, version):
            return HELD
        return self._state(version)

    def _look(self, version: int, waited: float) -> str:
        """Its state; raises once it has been loading for too long."""
        state, limit = self._state(version), self.waits.patience_s
        if state != "loading":
            return state
        self._ensure_open()
        if waited > limit:
            # What was asked for just before the wait began is a little older than the wait.
            away = self.ledger.call(outages.parts_away, self.run, limit_s=0.9 * limit)
            raise EngineUnavailable(
                f"version {version} of run {self.run} was not served within {limit:.0f} s"
                f"{away and f' ({away})'}; see that an engine is up (ROLLBOOK_ENGINES), that it "
                "reaches the object store, and that the workflow and ledger workers run, then "
                f"`rollbook resume {self.run}`"
            )
        return state

    def _upload(self, version: int) -> None:
        """Store the weights from rank 0. Where they are divided, all ranks take part in gathering."""
        file = draft(self.scratch)
        try:
            if self.policy.sharded:
                with self.ranks.sums():
                    probed = self._write(file if self.ranks.rank == 0 else None)
                self.ranks.first("upload", lambda: self._store(version, file, probed))
            else:
                self.ranks.first("upload", lambda: self._store(version, file, self._write(file)))
        finally:
            file.unlink(missing_ok=True)

    def _write(self, file: Path | None) -> dict[str, Any]:
        """Put the weights into the file; what they say about the probe."""
        tensor_files.write(file, self.policy.weights())
        return probe(self.policy, self.longest)

    def _store(self, version: int, file: Path, probed: dict[str, Any]) -> None:
        """Put what was written into the store, and record it."""
        digest = self.ledger.call(versions.digest, self.run, version).hex()
        stored = self.waits.outlast(
            lambda: put(
                self.store,
                self.policy,
                file,
                digest,
                f"weights/{self.run}/{version}",
                model=self.model,
                probe=probed,
                base=self.base,
            )
        )
        failpoints.reach("p_uploaded")
        self.ledger.call(
            versions.record_weights,
            self.run,
            self.epoch,
            version,
            manifest_key=stored.manifest_key,
            bytes=stored.bytes,
            probe=probed,
        )

    def _ensure_open(self) -> None:
        def look(tx: Tx) -> None:
            runs.ensure_open(runs.read(tx, self.run))

        self.ledger.call(look)


def fetch_model(store: ObjectStore, manifest_key: str, folder: Path) -> Path:
    """The model folder that engines and workers use too."""
    shutil.rmtree(folder, ignore_errors=True)
    manifests.fetch(store, manifest_key, folder)
    return folder
