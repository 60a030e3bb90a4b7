"""What leaves the object store is what nothing can ask for again, by rows alone."""

from hashlib import sha256

import pytest

from activities.garbage import Garbage
from domain.services import Services
from storage import fork, garbage, manifests, pushes, runs, versions
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.rehearsal import ENGINE, Rehearsal, configuration


@pytest.fixture(scope="module")
def store(s3_services: Services) -> ObjectStore:
    opened = ObjectStore(s3_services)
    opened.prepare()
    return opened


def weights(version: int) -> str:
    return f"weights/r1/{version}/x/manifest.json"


def put(store: ObjectStore, key: str) -> None:
    store.put_new(key, b"x", sha256=sha256(b"x").hexdigest())


def kept(store: ObjectStore, prefix: str) -> list[str]:
    return [e.key for e in store.list(prefix) if e.key.endswith("manifest.json")]


def trained(ledger: Ledger, store: ObjectStore, steps: int, *, keep: int = 1) -> Rehearsal:
    """A run of so many updates; each version's objects are in the store, none in the engine."""
    config = configuration(checkpoint={"keep": keep}, schedule={"ahead": 0})
    run = Rehearsal(ledger, config).begin()
    for prefix in ("weights/r1/", "checkpoints/r1/"):  # of the test before
        store.delete(entry.key for entry in store.list(prefix))
    train(run, steps)
    for version in range(steps + 1):
        put(store, weights(version))
        put(store, f"weights/r1/{version}/x/model.safetensors")
    for row in run.rows("SELECT s3_prefix FROM checkpoints"):
        put(store, f"{row['s3_prefix']}/manifest.json")
    return run


def train(run: Rehearsal, steps: int) -> None:
    for _ in range(steps):
        run.hand_over()
        for group in [g for g, at in run.states().items() if at == "submitted"]:
            run.complete(group)
        run.planned()
        run.serve(run.apply())
        run.checkpoint()


def retire(ledger: Ledger, run: str = "r1") -> None:
    """What the steward's rounds do: drain, unload, retire."""
    for version in ledger.call(versions.retire, run):
        ledger.call(versions.unloaded, run, ENGINE, version)
    ledger.call(versions.retire, run)


async def test_retired_weights_and_superseded_checkpoints_are_deleted(
    ledger: Ledger, store: ObjectStore
) -> None:
    run = trained(ledger, store, 3)
    retire(ledger)
    await Garbage(ledger, store).collect()
    assert kept(store, "weights/r1/") == [weights(3)]
    assert len(store.list("weights/r1/")) == 2
    assert kept(store, "checkpoints/r1/") == [f"checkpoints/r1/3/{run.epoch}/manifest.json"]
    states = run.rows("SELECT state FROM policy_versions ORDER BY version")
    assert [row["state"] for row in states] == ["deleted"] * 3 + ["served"]
    assert ledger.call(garbage.runs_with_garbage) == []


async def test_a_pinned_version_stays_until_its_rollout_ends(
    ledger: Ledger, store: ObjectStore
) -> None:
    keep = {"order": "admission", "stale_policy": "keep", "allow_unbounded_staleness": True}
    run = Rehearsal(ledger, configuration(checkpoint={"keep": 1}, schedule=keep)).begin()
    store.delete(entry.key for entry in store.list("weights/r1/"))
    run.hand_over()
    run.start(0, sample=0)  # pins version 0
    for groups in ((1, 2), (3, 4)):
        run.hand_over()
        for group in groups:
            run.complete(group)
        run.planned()
        run.serve(run.apply())
        run.checkpoint()
    for version in range(3):
        put(store, weights(version))
    retire(ledger)
    await Garbage(ledger, store).collect()
    assert kept(store, "weights/r1/") == [weights(0), weights(2)]
    run.end(0, 0)
    retire(ledger)
    await Garbage(ledger, store).collect()
    assert kept(store, "weights/r1/") == [weights(2)]


async def test_the_newest_durable_version_and_what_a_fork_began_with_stay(
    ledger: Ledger, store: ObjectStore
) -> None:
    run = trained(ledger, store, 2, keep=3)
    child = ledger.call(fork.fork, "r1", run.epoch, 1)  # names version 1 and its checkpoint
    keep_only(run, "r1", 1)
    retire(ledger)
    await Garbage(ledger, store).collect()
    assert kept(store, "weights/r1/") == [weights(1), weights(2)]
    assert steps_kept(store) == [1, 2]
    assert ledger.call(versions.state, "r1", 1) == "deleted"  # the parent has let go of it
    assert ledger.call(versions.state, child, 1) == "uploaded"
    assert ledger.call(garbage.runs_with_garbage) == []


async def test_the_last_of_a_fork_and_its_parent_deletes_what_both_began_with(
    ledger: Ledger, store: ObjectStore
) -> None:
    run = trained(ledger, store, 2, keep=3)
    name = ledger.call(fork.fork, "r1", run.epoch, 1)
    child = Rehearsal(ledger, ledger.call(runs.read, name).config)
    child.take_over()
    child.serve(1)
    train(child, 1)
    keep_only(run, name, 1)
    retire(ledger, name)
    await Garbage(ledger, store).collect()
    assert ledger.call(versions.state, name, 1) == "deleted"
    assert weights(1) in kept(store, "weights/r1/")  # the parent may still be forked there
    assert 1 in steps_kept(store)
    keep_only(run, "r1", 1)
    retire(ledger)
    await Garbage(ledger, store).collect()
    assert weights(1) not in kept(store, "weights/r1/")
    assert 1 not in steps_kept(store)
    assert ledger.call(garbage.runs_with_garbage) == []


def keep_only(run: Rehearsal, name: str, keep: int) -> None:
    run.do(
        "UPDATE runs SET config = jsonb_set(config, '{run,checkpoint,keep}', to_jsonb(%s)) "
        "WHERE run_id = %s",
        keep,
        name,
    )


def steps_kept(store: ObjectStore) -> list[int]:
    return [int(key.split("/")[2]) for key in kept(store, "checkpoints/r1/")]


async def test_weights_of_a_kept_checkpoint_stay_even_when_superseded(
    ledger: Ledger, store: ObjectStore
) -> None:
    trained(ledger, store, 2, keep=2)
    retire(ledger)
    await Garbage(ledger, store).collect()
    assert kept(store, "weights/r1/") == [weights(1), weights(2)]


async def test_retired_weights_of_a_publisher_of_ones_own_delete_nothing(
    ledger: Ledger, store: ObjectStore
) -> None:
    run = Rehearsal(ledger, configuration(checkpoint={"keep": 1}, schedule={"ahead": 0})).begin()
    put(store, "pushed-by-someone-else/x")
    for _ in range(2):
        run.hand_over()
        for group in [g for g, at in run.states().items() if at == "submitted"]:
            run.complete(group)
        run.planned()
        ledger.call(pushes.record, "r1", run.epoch, run.apply(), engines={ENGINE: 1})
        run.checkpoint()
    retire(ledger)
    await Garbage(ledger, store).collect()
    assert [entry.key for entry in store.list("pushed")] == ["pushed-by-someone-else/x"]
    assert ledger.call(versions.state, "r1", 1) == "deleted"


async def test_what_a_crash_left_behind_is_swept_once_it_is_old(
    ledger: Ledger, store: ObjectStore
) -> None:
    run = trained(ledger, store, 1, keep=9)
    born = run.now().created_at.isoformat()
    named = kept(store, "checkpoints/r1/")
    state = b"{}"

    def left(name: str, **meta: str) -> None:
        manifests.upload(
            store,
            f"checkpoints/r1/00000001/{name}",
            {"state.json": state},
            kind="checkpoint",
            sha256=sha256(state).hexdigest(),
            meta=meta,
        )

    left("7-ours", born=born)
    left("7-theirs", born="another ledger's run of this name")
    put(store, "checkpoints/r1/00000001/7-half/weights.safetensors")
    put(store, "checkpoints/r2/00000001/7-half/weights.safetensors")  # no run of this ledger
    upload = store._s3.create_multipart_upload(
        Bucket=store.bucket, Key="checkpoints/r1/00000001/7-parts/weights.safetensors"
    )["UploadId"]
    assert [u.upload for u in store.unfinished("checkpoints/r1/")] == [upload]

    await Garbage(ledger, store).sweep()  # nothing is old
    assert len(store.list("checkpoints/r1/00000001/7-")) == 5
    assert store.unfinished("checkpoints/r1/")

    await Garbage(ledger, store).sweep(older_s=-60)
    assert [e.key.split("/")[3] for e in store.list("checkpoints/r1/00000001/7-")] == [
        "7-theirs",
        "7-theirs",
    ]
    assert set(named) <= {e.key for e in store.list("checkpoints/r1/")}
    assert store.list("checkpoints/r2/")
    assert not store.unfinished("checkpoints/r1/")
    await Garbage(ledger, store).sweep(older_s=-60)
    store.delete(e.key for e in store.list("checkpoints/r1/00000001/7-"))
    store.delete(e.key for e in store.list("checkpoints/r2/"))


async def test_a_ledger_without_runs_is_swept_too(ledger: Ledger, store: ObjectStore) -> None:
    await Garbage(ledger, store).sweep()
