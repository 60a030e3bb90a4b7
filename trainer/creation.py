"""Creation and restoration: how the network, its optimizer and its weights come to be.

A run is created once: the model folder goes to the object store without weights, the initial
weights become version 0 and, with a fresh optimizer, checkpoint 0; one transaction names all of it.
A crash before that transaction leaves unnamed objects and another try; the weights may then differ,
since nothing has seen them.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from domain import failpoints
from domain.config import RunConfig
from domain.errors import DigestMismatch, LedgerError, ObjectMissing
from storage import checkpoints, manifests, runs
from storage.checkpoints import CheckpointRow
from storage.database import Ledger, Tx
from storage.objects import ObjectStore
from storage.runs import Run
from trainer import checkpoint, determinism, folders, publishing
from trainer.checkpoint import State
from trainer.determinism import World
from trainer.model import Policy, weights_digest
from trainer.optimizer import Optimizer
from trainer.ranks import Ranks
from trainer.sharding import Slice
from trainer.update import Learner
from trainer.waiting import Waits

log = logging.getLogger(__name__)


@dataclass
class Workshop:
    """Where a run's parts are built: its stores, a local folder, its fencing token and its ranks."""

    ledger: Ledger
    store: ObjectStore
    scratch: Path
    waits: Waits
    run: str
    epoch: int
    ranks: Ranks = field(default_factory=Ranks)

    def create(self, found: Run, position: Mapping[str, Any]) -> None:
        """Make version 0 and checkpoint 0 and begin the run.

        Raises:
            ConfigError: the model cannot be read, packed, or hold the configured context.
        """
        config = found.config
        cores = os.cpu_count() or 1
        threads = config.trainer.threads or max(1, cores // self.ranks.size)
        device = determinism.settle(threads, exact=config.trainer.exact == "bits")
        source = folders.source_folder(config, self.scratch / "tiny")
        files = folders.description_files(source, config.model.dtype)
        model_digest = folders.files_digest(files)
        model = self.waits.outlast(
            lambda: manifests.upload(
                self.store, f"models/{model_digest}", files, kind="model", sha256=model_digest
            )
        )
        drawn = config.model.tiny is not None or config.model.initial == "random"
        home = _home(config, device)
        policy = (Policy.build if drawn else Policy.pretrained)(source, config, home)
        folders.check_context(source, config)
        world = asdict(World.here(threads, device, shares=found.shares)) | {
            "model_manifest": model.manifest_key
        }
        if config.trainer.kl_coefficient or config.model.lora:
            # Apart from version 0, which is swept once it is superseded.
            probed = publishing.probe(policy, config.max_context_tokens)
            initial = self._upload_weights(policy, "models/reference", world, probed)
            if config.trainer.kl_coefficient:
                world["reference_manifest"] = initial.manifest_key
            if config.model.lora:
                world["base_manifest"] = initial.manifest_key
        policy.adapt(config)
        policy.check_packing()
        optimizer = Optimizer(policy.parameters(), config.trainer)
        determinism.seed_step(config.seed, 0)
        probed = publishing.probe(policy, config.max_context_tokens)
        weights = self._upload_weights(policy, f"weights/{self.run}/0", world, probed)
        saved = self.waits.outlast(
            lambda: checkpoint.save(
                self.store,
                self.scratch,
                policy,
                optimizer,
                run=self.run,
                step=0,
                version=0,
                epoch=self.epoch,
                position=position,
                born=found.created_at,
            )
        )
        failpoints.reach("c_uploaded")

        def begin(tx: Tx) -> None:
            if runs.read(tx, self.run).state == "creating":
                runs.set_world(tx, self.run, self.epoch, world)
            checkpoints.create_first(
                tx,
                self.run,
                self.epoch,
                weights_sha256=bytes.fromhex(Path(weights.manifest_key).parent.name),
                manifest_key=weights.manifest_key,
                weights_bytes=weights.bytes,
                probe=probed,
                prefix=saved.prefix,
                manifest_sha256=saved.manifest_sha256,
                bytes=saved.bytes,
                data_position=position,
                rng=saved.rng,
                world=world,
            )

        self.ledger.call(begin)
        log.info("run %s begins with weights %s", self.run, weights.manifest_key)
        failpoints.reach("c_row")

    def restore(self, found: Run, *, at_most: int | None = None) -> tuple[Learner, State]:
        """The learner as it stood at the newest checkpoint that can be read.

        A checkpoint that is damaged or gone is named, and the one before it taken: the steps since
        then are replayed from their plans, and every digest is compared. Under `exact = "order"` a
        replay makes other weights than those that were published since, so there it must be the
        newest.

        Args:
            found: the run.
            at_most: take none that is newer than this step's.

        Raises:
            DigestMismatch: no checkpoint that may be taken can be read.
        """
        config, world = found.config, found.world
        threads = int(world["threads"])
        device = determinism.settle(threads, exact=config.trainer.exact == "bits")
        if changed := World.read(world).differences(
            World.here(threads, device, shares=found.shares)
        ):
            log.warning("this is not the world the run was created in: %s", changed)
        fetch = partial(publishing.fetch_model, self.store, world["model_manifest"])
        folder = self.ranks.together(
            "model", lambda: self.waits.outlast(lambda: fetch(self.scratch / "model"))
        )
        build = partial(self._build, folder, config, world, device)
        policy, reference = self.ranks.together("build", build)
        pool = None
        if config.trainer.parallel == "fsdp" and self.ranks.size > 1:
            with self.ranks.sums():
                for each in filter(None, (policy, reference)):
                    each.shard(device, Slice(self.ranks.rank, self.ranks.size))
                policy.check_packing()
            pool = partial(self.ranks.total, "norm")
        optimizer = Optimizer(policy.parameters(), config.trainer, pool=pool)
        assert found.durable_step is not None
        newest = found.durable_step if at_most is None else min(at_most, found.durable_step)
        state = self._load_newest(found, newest, policy, optimizer)
        return Learner(config, policy, optimizer, reference, self.ranks), state

    def _build(
        self, folder: Path, config: RunConfig, world: Mapping[str, Any], device: torch.device
    ) -> tuple[Policy, Policy | None]:
        """The policy, still with other weights, and its reference if the loss has one; whole."""
        home = _home(config, device)
        policy = Policy.build(folder, config, home)
        if config.model.lora is not None:
            policy.load(self._initial(world["base_manifest"]))
            policy.adapt(config)
        if home == device:
            policy.check_packing()
        return policy, self._reference(folder, config, world, home)

    def _load_newest(self, found: Run, newest: int, policy: Policy, optimizer: Optimizer) -> State:
        """The newest checkpoint that every rank can read."""
        damage: str | None = None
        inexact = found.config.trainer.exact == "order"
        for step in range(newest, newest - 1 if inexact else found.first_step - 1, -1):
            row = self.ranks.together(
                "look", partial(self.ledger.call, checkpoints.at, self.run, step)
            )
            if row is None:
                continue
            loaded: list[State] = []
            read = partial(self._try, row, policy, optimizer, loaded)
            damages = [*filter(None, self.ranks.gather("load", read))]
            if not damages and policy.sharded:
                damages = [*filter(None, [self._misfit(row, loaded[0], policy)])]
            if not damages:
                return loaded[0]
            damage = damages[0]
            log.error("checkpoint %d of %s cannot be read: %s", step, self.run, damage)
        remedy = "restore it in the object store"
        if inexact:
            remedy += (
                ", or fork the run from an earlier one (--from-step): under trainer.exact = "
                '"order" its steps since would become others than were published'
            )
        raise DigestMismatch(
            f"no checkpoint of run {self.run} can be read; {remedy}. Of the last: {damage}"
        )

    def _try(
        self, row: CheckpointRow, policy: Policy, optimizer: Optimizer, loaded: list[State]
    ) -> str | None:
        """Load a checkpoint; what is wrong with it, if something is."""
        try:
            loaded.append(self._load(row, policy, optimizer))
        except (DigestMismatch, ObjectMissing) as error:
            return str(error)
        return None

    def _misfit(self, row: CheckpointRow, state: State, policy: Policy) -> str | None:
        """Whether the slices of all ranks make the weights that were promised."""
        with self.ranks.sums():
            digest = weights_digest(policy.weights())
        same = digest == state.weights_sha256
        return (
            None if same else str(checkpoint.wrong_weights(row.prefix, state.weights_sha256.hex()))
        )

    def _load(self, row: CheckpointRow, policy: Policy, optimizer: Optimizer) -> State:
        state = self.waits.outlast(
            lambda: checkpoint.load(
                self.store,
                self.scratch,
                policy,
                optimizer,
                prefix=row.prefix,
                manifest_sha256=row.manifest_sha256,
            )
        )
        if (state.step, state.version) != (row.step, row.version):
            raise DigestMismatch(
                f"checkpoint {row.prefix!r} says step {state.step}, version {state.version}; the "
                f"ledger says step {row.step}, version {row.version}"
            )
        return state

    def _reference(
        self, folder: Path, config: RunConfig, world: Mapping[str, Any], home: torch.device
    ) -> Policy | None:
        if not config.trainer.kl_coefficient:
            return None
        key = world.get("reference_manifest")
        if key is None:
            raise LedgerError(
                f"run {self.run} has a KL term but no reference weights in its world; it was "
                "created without one"
            )
        reference = Policy.build(folder, config, home)
        reference.load(self._initial(key))
        reference.network.requires_grad_(False)
        return reference

    def _initial(self, manifest_key: str) -> dict[str, Tensor]:
        """The full weights the run began with."""
        kept = self.scratch / "initial"
        self.waits.outlast(lambda: manifests.fetch(self.store, manifest_key, kept))
        return load_file(kept / publishing.WEIGHTS)

    def _upload_weights(
        self, policy: Policy, prefix: str, world: Mapping[str, Any], probed: dict[str, Any]
    ) -> manifests.Stored:
        return self.waits.outlast(
            lambda: publishing.upload(
                self.store,
                self.scratch,
                policy,
                prefix,
                model=world["model_manifest"],
                probe=probed,
                base=world.get("base_manifest"),
            )
        )


def _home(config: RunConfig, device: torch.device) -> torch.device:
    """Where whole networks are built: beside a device that may hold a slice of them only."""
    return torch.device("cpu") if config.trainer.parallel == "fsdp" else device
