"""COMPUTE: the groups of a plan in, moved weights and their figures out.

Reads from top to bottom as one step: pack, score the proximal policy, then per mini-batch sum the
gradients of its micro-batches, clip, move. It touches no ledger and no store, and depends on
nothing but the rollouts, the weights, the optimizer and the configuration: two executions of the
same plan are bit-equal.

Of several ranks each computes its own rows. What decides about the step (is there a gradient, how
much mass does the loss have) is decided over all of them, and the gradients are added up before
they are clipped, so that the step is that of one process with everybody's rows. The readers of one
share hold the same rows, and each computes its part of their micro-batches. Where the weights
are sharded too, each rank makes as many passes through the network as the one with the most rows.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from domain import failpoints
from domain.config import RunConfig
from domain.errors import LedgerError
from trainer import metrics as figures
from trainer.batch import Batch
from trainer.logprobs import Scores
from trainer.members import Pool
from trainer.mismatch import log_ratio, of_tokens
from trainer.model import Policy
from trainer.objective import KL, Entropy, loss_mass, policy_loss, pool_metrics, usable_gradient
from trainer.optimizer import Optimizer, learning_rate
from trainer.packing import Packed, blank, rows_digest
from trainer.ranks import Ranks

Cause = Literal["empty", "no_usable_gradient", "nothing_left", "zero_gradient", "not_finite"]
"""Why a step made no update: no groups; no token that takes loss with an advantage, a KL or an
entropy term; every chain rejected by the sequence mask; a gradient that is exactly zero; a gradient
with NaN or infinity, which must not reach the moments."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step did."""

    updated: bool
    cause: Cause | None = None
    optimizer_updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Micro:
    """Rows that pass through the network together, cut to the columns in use."""

    packed: Packed
    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def support(self) -> dict[str, Tensor]:
        return {n: t for n, t in self.tensors.items() if n.startswith("support_")}


@dataclass
class Learner:
    """The weights, their optimizer and what a step needs besides."""

    config: RunConfig
    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None
    """The initial weights, frozen; needed when there is a KL term."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that take this step together."""

    def step(self, batch: Batch, version: int) -> Outcome:
        """Train the groups of one plan, in plan order.

        Args:
            batch: the planned groups of this rank.
            version: policy version before the step.

        Raises:
            LedgerError: a rollout that cannot be packed, scored or be this old; it is named.
        """
        ranks = self.ranks
        if not ranks.any("groups", bool(batch.groups)):
            return Outcome(updated=False, cause="empty")
        started = time.monotonic()
        pool = self._pool(batch)
        packed = ranks.together("pack", lambda: batch.pack(self.config, version, pool=pool))
        self._ensure_same_rows(packed)
        told = self._figures(batch, packed, version)
        coefficients = (self.config.trainer.kl_coefficient, self.config.trainer.entropy_coefficient)
        if not ranks.any("usable", usable_gradient(packed, *coefficients)):
            return Outcome(updated=False, cause="no_usable_gradient", metrics=told)
        outcome = self._descend(packed, version)
        seconds = time.monotonic() - started
        told |= outcome.metrics | {
            "time/compute_s": seconds,
            "tokens_per_second": told["tokens/packed"] / seconds,
        }
        return Outcome(
            updated=outcome.updated,
            cause=outcome.cause,
            optimizer_updates=outcome.optimizer_updates,
            metrics=told,
        )

    def _pool(self, batch: Batch) -> Pool | None:
        """What all ranks have to compare with, where the estimator compares over the whole step."""
        if self.config.trainer.estimator != "batch" or self.ranks.size == 1:
            return None
        parts = self.ranks.gather("judge", lambda: asdict(batch.pool(self.config)))
        return Pool.together([Pool(**part) for part in self.ranks.of_shares(parts)])

    def _ensure_same_rows(self, packed: Packed) -> None:
        """Compare what the readers of a share have packed, before any of them computes.

        Raises:
            LedgerError: they differ; the digests are named, and nothing was trained.
        """
        readers = self.ranks.readers
        if readers == 1:
            return
        digests = self.ranks.exchange("rows", rows_digest(packed).hex())
        for share in range(self.ranks.shares):
            of_share = digests[share * readers : (share + 1) * readers]
            if len(set(of_share)) > 1:
                raise LedgerError(
                    f"the readers of share {share} have packed other rows than each other: "
                    f"{', '.join(digest[:16] for digest in of_share)}; see that all of them run the "
                    "same code and read the same ledger, then resume the run"
                )

    def _figures(self, batch: Batch, packed: Packed, version: int) -> dict[str, float]:
        mine = batch.figures(self.config, packed, version)
        if self.ranks.size == 1:
            return mine
        weights = batch.weights(self.config, packed)
        parts = self.ranks.exchange("figures", (mine, weights))
        return figures.pool(self.ranks.of_shares(parts))

    def _descend(self, packed: Packed, version: int) -> Outcome:
        """The step's optimizer updates, over disjoint parts of its rows."""
        t = self.config.trainer
        used = int((packed["segment_ids"] > 0).any(axis=1).sum())  # full rows come first
        # Every rank makes as many updates as the one with the most rows.
        most = max(self.ranks.exchange("rows", used))
        parts = [
            self._micros(packed, range(k, used, t.minibatches), range(k, most, t.minibatches))
            for k in range(min(t.minibatches, most))
        ]
        proximal = [[self._score_frozen(self.policy, m, entropy=True) for m in p] for p in parts]
        frozen = [
            [self._score_frozen(self.reference, m) for m in p] if self.reference else []
            for p in parts
        ]
        failpoints.reach("mid_step")
        rate = learning_rate(t, version, self.config.steps)
        told: list[dict[str, Tensor]] = []
        norms: list[float] = []
        causes: list[Cause] = []
        for part, before, reference in zip(parts, proximal, frozen, strict=True):
            cause = self._gradients(part, before, reference, told)
            if cause is None:
                norm = float(self.optimizer.gradient_norm())
                norms.append(norm)
                cause = "zero_gradient" if norm == 0.0 else None
                cause = cause if math.isfinite(norm) else "not_finite"
            if cause is None:
                self.optimizer.step(rate)
            else:
                causes.append(cause)
            self.optimizer.clear()
        updates = len(parts) - len(causes)
        if updates:
            failpoints.reach("optimizer")
        mine = [{name: float(value) for name, value in part.items()} for part in told]
        everyone = [part for of_rank in self.ranks.exchange("loss", mine) for part in of_rank]
        metrics = pool_metrics(everyone) if everyone else {}
        metrics |= self._mismatch(parts, proximal, version)
        metrics |= {
            "lr": rate,
            "grad_norm": max(norms, default=0.0),
            "optimizer_updates": float(updates),
            "skipped_minibatches": float(len(causes)),
        }
        if updates:
            return Outcome(updated=True, optimizer_updates=updates, metrics=metrics)
        return Outcome(updated=False, cause=causes[0], metrics=metrics)

    def _gradients(
        self,
        part: Sequence[_Micro],
        before: Sequence[Scores],
        reference: Sequence[Scores],
        told: list[dict[str, Tensor]],
    ) -> Cause | None:
        """Sum the gradients of a mini-batch; names the reason if it has none."""
        t = self.config.trainer
        usable = any(
            usable_gradient(m.packed, t.kl_coefficient, t.entropy_coefficient) for m in part
        )
        if not self.ranks.any("usable part", usable):
            return "no_usable_gradient"
        chains: dict[str, Any] = {"kind": t.loss, "aggregation": t.aggregation}
        # A rank without rows in this part adds a float zero: all ranks must decide on the same sum.
        own_mass = sum(
            (
                loss_mass(
                    proximal.log_probs,
                    m["behavior_logprobs"],
                    m["response_mask"],
                    weights=m["rollout_weights"],
                    segment_ids=m["segment_ids"],
                    sequence_mask=t.sequence_mask,
                    **chains,
                )
                for m, proximal in zip(part, before, strict=True)
            ),
            start=torch.zeros((), device=self.policy.device),
        )
        mass = self.ranks.total("mass", own_mass)
        if not float(mass):
            return "nothing_left"
        for i, (m, proximal) in enumerate(zip(part, before, strict=True)):
            current = self._score(self.policy, m, entropy=bool(t.entropy_coefficient))
            kl = entropy = None
            if reference:
                kl = KL(
                    reference=reference[i].full,
                    coefficient=t.kl_coefficient,
                    kind=t.kl,
                    current=current.full,
                )
            if current.entropy is not None:
                entropy = Entropy(values=current.entropy, coefficient=t.entropy_coefficient)
            loss, parts_told = policy_loss(
                current.log_probs,
                proximal.log_probs,
                m["behavior_logprobs"],
                m["advantages"],
                m["response_mask"],
                epsilon_low=t.epsilon_low,
                epsilon_high=t.epsilon_high,
                dual_clip=t.dual_clip,
                importance=t.importance,
                weights=m["rollout_weights"],
                segment_ids=m["segment_ids"],
                sequence_mask=t.sequence_mask,
                kl=kl,
                entropy=entropy,
                normaliser=mass,
                **chains,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            told.append(
                parts_told | {"loss": loss.detach() * mass / parts_told["mass"].clamp(1e-9)}
            )
        if not self.policy.sharded and self.ranks.size > 1:
            # Also a rank without a gradient takes part: the collectives never depend on the data.
            self.ranks.add_up(self.optimizer.gradients(every=True))
        return None

    def _mismatch(
        self,
        parts: Sequence[Sequence[_Micro]],
        proximal: Sequence[Sequence[Scores]],
        version: int,
    ) -> dict[str, float]:
        """Behaviour against the proximal policy, and its entropy, over the tokens of the step.

        `drift/…` are the tokens that the very weights now scored had sampled: there trainer and
        engine must agree.
        """
        drifts, entropies, same = [], [], []
        for part, before in zip(parts, proximal, strict=True):
            for m, scores in zip(part, before, strict=True):
                mask = m["response_mask"]
                drifts.append(log_ratio(scores.log_probs, m["behavior_logprobs"])[mask])
                same.append((m["versions"] == version)[mask])
                if scores.entropy is not None:
                    entropies.append(scores.entropy[mask])
        drift, on_policy = (
            self._of_all(drifts, torch.float32),
            self._of_all(same, torch.bool),
        )
        told = of_tokens(drift, on_policy, self.config.trainer.importance)
        if len(entropy := self._of_all(entropies, torch.float32)):
            told["entropy"] = float(entropy.mean())
        return told

    def _of_all(self, values: Sequence[Tensor], kind: torch.dtype) -> Tensor:
        """One value for each token of the step, over all micro-batches of all ranks."""
        mine = torch.cat(list(values)) if values else torch.zeros(0, dtype=kind)
        return self.ranks.concatenate(mine.to(self.policy.device))

    @torch.no_grad()
    def _score_frozen(self, policy: Policy, m: _Micro, *, entropy: bool = False) -> Scores:
        return self._score(policy, m, entropy=entropy)

    def _score(self, policy: Policy, m: _Micro, *, entropy: bool) -> Scores:
        return policy.score(
            m["input_ids"],
            m["positions"],
            m["response_mask"],
            temperature=self.config.sampling.temperature,
            entropy=entropy,
            **m.support(),
        )

    def _micros(self, packed: Packed, rows: range, most: range) -> list[_Micro]:
        """This reader's micro-batches of some rows; of sharded weights as many as any rank has."""
        size, ranks = self.config.trainer.rows, self.ranks
        mine = range(ranks.reader * size, len(rows), ranks.readers * size)
        micros = [self._micro(packed, rows[i : i + size]) for i in mine]
        if self.policy.sharded:
            missing = math.ceil(len(most) / size / ranks.readers) - len(micros)
            supports = packed.get("support_ids")
            nothing = blank(1, 1, None if supports is None else supports.shape[1])
            micros += [self._micro(nothing, range(1)) for _ in range(missing)]
        return micros

    def _micro(self, packed: Packed, rows: Sequence[int]) -> _Micro:
        """Those rows on the device, without the columns that none of them uses."""
        columns = max(1, int((packed["segment_ids"][rows] > 0).any(axis=0).sum()))
        cut = {
            name: array[rows] if name.startswith("support_") else array[rows][:, :columns]
            for name, array in packed.items()
        }
        tensors = {n: torch.from_numpy(a).to(self.policy.device) for n, a in cut.items()}
        return _Micro(cut, tensors)
