"""The policy network: built from a model folder, scored over packed rows.

Legend of shapes: R rows, W columns (width), D hidden size, V vocabulary.

Notable choices:
- Packed chains are told apart by `position_ids` that restart at 0, with `attention_mask=None` and
  `use_cache=False`. Any other call is silently wrong by nats for some architecture or attention
  kernel, so `check_packing` compares packed against unpacked scores at start-up and refuses.
- The head runs on sampled positions only, in chunks: the [R, W, V] logits never exist.
- Whatever touches the weights runs inside `_Whole`, which gathers them if they are sharded.
- Dropout is off everywhere: the proximal and the current policy are the same function of weights.
"""

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from domain.config import Lora, RunConfig
from domain.errors import ConfigError
from domain.ids import fold
from trainer import lora, sharding
from trainer.logprobs import Scores, score
from trainer.sharding import WHOLE, Slice

_CHUNK_LOGITS = 2**24
"""Logits alive at once in the head: 64 MiB in float32."""
_PACKING_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Nats. What goes wrong goes wrong by whole nats; bfloat16 alone differs by hundredths."""


class _Whole(nn.Module):
    """The network as what is sharded: inside its forward, and nowhere else, the weights are whole."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, act: Callable[[Any], tuple[Tensor | None, ...]]) -> Any:
        """`act` on the network."""
        return act(self.network)


class Policy:
    """A causal language model and its scoring."""

    def __init__(self, network: Any, device: torch.device, *, save_memory: bool) -> None:
        self.network = network.to(device)
        self._whole = _Whole(network)
        self.device = device
        self.vocabulary = int(network.config.get_text_config().vocab_size)
        self.lora: Lora | None = None
        self.slice = WHOLE
        """What this process holds of every weight."""
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
        return cls(network, device, save_memory=_saves_memory(config))

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
        return cls(network, device, save_memory=_saves_memory(config))

    def adapt(self, config: RunConfig) -> None:
        """From here on the weights are an adapter's, if the run trains one; the rest is frozen.

        Raises:
            ConfigError: the adapter does not fit the model, or peft is not installed.
        """
        self.lora = config.model.lora
        if self.lora is not None:
            lora.adapt(self.network, self.lora, config.seed)

    def shard(self, device: torch.device, mine: Slice) -> None:
        """Keep this rank's slice of the weights, on that device. Every rank calls it at once.

        Raises:
            ConfigError: the model has weights that are no parameters, which cannot be divided.
        """
        parameters = {id(p) for p in self.network.parameters()}
        state = self.network.state_dict(keep_vars=True)
        if buffers := [name for name, tensor in state.items() if id(tensor) not in parameters]:
            raise ConfigError(
                f"model {self.network.config.model_type!r} has buffers in its weights "
                f"({', '.join(buffers[:3])}), which cannot be divided among ranks; set "
                'trainer.parallel = "ddp"'
            )
        sharding.shard(self._whole, device, mine.parts)
        self.device, self.slice = device, mine

    @property
    def sharded(self) -> bool:
        """Whether other ranks hold the rest of the weights: then to score is a collective."""
        return self.slice.parts > 1

    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters by name; a tied tensor stands once, under its first name."""
        return {n: p for n, p in self.network.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Every tensor a version consists of: parameters and persistent buffers, each once.

        Of an adapted network: the adapter's factors. Of a sharded one, each has its whole shape and
        this rank's slice of the values (`sharding.local`, `sharding.whole`).
        """
        if self.lora is not None:
            return lora.tensors(self.network)
        tensors = {n: p.detach() for n, p in self.network.named_parameters()}
        known = {id(p) for p in self.network.parameters()}
        for name, tensor in self.network.state_dict(keep_vars=True).items():
            if name not in tensors and id(tensor) not in known:
                tensors[name] = tensor
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the weights of another moment into this network.

        Args:
            tensors: whole, or of a sharded network this rank's slices.

        Raises:
            ValueError: names or shapes are not this network's.
        """
        mine = self.weights()
        if mine.keys() != tensors.keys():
            odd = sorted(mine.keys() ^ tensors.keys())
            raise ValueError(f"weights do not belong to this model: {odd[:5]} differ")
        for name, tensor in tensors.items():
            own = sharding.local(mine[name])
            if own.shape != tensor.shape or own.dtype != tensor.dtype:
                raise ValueError(
                    f"weight {name} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{own.dtype} {list(own.shape)}"
                )
            own.copy_(tensor)

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

        def act(network: Any) -> tuple[Tensor | None, ...]:
            hidden_RWD = network.base_model(
                input_ids=ids_RW, position_ids=positions_RW, attention_mask=None, use_cache=False
            ).last_hidden_state
            scores = score(
                hidden_RWD,
                network.get_output_embeddings(),
                ids_RW,
                mask=scored_RW,
                temperature=temperature,
                support_ids=support_ids,
                support_columns=support_columns,
                entropy=entropy,
                chunk=max(1, _CHUNK_LOGITS // self.vocabulary),
            )
            return scores.log_probs, scores.full, scores.entropy

        return Scores(*self._whole(act))

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
            (logits,) = self._whole(partial(_logits, ids_1W=ids_1W))
            logits = logits[0, :-1].float()
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


def _saves_memory(config: RunConfig) -> bool:
    """Whether layers are computed again in the backward pass."""
    chosen = config.trainer.activation_checkpointing
    return config.model.tiny is None if chosen is None else chosen


def _logits(network: Any, ids_1W: Tensor) -> tuple[Tensor]:
    return (network(ids_1W, use_cache=False).logits,)


def weights_digest(tensors: Mapping[str, Tensor]) -> bytes:
    """sha256 over names, dtypes, shapes and bytes in name order: equal iff the weights are.

    Sharded weights are gathered for it, one tensor at a time; every rank gets the digest.
    """
    digest = sha256()
    for name in sorted(tensors):
        tensor = sharding.whole(tensors[name]).cpu().contiguous()
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
