"""A run that is stuck on purpose says where: real processes, a verifier that hangs, a dead worker."""

import json

import pytest

from tests.stuck_run import RUN, StuckRun, until


@pytest.mark.timeout(300)
def test_a_hanging_verifier_and_then_a_dead_worker_are_named(stuck_run: StuckRun) -> None:
    told = json.loads(stuck_run.command("stuck", RUN, "--json"))
    (first, *_) = [wait for wait in told["stuck"] if wait["on"] == "verifier"]
    assert first["seconds"] > 0
    assert first["workflow_id"].startswith(f"run/{RUN}/")
    assert (first["phase"], first["tokens"] > 0) == ("verifier", True)
    group = str(first["group"])
    inspected = json.loads(stuck_run.command("inspect", RUN, group, "--json"))
    sample = inspected["samples"][first["sample"]]
    assert (sample["state"], sample["phase"]) == ("running", "verifier")
    assert sample["last heartbeat"].endswith("s ago")
    data = json.loads(stuck_run.command("inspect", RUN, "--json"))
    order, (cursor,) = data["data order"], data["cursor"]
    assert (order["permutation"], order["seed"]) == ("by seed, per epoch", stuck_run.config.seed)
    assert cursor["batches_drawn"] > 0
    assert {"batch", "epoch", "row", "seed"} <= cursor["durable_cursor"].keys()
    assert first["group"] in [group["group"] for group in data["owed"]]
    decoded = json.loads(stuck_run.command("decode", RUN, group, str(first["sample"]), "--json"))
    (segment,) = decoded["segments"]
    assert segment["prompt"] == decoded["data"]["prompt"]
    assert 0 < segment["tokens"] <= 4

    # From here on nobody takes attempts.
    stuck_run.job.supervisor.stop("rollouts")

    def reported() -> bool:
        now = json.loads(stuck_run.command("stuck", RUN, "--json"))
        waits = now["run"] + now["stuck"]
        return any(w["on"] == "rollout worker" and "no worker" in w["detail"] for w in waits)

    until(reported, seconds=30)
