"""The policy network: built from a model folder, scored over packed rows.

Legend of shapes: R rows, W columns (width), D hidden size, V vocabulary.

Notable choices:
- Packed chains are told apart by `position_ids` that restart at 0, with `attention_mask=None` and
  `use_cache=False`. Any other call is silently wrong by nats for some architecture or attention
  kernel, so `check_packing` compares packed against unpacked scores at start-up and refuses.
- The head runs on sampled positions only, in chunks: the [R, W, V] logits never exist.
- Dropout is off everywhere: the proximal and the current policy are the same function of weights.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from domain.config import Lora, RunConfig
from domain.errors import ConfigError
from domain.ids import fold
from trainer import lora
from trainer.logprobs import Scores, score

_CHUNK_LOGITS = 2**24
"""Logits alive at once in the head: 64 MiB in float32."""
_PACKING_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Nats. What goes wrong goes wrong by whole nats; bfloat16 alone differs by hundredths."""


class Policy:
    """A causal language model and its scoring."""

    def __init__(self, network: Any, device: torch.device, *, save_memory: bool) -> None:
        self.network = network.to(device)
        self.device = device
        self.vocabulary = int(network.config.get_text_config().vocab_size)
        self.lora: Lora | None = None
        if save_memory:
            network.gradient_checkpointing_enable({"use_reentrant": False})
            network.train()
        else:
            network.eval()

    @classmethod
    def build(cls, folder: Path, config: RunConfig, device: torch.device) -> "Policy":
        """A network of the folder's architecture with weights drawn from the run's seed."""
        described = _described(folder)
        torch.manual_seed(fold("weights", config.seed))
        network = AutoModelForCausalLM.from_config(
            described, attn_implementation="sdpa", dtype=getattr(torch, config.model.dtype)
        )
        return cls(network, device, save_memory=config.model.tiny is None)

    @classmethod
    def pretrained(cls, folder: Path, config: RunConfig, device: torch.device) -> "Policy":
        """The folder's network with the folder's weights; safetensors alone, never a pickle."""
        network = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_described(folder),
            attn_implementation="sdpa",
            dtype=getattr(torch, config.model.dtype),
            local_files_only=True,
            use_safetensors=True,
        )
        return cls(network, device, save_memory=True)

    def adapt(self, config: RunConfig) -> None:
        """From here on the weights are an adapter's, if the run trains one; the rest is frozen.

        Raises:
            ConfigError: the adapter does not fit the model, or peft is not installed.
        """
        self.lora = config.model.lora
        if self.lora is not None:
            lora.adapt(self.network, self.lora, config.seed)

    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters by name; a tied tensor stands once, under its first name."""
        return {n: p for n, p in self.network.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Every tensor a version consists of: parameters and persistent buffers, each once.

        Of an adapted network: the adapter's factors.
        """
        if self.lora is not None:
            return lora.tensors(self.network)
        tensors = {n: p.detach() for n, p in self.network.named_parameters()}
        known = {t.data_ptr() for t in tensors.values()}
        for name, tensor in self.network.state_dict().items():
            if name not in tensors and tensor.data_ptr() not in known:
                tensors[name] = tensor
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the weights of another moment into this network.

        Raises:
            ValueError: names or shapes are not this network's.
        """
        mine = self.weights()
        if mine.keys() != tensors.keys():
            odd = sorted(mine.keys() ^ tensors.keys())
            raise ValueError(f"weights do not belong to this model: {odd[:5]} differ")
        for name, tensor in tensors.items():
            if mine[name].shape != tensor.shape or mine[name].dtype != tensor.dtype:
                raise ValueError(
                    f"weight {name} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{mine[name].dtype} {list(mine[name].shape)}"
                )
            mine[name].copy_(tensor)

    def score(
        self,
        ids_RW: Tensor,
        positions_RW: Tensor,
        scored_RW: Tensor,
        *,
        temperature: float = 1.0,
        support_ids: Tensor | None = None,
        support_columns: Tensor | None = None,
        entropy: bool = False,
    ) -> Scores:
        """Log-probabilities of the ids under `scored_RW` in packed rows (`trainer.logprobs.score`).

        Args:
            ids_RW: packed ids, on this policy's device, as all tensors here.
            positions_RW: restart at 0 in each chain, and at each padding column.
            scored_RW: which ids to score.
            temperature: of the sampler.
            support_ids: kept ids of filtered sampling, `[R, capacity]`.
            support_columns: columns of the sampled ids they belong to.
            entropy: whether to compute it too.
        """
        hidden_RWD = self.network.base_model(
            input_ids=ids_RW, position_ids=positions_RW, attention_mask=None, use_cache=False
        ).last_hidden_state
        return score(
            hidden_RWD,
            self.network.get_output_embeddings(),
            ids_RW,
            mask=scored_RW,
            temperature=temperature,
            support_ids=support_ids,
            support_columns=support_columns,
            entropy=entropy,
            chunk=max(1, _CHUNK_LOGITS // self.vocabulary),
        )

    @torch.no_grad()
    def check_packing(self) -> float:
        """Compare packed scores with those of each chain alone, through the whole network.

        Returns:
            the largest difference, nats.

        Raises:
            ConfigError: it exceeds the tolerance, so this architecture cannot be packed.
        """
        generator = torch.Generator().manual_seed(7)
        chains = [torch.randint(self.vocabulary, (n,), generator=generator) for n in (6, 1, 9)]
        ids = torch.cat([*chains, torch.zeros(2, dtype=torch.long)])[None].to(self.device)
        positions = torch.cat([torch.arange(len(c)) for c in chains] + [torch.zeros(2).long()])
        positions = positions[None].to(self.device)
        scored = positions > 0
        packed = self.score(ids, positions, scored).log_probs[scored]
        alone = []
        for chain in chains:
            ids_1W = chain[None].to(self.device)
            logits = self.network(ids_1W, use_cache=False).logits[0, :-1].float()
            alone.append(logits.log_softmax(-1).gather(-1, ids_1W[0, 1:, None]).squeeze(-1))
        worst = float((packed - torch.cat(alone)).abs().max())
        tolerance = _PACKING_TOLERANCE[self.network.dtype]
        if not worst <= tolerance:
            raise ConfigError(
                f"model {self.network.config.model_type!r} scores packed rows {worst:.3g} nats "
                f"away from unpacked ones (tolerance {tolerance:g}): chains would see each other. "
                "This architecture cannot be trained here"
            )
        return worst

    @torch.no_grad()
    def probe(self, token_ids: list[list[int]]) -> list[list[float]]:
        """Log-probability of each id after the first of each sequence, at temperature 1."""
        found = []
        for ids in token_ids:
            ids_1W = torch.tensor([ids], device=self.device)
            positions = torch.arange(len(ids), device=self.device)[None]
            scores = self.score(ids_1W, positions, positions > 0)
            found.append(scores.full[0, 1:].tolist())
        return found


def weights_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """sha256 over names, dtypes, shapes and bytes in name order: equal iff the weights are."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        kind = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{kind}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def probe_ids(vocabulary: int, longest: int) -> list[list[int]]:
    """Fixed sequences that every process can score to see whether it holds the same weights."""
    length = max(2, min(16, longest))
    return [
        [fold("probe", row, column) % vocabulary for column in range(length)] for row in range(4)
    ]


def _described(folder: Path) -> Any:
    described = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name in list(vars(described)):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(described, name), float):
            setattr(described, name, 0.0)
    # Rows are never padded with it, and an embedding's padding_idx would get no gradient, although
    # the pad token is often the end-of-text token that the policy must learn to sample.
    described.get_text_config().pad_token_id = None
    return described
