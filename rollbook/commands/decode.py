"""`decode`: what rollouts said, as text."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenizers import Tokenizer

from domain.errors import ConfigError
from domain.rollouts import Segment
from rollbook.connect import STATE, Looking, open_looking
from rollbook.output import console, print_json
from storage import manifests, reports, segments
from storage import runs as ledger_runs
from storage.database import Tx
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A sampling request: what was new before it, and what the policy said."""

    sample: int
    attempt: int
    seq: int
    version: int
    prompt: str
    sampled: str
    finish: str
    tokens: int
    mean_logprob: float | None


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(decode)


def decode(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    group: Annotated[int, typer.Argument(help="Group id.")],
    sample: Annotated[int | None, typer.Argument(help="One sample; default: all.")] = None,
    attempt: Annotated[
        int | None, typer.Option(help="One attempt; default: the newest of each sample.")
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder of the local stack.")] = STATE,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the recorded token ids of a group's rollouts as text, by the model's own tokenizer.

    The tokenizer is the one that the run was created with; it is fetched from the object store once.

    Example: `rollbook decode reverse3 42 0`
    """
    with open_looking(state, store=True) as looking:
        facts, recorded = looking.ledger.call(_read, run, group, sample, attempt)
        tokenizer = _tokenizer(looking, run, state)
    parts = [part for key, each in recorded for part in _parts(tokenizer, key, each)]
    if json:
        print_json({"group": group, **facts, "segments": [asdict(part) for part in parts]})
        return
    console.print(f"group {group} · task {facts['task']}", style="bold", highlight=False)
    shown: tuple[int, int] | None = None
    for part in parts:
        if (part.sample, part.attempt) != shown:
            shown = (part.sample, part.attempt)
            end = facts["ends"][f"{part.sample}.{part.attempt}"]
            console.print(f"\nsample {part.sample} · attempt {part.attempt} · {end}", style="cyan")
        console.print(part.prompt, style="dim", end="", markup=False, highlight=False)
        console.print(part.sampled, style="green", end="", markup=False, highlight=False)
        console.print(f"  ⟨{part.finish} · v{part.version} · {part.tokens} tokens⟩", style="dim")


Key = tuple[int, int]


def _read(
    tx: Tx, run: str, group: int, sample: int | None, attempt: int | None
) -> tuple[dict[str, Any], list[tuple[Key, list[Segment]]]]:
    ledger_runs.read(tx, run)
    found = reports.group(tx, run, group)
    if found is None:
        raise ConfigError(f"run {run!r} has no group {group}; `rollbook inspect {run}` lists some")
    rows = reports.attempts(tx, run, group)
    newest = {row["sample"]: row["attempt"] for row in rows}
    chosen = [
        row
        for row in rows
        if sample in (None, row["sample"])
        and row["attempt"] == (newest[row["sample"]] if attempt is None else attempt)
    ]
    if not chosen:
        known = sorted({(row["sample"], row["attempt"]) for row in rows})
        raise ConfigError(
            f"group {group} of run {run} has no such sample or attempt; it has (sample, attempt) "
            f"{', '.join(map(str, known)) or 'none yet'}"
        )
    ends = {
        f"{row['sample']}.{row['attempt']}": " ".join(
            str(part)
            for part in (
                row["status"] or row["state"],
                "" if row["reward"] is None else f"reward {row['reward']:.4g}",
                row["truncation"] or row["resubmitted_as"] or "",
            )
            if part
        )
        for row in chosen
    }
    recorded = [
        (
            (row["sample"], row["attempt"]),
            segments.read(tx, run, group, row["sample"], row["attempt"]),
        )
        for row in chosen
    ]
    return {"task": found["task_id"], "data": found["task"], "ends": ends}, recorded


def _tokenizer(looking: Looking, run: str, state: Path) -> Tokenizer:
    """The tokenizer of the run's model folder, kept beside the workers' copies."""
    key = str(looking.ledger.call(ledger_runs.read, run).world["model_manifest"])
    digest = Path(key).parent.name  # models/SHA256/manifest.json
    folder = state / "cache" / "models" / digest
    if not looking.has_store:
        raise ConfigError(
            "the tokenizer lies in the object store; set ROLLBOOK_S3_ENDPOINT, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    manifests.fetch(ObjectStore(looking.services), key, folder, sha256=digest)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _parts(tokenizer: Tokenizer, key: Key, recorded: Sequence[Segment]) -> list[Part]:
    """Each request's own share of its chain: what an earlier request said is not repeated."""
    parts: list[Part] = []
    before: list[int] = []
    for seq, segment in enumerate(recorded):
        prompt = [int(i) for i in segment.prompt_ids]
        sampled = [int(i) for i in segment.sampled_ids]
        new = prompt[len(before) :] if before and prompt[: len(before)] == before else prompt
        logprobs = [float(value) for value in segment.logprobs]
        parts.append(
            Part(
                sample=key[0],
                attempt=key[1],
                seq=seq,
                version=segment.version,
                prompt=tokenizer.decode(new, skip_special_tokens=False),
                sampled=tokenizer.decode(sampled, skip_special_tokens=False),
                finish=segment.finish_reason,
                tokens=len(sampled),
                mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
            )
        )
        before = prompt + sampled
    return parts
