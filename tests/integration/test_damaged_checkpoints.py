"""Checkpoints that were half uploaded, lost, tampered with or put back: never loaded, always named."""

import json
import os
import pickle
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from domain.errors import DigestMismatch
from domain.services import Services
from storage import checkpoints, runs
from storage.checkpoints import CheckpointRow
from storage.database import Ledger, Tx
from storage.objects import ObjectStore
from tests.playing import Fleet, configuration
from trainer import loop
from trainer.creation import Workshop
from trainer.waiting import Unfenced, Waits


class Payload:
    """What a pickle may do to its reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


@dataclass
class Trained:
    """A finished run of four steps with the checkpoints 0, 2 and 4, whose objects can be changed."""

    services: Services
    ledger: Ledger
    run: str
    folder: Path

    def __post_init__(self) -> None:
        self.store = ObjectStore(self.services)

    def row(self, step: int) -> CheckpointRow:
        row = self.ledger.call(checkpoints.at, self.run, step)
        assert row is not None
        return row

    def read(self, step: int, name: str) -> bytes:
        return self.store.get(f"{self.row(step).prefix}/{name}")

    def write(self, step: int, name: str, content: bytes | None) -> None:
        key = f"{self.row(step).prefix}/{name}"
        if content is None:
            self.store.delete([key])
        else:
            self.store._s3.put_object(Bucket=self.store.bucket, Key=key, Body=content)

    @contextmanager
    def changed(self, files: dict[str, bytes | None], *, step: int = 4) -> Iterator[None]:
        before = {name: self.read(step, name) for name in files}
        for name, content in files.items():
            self.write(step, name, content)
        try:
            yield
        finally:
            for name, content in before.items():
                self.write(step, name, content)

    def restored(self) -> int:
        """The step whose checkpoint a trainer that starts now restores."""
        found = self.ledger.call(runs.read, self.run)
        waits = Waits(lambda: False, Unfenced(), patience_s=0)
        scratch = self.folder / secrets.token_hex(4)
        scratch.mkdir()
        workshop = Workshop(self.ledger, self.store, scratch, waits, self.run, found.epoch)
        return workshop.restore(found)[1].step

    def vouch(self, files: dict[str, bytes]) -> dict[str, bytes | None]:
        """Files of checkpoint 4 with a manifest and a ledger row that vouch for them."""
        manifest = json.loads(self.read(4, "manifest.json"))
        for name, content in files.items():
            manifest["files"][name] = {
                "sha256": sha256(content).hexdigest(),
                "bytes": len(content),
            }
        told = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()

        def act(tx: Tx) -> None:
            tx.execute("SET LOCAL session_replication_role = replica")
            tx.execute(
                "UPDATE checkpoints SET manifest_sha256 = %s WHERE run_id = %s AND step = 4",
                (sha256(told).digest(), self.run),
            )

        self.ledger.call(act)
        return {**files, "manifest.json": told}


@pytest.fixture
def trained(ledger_url: str, ledger: Ledger, s3_services: Services, tmp_path: Path) -> Trained:
    services = s3_services.model_copy(update={"database_url": ledger_url})
    ObjectStore(services).prepare()
    run = f"damaged-{secrets.token_hex(4)}"
    config = configuration(run, tmp_path, checkpoint={"every": 2, "keep": 9})
    ledger.call(runs.create, config, world={})
    with Fleet(services, tmp_path / "engine") as fleet:
        assert loop.run(run, services, holder="a:1", stop=fleet.broken) == "finished"
    return Trained(services, ledger, run, tmp_path)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_the_generators_stand_where_they_stood(trained: Trained) -> None:
    assert trained.restored() == 4
    then = draws()
    assert then != draws()
    assert trained.restored() == 4
    assert draws() == then


def test_what_is_not_what_the_ledger_names_is_never_loaded(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    assert trained.restored() == 4
    state = json.loads(trained.read(4, "state.json"))
    flipped = bytearray(trained.read(4, "weights.safetensors"))
    flipped[-1] ^= 1
    pickled = pickle.dumps(Payload(trained.folder / "ran"))
    cases: dict[str, tuple[dict[str, bytes | None], str]] = {
        "half uploaded": (
            {"manifest.json": None, "optimizer.safetensors": None},
            "/manifest.json' in bucket",
        ),
        "a file is gone": (
            {"optimizer.safetensors": None},
            "/optimizer.safetensors' in bucket 'BUCKET' at ENDPOINT; it was never completely",
        ),
        "a file is cut short": (
            {"weights.safetensors": bytes(flipped[:100])},
            "/weights.safetensors' in bucket",
        ),
        "one bit": (
            {"weights.safetensors": bytes(flipped)},
            "it was damaged or replaced; restore the object, or go back to an earlier",
        ),
        "the manifest is cut short": (
            {"manifest.json": trained.read(4, "manifest.json")[:-9]},
            "is no manifest that this version can read",
        ),
        "somebody says it is another step": (
            {"state.json": json.dumps(state | {"step": 3}).encode()},
            "/state.json' in bucket",
        ),
        "an older checkpoint in its place": (
            {
                name: trained.read(2, name)
                for name in (
                    "weights.safetensors",
                    "optimizer.safetensors",
                    "state.json",
                    "manifest.json",
                )
            },
            "was promised: it was replaced",
        ),
        "a pickle in its place": (
            {"optimizer.safetensors": pickled},
            "/optimizer.safetensors' in bucket",
        ),
    }
    for files, told in cases.values():
        caplog.clear()
        with trained.changed(files):
            assert trained.restored() == 2
        told = told.replace("BUCKET", trained.store.bucket).replace(
            "ENDPOINT", trained.store.endpoint
        )
        assert f"checkpoint 4 of {trained.run} cannot be read" in caplog.text
        assert f"{trained.row(4).prefix}" in caplog.text
        assert told in caplog.text
    assert trained.restored() == 4
    assert not (trained.folder / "ran").exists()


def test_a_newer_checkpoint_that_no_row_names_is_never_chosen(trained: Trained) -> None:
    """Complete to the last object: its trainer died before it was recorded."""
    row = trained.row(4)
    for entry in trained.store.list(f"{row.prefix}/"):
        newer = f"checkpoints/{trained.run}/00000006/9-left/{entry.key.rpartition('/')[2]}"
        content = trained.store.get(entry.key)
        trained.store.put_new(newer, content, sha256=sha256(content).hexdigest())
    assert trained.restored() == 4


def test_a_checkpoint_that_even_the_ledger_vouches_for_must_still_be_what_it_says(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who can write both cannot make a trainer run code, nor restore another step."""
    mark = trained.folder / "ran"
    pickled = pickle.dumps(Payload(mark))
    state = json.loads(trained.read(4, "state.json"))
    for name, content, told in (
        ("weights.safetensors", pickled, "weights.safetensors is no safetensors file"),
        ("optimizer.safetensors", pickled, "optimizer.safetensors is no safetensors file"),
        ("weights.safetensors", trained.read(2, "weights.safetensors"), "do not have the digest"),
        (
            "state.json",
            json.dumps(state | {"step": 3}).encode(),
            "says step 3, version 4; the ledger says step 4, version 4",
        ),
        ("state.json", json.dumps(state | {"format": 9}).encode(), "has format 9"),
    ):
        caplog.clear()
        with trained.changed(trained.vouch({name: content})):
            assert trained.restored() == 2
        assert told in caplog.text
    pickle.loads(pickled)  # the payload is live: nobody has read it
    assert mark.exists()


def test_an_inexact_run_is_not_rolled_back_behind_what_it_published(trained: Trained) -> None:
    def declare(tx: Tx) -> None:
        tx.execute("UPDATE runs SET config = jsonb_set(config, '{run,trainer,exact}', '\"order\"')")
        tx.execute("UPDATE runs SET config = jsonb_set(config, '{run,checkpoint,every}', '1')")

    trained.ledger.call(declare)
    assert trained.restored() == 4
    with (
        trained.changed({"weights.safetensors": None}),
        pytest.raises(
            DigestMismatch, match=r"fork the run from an earlier one.*weights\.safetensors"
        ),
    ):
        trained.restored()
