"""One of two trainer processes for `tests/unit/test_ranks.py`: `python tests/two_ranks.py FOLDER`.

torchrun's variables say which one. Rank 0 prints a JSON line for each case. With `breaks RANK` behind
the folder, that rank breaks in the middle of a step instead, and both tell of it; with `stuck`, rank 0
is in a call that nothing interrupts when rank 1 breaks.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from domain.config import RunConfig
from domain.errors import DataChanged, LedgerError, RollbookError, RunStopped
from domain.ids import fold
from domain.rollouts import Rollout, Segment, Status
from trainer import determinism, folders, sharding
from trainer.advantages import Estimator
from trainer.batch import Batch
from trainer.model import Policy, weights_digest
from trainer.note import RankLost
from trainer.objective import Aggregation, Kind
from trainer.optimizer import Optimizer
from trainer.ranks import Ranks
from trainer.session import agreed_digest
from trainer.sharding import Slice
from trainer.update import Learner
from trainer.waiting import Stopped

Groups = list[list[Rollout]]
ADAPTER = {"rank": 3, "alpha": 6}
ESTIMATORS: dict[str, dict[str, Any]] = {name: {"estimator": name} for name in get_args(Estimator)}
ESTIMATORS["standardized batch"] = {"estimator": "batch", "standardize": True}
SETTINGS: dict[str, dict[str, Any]] = {
    f"{estimator}, {aggregation}, {loss}": {**chosen, "aggregation": aggregation, "loss": loss}
    for estimator, chosen in ESTIMATORS.items()
    for aggregation in get_args(Aggregation)
    for loss in get_args(Kind)
} | {
    "dropped, kept in the baseline": {"estimator": "batch", "truncation": "drop"},
    "dropped, within the group": {"estimator": "group", "truncation": "drop"},
    "kl and entropy": {"kl_coefficient": 0.1, "entropy_coefficient": 0.05},
    "sequence mask": {"sequence_mask": (0.2, 1.5)},
    "band": {"importance": (0.3, 2.0)},
    "one row a micro-batch": {"rows": 1},
    "layers computed again": {"activation_checkpointing": True, "rows": 1},
    "an adapter": {"lora": ADAPTER, "rows": 1},
    "an adapter, layers computed again": {"lora": ADAPTER, "activation_checkpointing": True},
    "an adapter, kl": {"lora": ADAPTER, "kl_coefficient": 0.1},
}
"""Of the trainer, and `model.lora`."""

PARALLEL = ("ddp", "fsdp")


def learner(
    folder: Path,
    ranks: Ranks,
    *,
    dtype: str = "float64",
    shard: bool = False,
    lora: dict[str, Any] | None = None,
    **trainer: Any,
) -> Learner:
    kept = "float32" if dtype == "float64" else dtype
    config = RunConfig.parse(
        {
            "name": "t",
            "steps": 4,
            "tasks": {"source": "a:b", "dataset": "a:c"},
            "model": {"tiny": {"dim": 16, "layers": 1, "heads": 2}, "dtype": kept, "lora": lora},
            "budget": {"max_generated_tokens": 8},
            "trainer": {"width": 24, "rows": 2, "estimator": "mean", "lr": 1e-2, "grad_clip": None}
            | trainer,
        }
    )
    device = determinism.settle(1, exact=True)
    source = folders.source_folder(config, folder)
    policy, reference = (Policy.build(source, config, device) for _ in range(2))
    policy.adapt(config)
    for network in (policy.network, reference.network) if dtype == "float64" else ():
        network.double()
    with torch.no_grad():
        for p in policy.parameters().values():
            p.add_(0.05 * torch.sin(torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape))
    frozen = reference if config.trainer.kl_coefficient else None
    for each in (policy, reference) if shard else ():
        each.shard(device, Slice(ranks.rank, ranks.size))
    pool = partial(ranks.total, "norm") if shard else None
    optimizer = Optimizer(policy.parameters(), config.trainer, pool=pool)
    return Learner(config, policy, optimizer, frozen, ranks)


def group(number: int, size: int = 3, reward: float | None = None) -> list[Rollout]:
    members = []
    for sample in range(size):
        key = ("member", number, sample)
        ids = [fold(*key, i) % 12 for i in range(2 + fold(*key) % 6)]
        logprobs = [-1.5 - fold(*key, "l", i) % 1000 / 500 for i in range(len(ids))]
        segment = Segment([1, 2, number % 10, 10], ids, logprobs, "stop", 0)
        status = Status.TRUNCATED if fold(*key, "t") % 5 == 0 else Status.COMPLETED
        cause = "tokens" if status is Status.TRUNCATED else None
        earned = fold(*key, "r") % 7 / 4 if reward is None else reward
        members.append(
            Rollout(str(number), number, sample, 0, [segment], status, earned, cause=cause)
        )
    return members


def completed(number: int, *, reward: float) -> Rollout:
    ids = [fold("member", number, i) % 12 for i in range(3)]
    segment = Segment([1, 2, 3, 10], ids, [-1.5] * 3, "stop", 0)
    return Rollout(str(number), number, 0, 0, [segment], Status.COMPLETED, reward)


SHARES: dict[str, Callable[[], list[Groups]]] = {
    "even": lambda: [[group(0), group(1, 4)], [group(2, 5), group(3)]],
    "uneven": lambda: [[group(n, 5) for n in range(5)], [group(7, 2)]],
    "one is empty": lambda: [[], [group(0), group(1, 4)]],
    "one has nothing to say": lambda: [[group(0, reward=0.5)], [group(1, 4), group(2, 5)]],
}
EVERY_SHARE = [f"{estimator}, token-mean, ppo" for estimator in ESTIMATORS] + ["an adapter"]
"""Settings that are compared for each of the shares, not only for uneven ones."""


def gradients(trainer: Learner, groups: Groups) -> tuple[dict[str, Tensor], Mapping[str, float]]:
    """What one step would move the weights by, and its figures."""
    found: dict[str, Tensor] = {}

    def keep(rate: float) -> None:
        parameters = trainer.policy.parameters().items()
        for (name, parameter), gradient in zip(
            parameters, trainer.optimizer.gradients(), strict=True
        ):
            divided = trainer.policy.sharded and parameter.grad is not None
            found[name] = sharding.whole(parameter.grad) if divided else gradient.clone()  # type: ignore[arg-type]

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    outcome = trainer.step(Batch(groups=groups), 0)
    assert outcome.updated, outcome.cause
    return found, outcome.metrics


def compare(ranks: Ranks, folder: Path) -> None:
    for name, settings in SETTINGS.items():
        kinds = list(SHARES) if name in EVERY_SHARE else ["uneven"]
        for kind in kinds:
            pooled = SHARES[kind]()
            whole = [g for of_rank in pooled for g in of_rank]
            alone, expected = gradients(learner(folder, Ranks(), **settings), whole)
            scale = max(float(g.abs().max()) for g in alone.values())
            names = {n for n in expected if not n.startswith(("time/", "tokens_per", "pack/"))}
            names -= {"staleness/span_age_p99"}
            for parallel in PARALLEL:
                many = learner(folder, ranks, shard=parallel == "fsdp", **settings)
                mine, told = gradients(many, pooled[ranks.rank])
                worst = max(float((mine[n] - alone[n]).abs().max()) for n in alone) / scale
                figures = {n: [told.get(n), expected[n]] for n in sorted(names)}
                tell(ranks, f"{parallel}; {name}; {kind}", worst=worst, figures=figures)


def no_update(ranks: Ranks, folder: Path) -> None:
    cut = Rollout("9", 9, 0, 0, group(9)[0].segments, Status.TRUNCATED, 1.0, cause="tokens")
    cases: dict[str, list[Groups]] = {
        "flat": [[group(0, reward=0.5)], [group(1, reward=0.5)]],
        "empty": [[], []],
        # One member takes loss; the dropped ones are no more to compare with than in one process.
        "all but one dropped": [[[completed(8, reward=0.0)]], [[cut]]],
    }
    for parallel in PARALLEL:
        for name, shares in cases.items():
            dropping: dict[str, Any] = (
                {"estimator": "batch", "truncation": "drop"} if "dropped" in name else {}
            )
            trainer = learner(folder, ranks, shard=parallel == "fsdp", **dropping)
            before = weights_digest(trainer.policy.weights())
            outcome = trainer.step(Batch(groups=shares[ranks.rank]), 0)
            kept = weights_digest(trainer.policy.weights()) == before
            case = f"{parallel}; {name}"
            tell(ranks, case, updated=outcome.updated, cause=outcome.cause, kept=kept)


def minibatches(ranks: Ranks, folder: Path) -> None:
    """Updates beyond one rank's rows: every rank makes them all, and ends with the same weights."""
    # A rank without rows adds nothing to a mass below one, and still sees it.
    mass = ranks.total("mass", torch.zeros(()) if ranks.rank == 0 else torch.tensor(0.4))
    masses = ranks.exchange("masses", float(mass))
    settings: dict[str, Any] = {"minibatches": 3, "rows": 1}
    for parallel in PARALLEL:
        shard = parallel == "fsdp"
        trainer = learner(folder, ranks, dtype="float32", shard=shard, **settings)
        outcome = trainer.step(Batch(groups=SHARES["uneven"]()[ranks.rank]), 0)
        digests = ranks.exchange("digest", weights_digest(trainer.policy.weights()).hex())
        updates = outcome.optimizer_updates
        tell(ranks, f"{parallel}; minibatches", updates=updates, digests=digests)
        settings |= {"aggregation": "rollout-mean", "loss": "gspo"}
        trainer = learner(folder, ranks, shard=shard, **settings)
        outcome = trainer.step(Batch(groups=SHARES["one is empty"]()[ranks.rank]), 0)
        each = ranks.exchange("updates", outcome.optimizer_updates)
        tell(ranks, f"{parallel}; empty parts", masses=masses, updates=each)


def updates(ranks: Ranks, folder: Path) -> None:
    """Clipped updates over several micro-batches move the weights as those of one process do."""
    pooled = SHARES["uneven"]()
    whole = Batch(groups=[g for of_rank in pooled for g in of_rank])
    settings: dict[str, Any] = {"rows": 1, "grad_clip": 0.01, "weight_decay": 0.1}
    alone = learner(folder, Ranks(), **settings)
    expected = [alone.step(whole, version).metrics["grad_norm"] for version in range(3)]
    for parallel in PARALLEL:
        many = learner(folder, ranks, shard=parallel == "fsdp", **settings)
        mine = Batch(groups=pooled[ranks.rank])
        norms = [many.step(mine, version).metrics["grad_norm"] for version in range(3)]
        worst = max(
            float((sharding.whole(tensor) - alone.policy.weights()[name]).abs().max())
            for name, tensor in many.policy.weights().items()
        )
        tell(ranks, f"{parallel}; updates", worst=worst, norms=norms, expected=expected)


def narrow_weights(ranks: Ranks, folder: Path) -> None:
    """bfloat16: gradients add up in float32, and updates too small for a weight in its master."""
    pooled = SHARES["uneven"]()
    whole = Batch(groups=[g for of_rank in pooled for g in of_rank])
    settings: dict[str, Any] = {"rows": 1, "dtype": "bfloat16", "lr": 1e-6}
    expected = learner(folder, Ranks(), **settings).step(whole, 0).metrics["grad_norm"]
    for parallel in PARALLEL:
        many = learner(folder, ranks, shard=parallel == "fsdp", **settings)
        before = {n: t.clone() for n, t in many.optimizer.state().items() if "master" in n}
        kept = {n: sharding.local(t).clone() for n, t in many.policy.weights().items()}
        summed: set[str] = set()
        with noting("all_reduce", summed), noting("reduce_scatter_single", summed):
            norm = many.step(Batch(groups=pooled[ranks.rank]), 0).metrics["grad_norm"]
        after = many.optimizer.state()
        moved = [not torch.equal(after[n], t) for n, t in before.items() if t.numel()]
        weights = [
            float((sharding.local(t) != kept[n]).float().mean())
            for n, t in many.policy.weights().items()
            if kept[n].numel()
        ]
        kinds = sorted({str(t.dtype) for t in before.values()})
        case = f"{parallel}; bfloat16"
        told = {"masters": any(moved), "weights": max(weights), "kinds": kinds}
        told["summed"] = sorted(summed)
        tell(ranks, case, norm=norm, expected=expected, each=ranks.exchange("moved", told))


@contextmanager
def noting(collective: str, kinds: set[str]) -> Iterator[None]:
    """Note the dtypes of what is summed by a collective meanwhile."""
    real = getattr(dist, collective)

    def sum_up(*tensors: Tensor, **options: Any) -> Any:
        given = [*tensors, *(t for t in options.values() if isinstance(t, Tensor))]
        kinds.update(str(tensor.dtype) for tensor in given)
        return real(*tensors, **options)

    setattr(dist, collective, sum_up)
    try:
        yield
    finally:
        setattr(dist, collective, real)


def passes(ranks: Ranks, folder: Path) -> None:
    """How often the network and its layer run in a step: by micro-batch, and again if recomputed."""
    mine = SHARES["even"]()[ranks.rank]
    for parallel in PARALLEL:
        for rows in (1, 8):
            for again in (False, True):
                trainer = learner(
                    folder,
                    ranks,
                    shard=parallel == "fsdp",
                    rows=rows,
                    activation_checkpointing=again,
                )
                network, layer = (
                    trainer.policy.network.transformer,
                    trainer.policy.network.transformer.h[0],
                )
                runs = {"network": 0, "layer": 0}
                network.register_forward_pre_hook(partial(count, runs, "network"))
                layer.register_forward_pre_hook(partial(count, runs, "layer"))
                assert trainer.step(Batch(groups=mine), 0).updated
                case = f"{parallel}; {rows} rows{'; again' if again else ''}"
                tell(ranks, case, each=ranks.exchange("runs", runs))


def count(runs: dict[str, int], name: str, *_: object) -> None:
    runs[name] += 1


def one_share(ranks: Ranks, folder: Path) -> None:
    """Both ranks read one share: identical rows, each computing a part of them."""
    readers = copy(ranks)
    readers.readers = ranks.size
    for name in ("mean, token-mean, ppo", "batch, rollout-mean, ppo", "kl and entropy"):
        settings = SETTINGS[name] | {"rows": 1}
        groups = SHARES["uneven"]()[0]
        alone, expected = gradients(learner(folder, Ranks(), **settings), groups)
        scale = max(float(g.abs().max()) for g in alone.values())
        for parallel in PARALLEL:
            trainer = learner(folder, readers, shard=parallel == "fsdp", **settings)
            mine, told = gradients(trainer, groups)
            worst = max(float((mine[n] - alone[n]).abs().max()) for n in alone) / scale
            kept = {n for n in expected if not n.startswith(("time/", "tokens_per"))}
            figures = {n: [told.get(n), expected[n]] for n in sorted(kept)}
            tell(ranks, f"{parallel}; one share; {name}", worst=worst, figures=figures)
    other = [group(0, 5), group(1, 5)]
    trainer = learner(folder, readers)
    before = weights_digest(trainer.policy.weights())
    try:
        trainer.step(Batch(groups=[other, list(reversed(other))][ranks.rank]), 0)
        error = ""
    except LedgerError as apart:
        error = str(apart)
    unmoved = weights_digest(trainer.policy.weights()) == before
    tell(ranks, "other rows", answers=ranks.exchange("heard", [error, unmoved]))


def failures(ranks: Ranks) -> None:
    def fail(which: int, error: Exception) -> Callable[[], None]:
        def act() -> None:
            if ranks.rank == which:
                raise error

        return act

    def heard(act: Callable[[], object]) -> list[str]:
        try:
            act()
        except (RollbookError, Stopped) as error:
            return [type(error).__name__, str(error)]
        return []

    def both(first: Exception, second: Exception) -> None:
        raise (first, second)[ranks.rank]

    changed = DataChanged("batch 3 has other tasks")
    for name, act in {
        "on rank 0": lambda: ranks.first("x", fail(0, changed)),
        "on rank 1": lambda: ranks.together("x", fail(1, changed)),
        "stop": lambda: ranks.together("x", fail(1, Stopped())),
        "none": lambda: ranks.together("x", lambda: None),
        "its consequence": lambda: ranks.together(
            "x", lambda: both(RunStopped("as told"), changed)
        ),
    }.items():
        answers = ranks.exchange("heard", heard(act))
        tell(ranks, name, answers=answers)
    agreed = {
        "same weights": lambda: agreed_digest(ranks, "r", 3, b"same"),
        "other weights": lambda: agreed_digest(ranks, "r", 3, bytes([ranks.rank])),
    }
    for name, look in agreed.items():
        tell(ranks, name, answers=ranks.exchange("heard", heard(look)))
    decided = ranks.decide("decide", lambda: f"by rank {ranks.rank}")
    tell(ranks, "decided", answers=ranks.exchange("heard", decided))


def death(ranks: Ranks) -> None:
    """Rank 1 is killed while rank 0 is in a collective."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        ranks.exchange("never", None)
    except RankLost as lost:
        tell(ranks, "death", seconds=time.monotonic() - began, said=str(lost))
    os._exit(0)


def breakage(ranks: Ranks, folder: Path, which: int) -> None:
    """One rank breaks and leaves while the other adds up gradients; each tells what it raised."""

    def fail(_: object) -> None:
        raise OverflowError("in the middle of a step")

    trainer = learner(folder, ranks)
    if ranks.rank == which:
        ranks.add_up = fail  # type: ignore[method-assign, assignment]
    began = time.monotonic()
    try:
        with ranks.sums():
            trainer.step(Batch(groups=SHARES["even"]()[ranks.rank]), 0)
    except Exception as error:  # noqa: BLE001
        found = {"error": [type(error).__name__, str(error)], "apart": ranks.apart}
        print(json.dumps(found | {"seconds": time.monotonic() - began}), flush=True)  # noqa: T201


def stuck(ranks: Ranks) -> None:
    """Rank 1 breaks while rank 0 waits as for a GPU: no exception reaches it."""
    ranks.watch()
    with ranks.sums():
        if ranks.rank == 1:
            raise OverflowError("while the other waits")
        time.sleep(3600)


def tell(ranks: Ranks, case: str, **found: object) -> None:
    if ranks.rank == 0:
        print(json.dumps({"case": case} | found), flush=True)  # noqa: T201


def everything(ranks: Ranks, folder: Path) -> None:
    """The cases that both ranks live through, and the last, that one does not."""
    compare(ranks, folder)
    no_update(ranks, folder)
    minibatches(ranks, folder)
    updates(ranks, folder)
    narrow_weights(ranks, folder)
    passes(ranks, folder)
    one_share(ranks, folder)
    failures(ranks)
    death(ranks)


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    with Ranks.joined(os.environ, timeout_s=60) as ranks:
        match arguments[1:]:
            case ["breaks", which]:
                breakage(ranks, folder / str(ranks.rank), int(which))
            case ["stuck"]:
                stuck(ranks)
            case []:
                everything(ranks, folder / str(ranks.rank))


if __name__ == "__main__":
    main(sys.argv[1:])
