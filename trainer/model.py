"""The policy network: built from a model folder, scored over packed rows.

Legend of shapes: R rows, W columns (width), N sampled tokens of a micro-batch, D hidden size,
V vocabulary.

Notable choices:
- Packed chains are told apart by `position_ids` that restart at 0, with `attention_mask=None` and
  `use_cache=False`. Any other call is silently wrong by nats for some architecture or attention
  kernel, so `check_packing` compares packed against unpacked scores at start-up and refuses.
- The head runs on sampled positions only, in chunks, and under gradient checkpointing when there is
  more than one: the [R, W, V] logits never exist.
- Dropout is off everywhere: the proximal and the current policy are the same function of weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from domain.config import RunConfig
from domain.errors import ConfigError
from domain.ids import fold

_CHUNK_LOGITS = 2**24
"""Logits alive at once in the head: 64 MiB in float32."""
_PACKING_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Nats. What goes wrong goes wrong by whole nats; bfloat16 alone differs by hundredths."""


@dataclass(frozen=True)
class Micro:
    """Rows that pass through the network together, on its device. Legend: module docstring."""

    ids_RW: Tensor
    positions_RW: Tensor
    sampled_RW: Tensor
    """True on sampled ids: the columns that are scored."""
    support_ids_RC: Tensor | None = None
    """Ids kept by filtered sampling, -1 padded; None where nothing was filtered."""
    support_columns_RC: Tensor | None = None
    """Column of the sampled id that each kept id belongs to, -1 padded."""


@dataclass(frozen=True)
class Scores:
    """Per column, on the id it scores; 0 where nothing was sampled."""

    logprobs_RW: Tensor
    """Under the distribution that was sampled from: temperature and recorded support."""
    full_RW: Tensor
    """Over the whole vocabulary at the same temperature; the same tensor when nothing filtered."""
    entropy_RW: Tensor
    """Of the whole vocabulary's distribution, nats."""


class Policy:
    """A causal language model and its scoring."""

    def __init__(self, network: Any, device: torch.device, *, save_memory: bool) -> None:
        self.network = network.to(device)
        self.device = device
        self.vocabulary = int(network.config.get_text_config().vocab_size)
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
        network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            described, attn_implementation="sdpa", dtype=getattr(torch, config.model.dtype)
        )
        return cls(network, device, save_memory=config.model.tiny is None)

    @classmethod
    def pretrained(cls, folder: Path, config: RunConfig, device: torch.device) -> "Policy":
        """The folder's network with the folder's weights."""
        network = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_described(folder),
            attn_implementation="sdpa",
            dtype=getattr(torch, config.model.dtype),
            local_files_only=True,
        )
        return cls(network, device, save_memory=True)

    def parameters(self) -> dict[str, Tensor]:
        """Trainable parameters by name; a tied tensor stands once, under its first name."""
        return {n: p for n, p in self.network.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Every tensor a version consists of: parameters and persistent buffers, each once."""
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

    def score(self, micro: Micro, temperature: float) -> Scores:
        """Log-probabilities and entropies of the sampled ids of packed rows."""
        hidden_RWD = self.network.base_model(
            input_ids=micro.ids_RW,
            position_ids=micro.positions_RW,
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state
        row_N, column_N = micro.sampled_RW.nonzero(as_tuple=True)
        hidden_ND = hidden_RWD[row_N, column_N - 1]  # column t-1 predicts the id in column t
        target_N = micro.ids_RW[row_N, column_N]
        support = _support(micro, row_N, column_N)
        picked_N, full_N, entropy_N = self._head(hidden_ND, target_N, support, temperature)

        def spread(values_N: Tensor) -> Tensor:
            flat = values_N.new_zeros(micro.ids_RW.numel())
            at = row_N * micro.ids_RW.shape[1] + column_N
            return flat.index_put((at,), values_N).view(micro.ids_RW.shape)

        full_RW = spread(full_N)
        logprobs_RW = full_RW if support is None else spread(picked_N)
        return Scores(logprobs_RW, full_RW, spread(entropy_N))

    def _head(
        self, hidden_ND: Tensor, target_N: Tensor, support: "_Support | None", temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output layer and log-softmax, chunk by chunk."""
        head = self.network.get_output_embeddings()
        size = max(1, _CHUNK_LOGITS // self.vocabulary)
        count = hidden_ND.shape[0]

        def chunk(hidden: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
            logits = head(hidden).float() / temperature
            total = torch.logsumexp(logits, dim=-1)
            target = target_N[start : start + size]
            chosen = logits.gather(-1, target[:, None]).squeeze(-1)
            full = chosen - total
            entropy = total - (torch.softmax(logits, dim=-1) * logits).sum(-1)
            if support is None:
                return full, full, entropy
            kept_total, filtered = support.total(logits, start)
            return torch.where(filtered, chosen - kept_total, full), full, entropy

        if count <= size:
            return chunk(hidden_ND, 0)
        parts = []
        for start in range(0, count, size):
            piece = hidden_ND[start : start + size]
            parts.append(
                checkpoint(chunk, piece, start, use_reentrant=False)
                if torch.is_grad_enabled()
                else chunk(piece, start)
            )
        picked, full, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
        return picked, full, entropy

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
        if (pad := self.network.config.get_text_config().pad_token_id) is not None:
            chains = [c.where(c != pad, (pad + 1) % self.vocabulary) for c in chains]  # no warning
        ids = torch.cat([*chains, torch.zeros(2, dtype=torch.long)])[None].to(self.device)
        positions = torch.cat([torch.arange(len(c)) for c in chains] + [torch.zeros(2).long()])
        sampled = positions[None] > 0
        micro = Micro(ids, positions[None].to(self.device), sampled.to(self.device))
        packed = self.score(micro, 1.0).logprobs_RW[micro.sampled_RW]
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
            sampled = torch.ones_like(ids_1W, dtype=torch.bool)
            sampled[:, 0] = False
            positions = torch.arange(len(ids), device=self.device)[None]
            scores = self.score(Micro(ids_1W, positions, sampled), 1.0)
            found.append([float(x) for x in scores.full_RW[0, 1:]])
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


@dataclass(frozen=True)
class _Support:
    """Kept ids of filtered sampling, flattened: entry e belongs to sampled token owner_E[e]."""

    owner_E: Tensor
    id_E: Tensor
    filtered_N: Tensor

    def total(self, logits_CV: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Log of the kept mass for the chunk of tokens from `start`, and who was filtered."""
        size = logits_CV.shape[0]
        here = (self.owner_E >= start) & (self.owner_E < start + size)
        owner, ids = self.owner_E[here] - start, self.id_E[here]
        kept = logits_CV[owner, ids]
        filtered = self.filtered_N[start : start + size]
        peak = torch.full_like(logits_CV[:, 0], -torch.inf).detach()
        peak = peak.scatter_reduce(0, owner, kept.detach(), "amax").where(filtered, 0.0)
        mass = torch.zeros_like(peak).index_add(0, owner, torch.exp(kept - peak[owner]))
        return torch.where(filtered, mass, 1.0).log() + peak, filtered


def _support(micro: Micro, row_N: Tensor, column_N: Tensor) -> _Support | None:
    if micro.support_ids_RC is None or micro.support_columns_RC is None:
        return None
    valid = micro.support_ids_RC >= 0
    if not bool(valid.any()):
        return None
    number_RW = torch.full_like(micro.ids_RW, -1)
    number_RW[row_N, column_N] = torch.arange(row_N.shape[0], device=row_N.device)
    row_E, entry_E = valid.nonzero(as_tuple=True)
    owner_E = number_RW[row_E, micro.support_columns_RC[row_E, entry_E]]
    known = owner_E >= 0
    owner_E, id_E = owner_E[known], micro.support_ids_RC[row_E, entry_E][known]
    filtered_N = torch.zeros_like(row_N, dtype=torch.bool)
    filtered_N[owner_E] = True
    return _Support(owner_E, id_E, filtered_N)


def _described(folder: Path) -> Any:
    described = AutoConfig.from_pretrained(folder, local_files_only=True)
    for name in list(vars(described)):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(described, name), float):
            setattr(described, name, 0.0)
    return described


def longest_context(folder: Path) -> int | None:
    """Positions the architecture was made for, from config.json; None when it names no bound."""
    described = json.loads((folder / "config.json").read_text())
    described = described.get("text_config") or described
    bound = described.get("max_position_embeddings") or described.get("n_positions")
    return None if bound is None else int(bound)
