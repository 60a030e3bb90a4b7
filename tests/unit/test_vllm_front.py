"""What a vLLM server is started with, and what is verified before it hears of weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from domain.capabilities import IMAGES, of_vllm
from domain.errors import ConfigError
from engine.refusals import BadWeights, PolicyFailed, Unsupported
from engine.vllm import front, sets
from engine.vllm.command import Settings, argv, environment
from engine.vllm.sets import weight_set
from rollbook.launch import engine_options
from storage.manifests import Manifest, Tensor
from tests.rehearsal import configuration

PYTHON = Path("/v/bin/python")
TENSORS = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


def manifest(folder: Path, **changes: object) -> Manifest:
    save_file(TENSORS, folder / "model.safetensors")
    table = {
        "kind": "weights",
        "sha256": "w",
        "files": {"model.safetensors": {"sha256": "0" * 64, "bytes": 1}},
        "tensors": {
            "a": Tensor(dtype="float32", shape=(2, 3), file="model.safetensors"),
            "b": Tensor(dtype="bfloat16", shape=(4,), file="model.safetensors"),
        },
        "meta": {"model": "models/m/manifest.json", "probe": None},
    }
    return Manifest.model_validate(table | changes)


def test_a_set_whose_files_hold_what_its_manifest_lists_is_taken(tmp_path: Path) -> None:
    found = weight_set("k", manifest(tmp_path), tmp_path)
    assert found.shapes == {"a": ("float32", (2, 3)), "b": ("bfloat16", (4,))}
    assert found.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensors": {}}, "lists 0 tensors"),
        ({"kind": "model"}, "kind 'model'"),
        ({"meta": {}}, "names model None"),
        (
            {"tensors": {"a": Tensor(dtype="float32", shape=(2, 3), file="model.safetensors")}},
            "tensor b: None expected",
        ),
    ],
)
def test_a_set_that_is_not_what_it_says_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(BadWeights, match=words):
        weight_set("k", manifest(tmp_path, **changes), tmp_path)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(BadWeights, match="no safetensors file"):
        sets.read_shapes(file)


def test_a_model_without_an_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Unsupported, match="names no architectures"):
        sets.assemble(tmp_path, tmp_path, tmp_path / "into")


def test_full_weights_start_no_adapter_slots_and_a_cpu_gets_its_flags() -> None:
    flags = argv(
        Settings(python=PYTHON, arguments=["--seed", "1"]), Path("/m"), 1, "float32", cpu=True
    )
    assert "--enable-lora" not in flags
    assert "--enforce-eager" in flags
    assert flags[-2:] == ["--seed", "1"]
    assert flags[:3] == [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    # What is sampled is what the run says, and its log-probabilities are of that.
    wanted = {
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--scheduling-policy": "priority",  # else a request that says how urgent it is is an error
    }
    assert {flag: flags[flags.index(flag) + 1] for flag in wanted} == wanted
    # Else a CPU build would want nearly all of the machine's memory.
    assert int(flags[flags.index("--kv-cache-memory-bytes") + 1]) < 2**30
    assert "--enforce-eager" not in argv(Settings(python=PYTHON), Path("/m"), 1, "x", cpu=False)


def test_adapters_have_as_many_slots_and_twice_as_many_places_in_host_memory() -> None:
    flags = argv(
        Settings(python=PYTHON, adapters=3, lora_rank=16), Path("/m"), 1, "float32", cpu=False
    )
    wanted = {"--max-loras": "3", "--max-cpu-loras": "6", "--max-lora-rank": "16"}
    assert {flag: flags[flags.index(flag) + 1] for flag in wanted} == wanted


def test_kept_sets_come_back_only_from_a_server_that_is_started_for_them() -> None:
    filtering = argv(Settings(python=PYTHON, sampling_masks=True), Path("/m"), 1, "x", cpu=False)
    assert "--return-sampling-mask" in filtering
    assert "--return-sampling-mask" not in argv(
        Settings(python=PYTHON), Path("/m"), 1, "x", cpu=False
    )


def test_a_server_takes_images_only_if_it_is_started_for_them() -> None:
    sees = Settings(python=PYTHON, images=3)
    flags = argv(sees, Path("/m"), 1, "x", cpu=False)
    assert flags[flags.index("--limit-mm-per-prompt") + 1] == '{"image": 3}'
    assert "--limit-mm-per-prompt" not in argv(
        Settings(python=PYTHON), Path("/m"), 1, "x", cpu=False
    )
    assert IMAGES in of_vllm(adapters=False, kept_sets=False, images=True)
    assert IMAGES not in of_vllm(adapters=False, kept_sets=False)


@pytest.mark.parametrize(("rank", "flag"), [(1, "1"), (4, "8"), (200, "256"), (512, "512")])
def test_a_rank_that_vllm_does_not_name_is_served_under_the_next_one(rank: int, flag: str) -> None:
    settings = Settings(python=PYTHON, adapters=1, lora_rank=rank)
    flags = argv(settings, Path("/m"), 1, "float32", cpu=False)
    assert flags[flags.index("--max-lora-rank") + 1] == flag


def test_a_rank_beyond_vllms_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than the 512"):
        argv(Settings(python=PYTHON, adapters=1, lora_rank=513), Path("/m"), 1, "x", cpu=False)


@pytest.mark.parametrize("value", [-9999.0, None])
def test_what_vllm_says_instead_of_nan_is_no_log_probability(value: float | None) -> None:
    content = [{"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": value}]
    with pytest.raises(PolicyFailed, match="at token 1"):
        front._ensure_finite("r@1", {"logprobs": {"content": content}})
    front._ensure_finite("r@1", {"logprobs": {"content": content[:1]}})


def test_rollbooks_own_path_does_not_reach_the_other_environment() -> None:
    outside = {"PYTHONPATH": "/rollbook", "PATH": "/bin", "TORCH_COMPILE_DISABLE": "0"}
    sockets = Path("/tmp/s")
    found = environment(Settings(python=PYTHON, threads=2), outside, sockets, cpu=True)
    assert "PYTHONPATH" not in found
    assert (found["PATH"], found["OMP_NUM_THREADS"]) == ("/bin", "2")
    assert found["TORCH_COMPILE_DISABLE"] == "1"
    on_a_gpu = environment(Settings(python=PYTHON), outside, sockets, cpu=False)
    assert on_a_gpu["TORCH_COMPILE_DISABLE"] == "0"


def test_a_runs_engine_section_decides_how_its_engine_starts() -> None:
    common = ["--max-resident", "4", "--max-batch", "64", "--max-waiting", "1024"]
    assert engine_options(configuration()) == common
    vllm = configuration(
        engine={"kind": "vllm", "arguments": ["--seed", "1"]}, model={"lora": {"rank": 4}}
    )
    options = engine_options(vllm)
    assert options[6:10] == ["--kind", "vllm", "--max-context", "64"]
    assert options[10:] == ["--lora-rank", "4", "--argument=--seed", "--argument=1"]
    sees = configuration(engine={"kind": "vllm"}, budget={"max_images": 2})
    assert engine_options(sees)[-2:] == ["--images", "2"]


@pytest.mark.parametrize(
    ("layer", "beside"),
    [
        ("model.layers.0.self_attn.q_proj", False),
        ("model.text_model.layers.1.mlp.up_proj", False),
        ("transformer.h.0.attn.c_attn", False),
        ("model.vision_model.encoder.layers.0.self_attn.q_proj", True),
        ("visual.blocks.0.attn.qkv", True),
        ("model.connector.modality_projection.proj", True),
        ("multi_modal_projector.linear_1", True),
        ("audio_tower.layers.0.fc1", True),
    ],
)
def test_layers_that_read_images_are_told_from_the_text_models(layer: str, beside: bool) -> None:
    text = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    name = f"base_model.model.{layer}.lora_A.weight"
    found = sets.beside_text({text: ("float32", (8, 4)), name: ("float32", (8, 4))})
    assert found == (name if beside else None)
