"""Which architectures the engine serves: decided by comparing it with plain forwards, not by a list."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from engine.refusals import Unsupported
from engine.selfcheck import check_cached_generation
from engine.weights import build
from tests.integration.engine.lab import Weights

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config(kind: str, **changes: Any) -> PretrainedConfig:
    made = getattr(transformers, kind + "Config")(**(SMALL | changes))
    assert isinstance(made, PretrainedConfig)
    return made


@pytest.mark.parametrize(
    "config",
    [
        config("Llama"),
        config("Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
        config("Gemma3Text", num_hidden_layers=6, head_dim=8, sliding_window=6),
        config("Mixtral", num_local_experts=4),
        config("GptOss", head_dim=8, num_local_experts=4, sliding_window=6),  # eager attention
        config("OPT", ffn_dim=64, word_embed_proj_dim=32),
        config(
            "DeepseekV3",  # keys and values of different size
            num_key_value_heads=4,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
    ],
    ids=lambda c: c.model_type,
)
def test_served_exactly(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    weights = Weights.random(config, 1)
    config.save_pretrained(tmp_path)
    policy = build("r@1", weights.sha256, tmp_path, weights.tensors)
    check_cached_generation(policy)
    ids = [(3 * k + 1) % 64 for k in range(40)]
    assert (policy.score(ids) - weights.of(ids[:1], tuple(ids[1:]))).abs().max() < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        config("Bloom", n_layer=2, n_head=4),  # position biases come from a 2-D mask
        config("Mamba", state_size=4),
        config("Llama4Text", head_dim=8, num_local_experts=2, intermediate_size_mlp=64),
    ],
    ids=lambda c: c.model_type,
)
def test_refused_before_it_serves_anything(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    weights = Weights.random(config, 1)
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="serve it with vLLM"):
        check_cached_generation(build("r@1", weights.sha256, tmp_path, weights.tensors))
