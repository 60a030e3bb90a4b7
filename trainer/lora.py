"""Low-rank adapters: what is trained, published and checkpointed instead of the model's own weights.

peft puts the adapter's layers into the network; from there on the policy's weights are those layers,
under the names that peft and vLLM give them in files. Version 0 is an adapter too, whose second
factor is zero: engines serve it like any other.
"""

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from domain.config import Lora
from domain.errors import ConfigError
from domain.ids import fold

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def adapt(network: nn.Module, lora: Lora, seed: int) -> None:
    """Put an adapter into the network, freeze all the rest. The first factor comes from the seed.

    Raises:
        ConfigError: peft is not installed, or no layer of the model has such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "model.lora needs the package peft: pip install 'rollbook[lora]'"
        ) from error
    described = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=_transposed(network),
    )
    torch.manual_seed(fold("adapter", seed))
    try:
        inject_adapter_in_model(described, network)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.targets = {list(lora.targets)} does not fit the model: {error}"
        ) from error
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def tensors(network: nn.Module) -> dict[str, Tensor]:
    """The adapter's factors, as they stand in files."""
    return {
        _PREFIX + name.replace(".default.", "."): parameter.detach()
        for name, parameter in network.named_parameters()
        if ".lora_" in name
    }


def describe(network: nn.Module, lora: Lora) -> dict[str, Any]:
    """What an engine must know besides the factors."""
    layers = {
        name.partition(".lora_A.")[0].rpartition(".")[2]
        for name, _ in network.named_parameters()
        if ".lora_A." in name
    }
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": sorted(layers),
        "transposed": _transposed(network),
    }


def config_file(described: dict[str, Any]) -> bytes:
    """`adapter_config.json`, as peft and vLLM read it."""
    table = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": described["rank"],
        "lora_alpha": described["alpha"],
        "target_modules": described["targets"],
        "fan_in_fan_out": described["transposed"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
    return (json.dumps(table, indent=2, sort_keys=True) + "\n").encode()


def _transposed(network: nn.Module) -> bool:
    """Whether its layers keep their weights as inputs x outputs (GPT-2)."""
    return any(isinstance(module, Conv1D) for module in network.modules())
