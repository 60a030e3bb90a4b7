"""Training an adapter: only its factors move, travel and stand in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from domain.config import RunConfig
from domain.errors import ConfigError
from domain.services import Services
from engine import objects
from engine.adapters import merge
from engine.refusals import BadWeights
from engine.vllm import sets
from engine.weights import Loader
from storage import manifests
from storage.objects import ObjectStore
from tests.rehearsal import configuration
from trainer import folders, lora, publishing
from trainer.model import Policy, weights_digest

CPU = torch.device("cpu")


def config(**adapter: Any) -> RunConfig:
    return configuration(model={"tiny": {"dim": 32}, "lora": {"rank": 4, "alpha": 8} | adapter})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    tiny = config().model.tiny
    assert tiny is not None
    folders.materialise_tiny(tiny, tmp_path)
    return tmp_path


def test_the_first_version_changes_nothing(folder: Path) -> None:
    policy = Policy.build(folder, config(), CPU)
    ids = [[1, 2, 3, 4, 5]]
    before = policy.probe(ids)
    policy.adapt(config())
    assert policy.probe(ids) == before
    assert policy.check_packing() < 1e-4
    names = policy.weights().keys()
    assert names
    assert all(n.startswith("base_model.model.transformer.") and ".lora_" in n for n in names)


def test_the_seed_decides_the_factors(folder: Path) -> None:
    digests = []
    for _ in range(2):
        policy = Policy.build(folder, config(), CPU)
        policy.adapt(config())
        digests.append(weights_digest(policy.weights()))
    assert digests[0] == digests[1]


def test_only_factors_take_gradients_and_load_puts_them_back(folder: Path) -> None:
    policy = Policy.build(folder, config(), CPU)
    policy.adapt(config())
    assert all(".lora_" in name for name in policy.parameters())
    saved = {name: t.clone() for name, t in policy.weights().items()}
    for parameter in policy.parameters().values():
        with torch.no_grad():
            parameter.add_(0.1)
    moved = weights_digest(policy.weights())
    policy.load(saved)
    assert weights_digest(policy.weights()) != moved
    assert weights_digest(policy.weights()) == weights_digest(saved)


def test_merged_weights_score_as_the_adapted_network_does(folder: Path) -> None:
    plain = Policy.build(folder, config(), CPU)
    base = {name: t.clone() for name, t in plain.weights().items()}
    adapted = Policy.build(folder, config(), CPU)
    adapted.adapt(config())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters().values():
            parameter.normal_(std=0.2)
    ids = [[1, 2, 3, 4, 5, 6, 7]]
    assert config().model.lora is not None
    described = lora.describe(adapted.network, config().model.lora)  # type: ignore[arg-type]
    plain.load(merge("r@1", base, adapted.weights(), described))
    gap = torch.tensor(plain.probe(ids)) - torch.tensor(adapted.probe(ids))
    assert float(gap.abs().max()) < 1e-4
    assert float((torch.tensor(plain.probe(ids))).abs().max()) > 0


def test_half_a_pair_of_factors_is_refused(folder: Path) -> None:
    policy = Policy.build(folder, config(), CPU)
    base = policy.weights()
    policy.adapt(config())
    factors = dict(policy.weights())
    gone = next(name for name in factors if name.endswith("lora_B.weight"))
    del factors[gone]
    with pytest.raises(BadWeights, match="no pair"):
        merge("r@1", base, factors, {"rank": 4, "alpha": 8, "transposed": True})


def test_unknown_layers_are_refused_by_name(folder: Path) -> None:
    policy = Policy.build(folder, config(), CPU)
    with pytest.raises(ConfigError, match="nonesuch"):
        policy.adapt(config(targets=["nonesuch"]))


def test_an_adapter_travels_through_the_store_to_either_engine(
    folder: Path, tmp_path: Path, s3_services: Services
) -> None:
    """As the trainer publishes it: the built-in engine merges it, the front of vLLM takes it as is."""
    store = ObjectStore(s3_services)
    store.prepare()
    files = folders.description_files(folder, "float32")
    model_sha = folders.files_digest(files)
    model = manifests.upload(
        store, f"models/{model_sha}", files, kind="model", sha256=model_sha
    ).manifest_key
    policy = Policy.build(folder, config(), CPU)
    probed = publishing.probe(policy, 32)
    base = publishing.upload(
        store, tmp_path, policy, "models/reference", model=model, probe=probed
    ).manifest_key
    policy.adapt(config())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.normal_(std=0.2)
    moved = publishing.probe(policy, 32)
    sha256 = weights_digest(policy.weights()).hex()
    stored = publishing.upload(
        store, tmp_path, policy, "weights/lora/1", model=model, probe=moved, base=base
    )
    assert stored.bytes < 50_000

    served = Loader(objects.ObjectSource(store, tmp_path / "builtin")).load(
        "lora@1", stored.manifest_key, sha256
    )
    gap = served.score(moved["token_ids"][0]) - torch.tensor(moved["logprobs"][0])
    assert float(gap.abs().max()) < 1e-4

    source = sets.ObjectSource(store, tmp_path / "front")
    found = source.fetch(stored.manifest_key, sha256)
    assert (found.base, found.model, found.probe) == (base, model, moved)
    assert found.adapter == {
        "rank": 4, "alpha": 8, "targets": ["c_attn", "c_fc", "c_proj"], "transposed": True,
    }  # fmt: skip
    assert (found.folder / lora.CONFIG).is_file()
    assert source.fetch(base, None).adapter is None
    with pytest.raises(BadWeights, match="was promised"):
        source.fetch(stored.manifest_key, "0" * 64)
