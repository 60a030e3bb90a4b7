"""Two trainer processes compute one step together: the step of one process with everybody's rows."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from domain.errors import ConfigError
from rollbook.root import ROOT
from rollbook.stack import ports
from tests.two_ranks import EVERY_SHARE, PARALLEL, SETTINGS, SHARES
from trainer import launcher
from trainer.devices import Place, place
from trainer.ranks import Ranks

PROGRAM = Path(__file__).parents[1] / "two_ranks.py"


@dataclass(frozen=True)
class Ended:
    """One of the two processes."""

    returncode: int
    output: str
    errors: str


def processes(folder: Path, *how: str) -> list[Ended]:
    """Two ranks of the program, when both have ended."""
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ports.LOOPBACK,
        "MASTER_PORT": str(ports.free_port()),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), *how],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=290) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [Ended(p.returncode, *said) for p, said in zip(started, told, strict=True)]


def told_by(folder: Path, *how: str) -> list[list[dict[str, Any]]]:
    """The lines that each of two ranks tells."""
    found = []
    for ended in processes(folder, *how):
        assert ended.returncode in (0, -signal.SIGKILL), ended.errors[-4000:]
        lines = ended.output.splitlines()
        found.append([json.loads(line) for line in lines if line.startswith("{")])
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What both processes together found, by case; started once."""
    found, _ = told_by(tmp_path_factory.mktemp("ranks"))
    return {case.pop("case"): case for case in found}


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_step_is_that_of_one_process_with_all_rows(
    told: dict[str, dict[str, Any]], parallel: str
) -> None:
    names = {f"{parallel}; {name}; uneven" for name in SETTINGS}
    names |= {f"{parallel}; {name}; {kind}" for name in EVERY_SHARE for kind in SHARES}
    assert names <= told.keys()
    for name in names:
        assert told[name]["worst"] < 1e-6, name
        for figure, (pooled, alone) in told[name]["figures"].items():
            assert pooled == pytest.approx(alone, rel=1e-6, abs=1e-9), (name, figure)


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("flat", "no_usable_gradient"),
        ("empty", "empty"),
        ("all but one dropped", "no_usable_gradient"),
    ],
)
def test_a_step_without_a_usable_gradient_anywhere_moves_nothing(
    told: dict[str, dict[str, Any]], parallel: str, case: str, cause: str
) -> None:
    assert told[f"{parallel}; {case}"] == {"updated": False, "cause": cause, "kept": True}


@pytest.mark.parametrize("parallel", PARALLEL)
def test_every_rank_makes_as_many_updates_as_the_one_with_most_rows(
    told: dict[str, dict[str, Any]], parallel: str
) -> None:
    full, empty = told[f"{parallel}; minibatches"], told[f"{parallel}; empty parts"]
    assert full["updates"] == 3
    assert len(set(full["digests"])) == 1
    assert empty["masses"] == [pytest.approx(0.4)] * 2
    assert empty["updates"] == [3, 3]


@pytest.mark.parametrize("parallel", PARALLEL)
def test_clipped_updates_over_micro_batches_are_those_of_one_process(
    told: dict[str, dict[str, Any]], parallel: str
) -> None:
    found = told[f"{parallel}; updates"]
    assert found["worst"] < 1e-9
    assert found["norms"] == pytest.approx(found["expected"], rel=1e-6)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_narrow_weights_are_trained_in_the_precision_of_their_masters(
    told: dict[str, dict[str, Any]], parallel: str
) -> None:
    found = told[f"{parallel}; bfloat16"]
    assert found["norm"] == pytest.approx(found["expected"], rel=0.02)
    for rank in found["each"]:
        assert rank["masters"]
        assert rank["kinds"] == rank["summed"] == ["torch.float32"]
        assert rank["weights"] < 0.2  # most of them are too coarse to move


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_micro_batch_is_a_pass_and_checkpointing_runs_each_layer_again(
    told: dict[str, dict[str, Any]], parallel: str
) -> None:
    for rank in range(2):
        whole, rows = (told[f"{parallel}; {n} rows"]["each"][rank] for n in (8, 1))
        assert whole == {"network": 2, "layer": 2}  # to score, and to update
        assert rows["network"] == rows["layer"] > 2
        for kept, n in ((whole, 8), (rows, 1)):
            again = told[f"{parallel}; {n} rows; again"]["each"][rank]
            assert again == {"network": kept["network"], "layer": kept["network"] * 3 // 2}


@pytest.mark.parametrize("parallel", PARALLEL)
def test_readers_of_one_share_take_the_step_of_one_process(
    told: dict[str, dict[str, Any]], parallel: str
) -> None:
    cases = [case for name, case in told.items() if name.startswith(f"{parallel}; one share")]
    assert len(cases) == 3
    for case in cases:
        assert case["worst"] < 1e-6
        for figure, (pooled, alone) in case["figures"].items():
            assert pooled == pytest.approx(alone, rel=1e-6, abs=1e-9), figure


def test_readers_of_one_share_refuse_other_rows_than_each_others(
    told: dict[str, dict[str, Any]],
) -> None:
    (first, *rest) = told["other rows"]["answers"]
    assert rest == [first]
    error, unmoved = first
    assert re.search(
        r"readers of share 0 have packed other rows.*: [0-9a-f]{16}, [0-9a-f]{16};", error
    )
    assert unmoved


@pytest.mark.parametrize("where", ["on rank 0", "on rank 1", "its consequence"])
def test_what_fails_on_one_rank_raises_the_same_error_on_all(
    told: dict[str, dict[str, Any]], where: str
) -> None:
    assert told[where]["answers"] == [["DataChanged", "batch 3 has other tasks"]] * 2
    assert told["none"]["answers"] == [[], []]


@pytest.mark.parametrize("which", [0, 1])
def test_what_breaks_in_the_middle_of_a_sum_raises_the_same_error_on_all(
    tmp_path: Path, which: int
) -> None:
    """Also where rank 0 breaks, which keeps the store that the error is noted in."""
    for (rank,) in told_by(tmp_path, "breaks", str(which)):
        assert rank.pop("seconds") < 10
        assert rank == {"error": ["OverflowError", "in the middle of a step"], "apart": True}


def test_a_rank_that_waits_where_nothing_reaches_it_leaves_with_what_another_noted(
    tmp_path: Path,
) -> None:
    first, second = processes(tmp_path, "stuck")
    assert (first.returncode, second.returncode) == (0, 1)
    assert "OverflowError('while the other waits')" in first.errors
    assert "OverflowError: while the other waits" in second.errors


def test_ranks_that_hold_other_weights_than_each_other_book_nothing(
    told: dict[str, dict[str, Any]],
) -> None:
    assert told["same weights"]["answers"] == [[], []]
    for kind, text in told["other weights"]["answers"]:
        assert kind == "LedgerError"
        assert "hold different weights after step 3: 00, 01" in text


def test_rank_0_decides_for_all(told: dict[str, dict[str, Any]]) -> None:
    assert told["decided"]["answers"] == ["by rank 0"] * 2


def test_one_rank_that_is_told_to_stop_stops_all(told: dict[str, dict[str, Any]]) -> None:
    assert [kind for kind, _ in told["stop"]["answers"]] == ["Stopped", "Stopped"]


def test_a_killed_rank_does_not_leave_the_other_waiting(told: dict[str, dict[str, Any]]) -> None:
    assert told["death"]["seconds"] < 10
    assert "rank 0 has lost another one of 2 trainer processes" in told["death"]["said"]


def test_each_rank_of_a_machine_takes_its_own_gpu_and_gloo_carries_what_is_said() -> None:
    places = [place(rank, 2) for rank in range(2)]
    assert [str(p.device) for p in places] == ["cuda:0", "cuda:1"]
    assert [p.bound for p in places] == [p.device for p in places]
    assert {p.backend for p in places} == {"cpu:gloo,cuda:nccl"}
    with pytest.raises(ConfigError, match=r"process 3 of this machine has no GPU: there are 2"):
        place(2, 2)


def test_ranks_without_gpus_compute_on_cpus_and_add_up_over_gloo() -> None:
    assert {place(rank, 0) for rank in range(9)} == {Place(torch.device("cpu"), "gloo")}
    assert place(0, 0).bound is None


def test_a_launcher_whose_store_would_outlive_a_world_is_refused() -> None:
    started = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "1")
    shared = started | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    launcher.check(started | {"TORCHELASTIC_MAX_RESTARTS": "5"})
    launcher.check(shared | {"TORCHELASTIC_MAX_RESTARTS": "0"})
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        launcher.check(shared | {"TORCHELASTIC_MAX_RESTARTS": "5"})


def test_a_rank_dies_with_its_launcher() -> None:
    program = (
        "import subprocess, sys\n"
        "child = 'from trainer.launcher import die_with_it; import time; die_with_it(); "
        "print(1, flush=True); time.sleep(60)'\n"
        "rank = subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
        "print(rank.pid, flush=True); rank.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as launched:
        assert launched.stdout is not None
        rank = psutil.Process(int(launched.stdout.readline()))
        assert launched.stdout.readline() == "1\n"  # it has asked for it
        launched.kill()
        try:
            assert rank.wait(20) in (None, -signal.SIGKILL)
        finally:
            if rank.is_running():
                rank.kill()


def test_half_of_the_launchers_variables_are_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE"), Ranks.joined({"RANK": "1"}, timeout_s=1):
        pass
