"""The network: packed scoring, supports, digests, and the model folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from domain.config import RunConfig, TinyModel
from domain.errors import ConfigError
from trainer import folders, model
from trainer.model import Policy


def config(**sections: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "name": "t",
            "steps": 4,
            "tasks": {"source": "a:b", "dataset": "a:c"},
            "model": {"tiny": {}},
            "trainer": {"width": 32},
        }
        | sections
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = folders.source_folder(config(), tmp_path_factory.mktemp("tiny"))
    return Policy.build(folder, config(), torch.device("cpu"))


Row = list[tuple[list[int], int]]


def packed(*rows: Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Micro-batch of rows of chains; each chain is (ids, number of prompt ids)."""
    width = max(sum(len(ids) for ids, _ in row) for row in rows) + 2
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions, sampled = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for r, row in enumerate(rows):
        at = 0
        for chain, prompt in row:
            n = len(chain)
            ids[r, at : at + n] = torch.tensor(chain)
            positions[r, at : at + n] = torch.arange(n)
            sampled[r, at + prompt : at + n] = True
            at += n
    return ids, positions, sampled


def alone(policy: Policy, chain: list[int], prompt: int, temperature: float = 1.0) -> list[float]:
    logits = policy.network(torch.tensor([chain]), use_cache=False).logits[0] / temperature
    scores = logits.detach().log_softmax(-1)
    return [float(scores[t - 1, chain[t]]) for t in range(prompt, len(chain))]


def test_packed_scores_equal_those_of_each_chain_alone(tiny: Policy) -> None:
    chains = [([1, 2, 3, 10, 3, 2, 1, 11], 4), ([4, 10, 4], 2), ([5], 1), ([7, 10, 7, 11], 2)]
    ids, positions, sampled = packed(chains[:3], chains[3:])
    with torch.no_grad():
        scores = tiny.score(ids, positions, sampled, temperature=0.7)
    expected = [x for ids, prompt in chains for x in alone(tiny, ids, prompt, 0.7)]
    assert scores.log_probs[sampled].tolist() == pytest.approx(expected, abs=1e-5)
    assert bool((scores.log_probs[~sampled] == 0).all())


def test_the_head_in_chunks_gives_the_same_scores_and_gradients(
    tiny: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = packed([([1, 2, 3, 10, 3, 2, 1, 11], 4), ([4, 10, 4, 11], 2)])

    def gradients() -> dict[str, torch.Tensor]:
        tiny.network.zero_grad()
        tiny.score(*rows).log_probs.sum().backward()  # type: ignore[no-untyped-call]
        return {n: p.grad.clone() for n, p in tiny.parameters().items() if p.grad is not None}

    whole, scores = gradients(), tiny.score(*rows).log_probs
    monkeypatch.setattr(model, "_CHUNK_LOGITS", 2 * tiny.vocabulary)
    assert torch.allclose(tiny.score(*rows).log_probs, scores, atol=1e-6)
    for name, gradient in gradients().items():
        assert torch.allclose(gradient, whole[name], atol=1e-5), name


def test_packing_is_checked_at_start_up(tiny: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny.check_packing() < 1e-5
    right = tiny.network.base_model.forward

    def forgetful(*args: Any, position_ids: object = None, **kwargs: Any) -> Any:
        return right(*args, **kwargs)

    monkeypatch.setattr(tiny.network.base_model, "forward", forgetful)
    with pytest.raises(ConfigError, match="chains would see each other"):
        tiny.check_packing()


def test_a_llama_folder_with_gradient_checkpointing_packs_right(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 40,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_dropout": 0.5,
    }
    network = AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads))
    network.save_pretrained(tmp_path)
    Tokenizer.from_str(_any_tokenizer()).save(str(tmp_path / "tokenizer.json"))
    policy = Policy.pretrained(tmp_path, config(model={"path": str(tmp_path)}), torch.device("cpu"))
    assert policy.network.is_gradient_checkpointing
    assert policy.check_packing() < 1e-5
    assert model.weights_digest(policy.weights()) == model.weights_digest(network.state_dict())
    policy.score(*packed([([1, 2, 3, 4], 1)])).log_probs.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in policy.parameters().values())


def _any_tokenizer() -> str:
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        }
    )


def test_the_digest_sees_every_bit_name_and_shape() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    changed = {"a": torch.zeros(2, 3), "b": base["b"]}
    changed["a"][1, 2] = -0.0
    others = [
        changed,
        {"a": torch.zeros(3, 2), "b": base["b"]},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"].double(), "b": base["b"]},
    ]
    digests = {model.weights_digest(t) for t in [base, *others]}
    assert len(digests) == 5
    assert model.weights_digest(dict(reversed(base.items()))) == model.weights_digest(base)


def test_weights_come_back_and_foreign_ones_are_refused(tiny: Policy) -> None:
    before = {n: t.clone() for n, t in tiny.weights().items()}
    with torch.no_grad():
        next(iter(tiny.parameters().values())).add_(1.0)
    tiny.load(before)
    assert model.weights_digest(tiny.weights()) == model.weights_digest(before)
    with pytest.raises(ValueError, match="do not belong to this model"):
        tiny.load({"other": torch.zeros(1)})


def test_the_tiny_tokenizer_knows_each_character(tmp_path: Path) -> None:
    folders.materialise_tiny(TinyModel(), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("123=").ids == [1, 2, 3, 10]
    assert tokenizer.decode([3, 2, 1, 11]) == "321"
    folders.materialise_tiny(TinyModel(alphabet="a\n", dim=4, heads=2), tmp_path / "lines")
    lines = Tokenizer.from_file(str(tmp_path / "lines" / "tokenizer.json"))
    assert lines.encode("a\n\na").ids == [0, 1, 1, 0]
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 11


def test_the_folder_in_the_store_holds_no_weights_and_states_the_dtype(tmp_path: Path) -> None:
    folders.materialise_tiny(TinyModel(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    files = folders.description_files(tmp_path, "bfloat16")
    assert "model.safetensors" not in files
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    assert folders.files_digest(files) != folders.files_digest(files | {"config.json": b"{}"})


def test_a_folder_without_a_tokenizer_is_refused_with_the_file_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        folders.source_folder(config(model={"path": str(tmp_path)}), tmp_path)
