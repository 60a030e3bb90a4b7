"""Segments: one row per sampling request, committed before anything else sees its tokens.

Token ids and log-probabilities are little-endian int32 and float32 bytes, so what the trainer reads
is bit for bit what the engine returned. A segment stores only what its prompt adds to its chain
(`context_start` counts the tokens of the chain so far); reading puts the chain together once and
hands out views of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from domain.errors import Fenced, LedgerError
from domain.images import PlacedImage
from domain.rollouts import Numbers, Rollout, Segment, Status
from storage import stragglers
from storage.database import Tx

Row = dict[str, Any]
IDS = np.dtype("<i4")
LOGPROBS = np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a segment stands in its rollout."""

    seq: int
    turn: int
    chain: int
    context_start: int
    """Tokens of the chain so far, which the prompt begins with; 0 starts a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the execution learns from the ledger at a segment boundary."""

    cancel_cause: str | None = None
    deadline: bool = False
    """The group's straggler deadline has passed."""


def append(
    tx: Tx,
    run: str,
    group: int,
    sample: int,
    attempt: int,
    fence: int,
    segment: Segment,
    *,
    place: Place,
    engine: str,
) -> Progress:
    """Commit one segment and count it. Delivered again it changes nothing.

    Args:
        tx: the transaction.
        run: the run.
        group: the task group.
        sample: the member slot.
        attempt: the try at it.
        fence: of this execution.
        segment: the whole request; only what it adds to its chain is stored.
        place: its place in the rollout.
        engine: base URL of the engine that sampled it.

    Raises:
        Fenced: another execution owns the attempt, or it has ended.
        LedgerError: ids or log-probabilities are impossible (NaN, infinite, negative, too few).
    """
    row = _encode(segment, place) | {
        "run": run,
        "group": group,
        "sample": sample,
        "attempt": attempt,
        "fence": fence,
        "engine": engine,
    }
    deadline = stragglers.lock(tx, run, group)
    if deadline and deadline.quorum and deadline.on_stragglers == "discard":
        stragglers.lock_unfinished(tx, run, group)
    new = _insert_once(tx, row)
    counted = tx.execute(
        """UPDATE attempts SET last_progress_at = now(), engine_id = %(engine)s,
            policy_tokens = policy_tokens + %(tokens)s, env_tokens = env_tokens + %(prompt_tokens)s,
            turns = greatest(turns, %(turn)s + 1),
            oldest_version = least(oldest_version, %(oldest)s),
            newest_version = greatest(newest_version, %(newest)s),
            kv_version = CASE WHEN sampling_version IS NOT NULL THEN %(kv)s END
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND fence = %(fence)s AND state = 'running'
        RETURNING cancel_cause, policy_tokens - tokens_at_quorum AS since_quorum"""
        if new
        else """SELECT cancel_cause, policy_tokens - tokens_at_quorum AS since_quorum FROM attempts
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)""",
        row,
    ).fetchone()
    assert counted is not None
    reached = deadline is not None and deadline.reached
    if (
        deadline is not None
        and not reached
        and counted["cancel_cause"] is None
        and counted["since_quorum"] is not None
        and counted["since_quorum"] >= deadline.allowance
    ):
        stragglers.reach(tx, run, group, deadline)
        reached = True
        if deadline.on_stragglers == "discard":
            return Progress(cancel_cause="deadline", deadline=True)
    return Progress(cancel_cause=counted["cancel_cause"], deadline=reached)


def read(tx: Tx, run: str, group: int, sample: int, attempt: int) -> list[Segment]:
    """All committed segments of an attempt, in order, as numpy views of its chains."""
    rows = _segments(tx, run, [(group, sample, attempt)])
    return list(_decode(rows))


def places(tx: Tx, run: str, group: int, sample: int, attempt: int) -> list[Place]:
    """Where each committed segment of an attempt stands, in order."""
    rows = tx.execute(
        """SELECT seq, turn, chain, context_start FROM segments
        WHERE (run_id, group_id, sample, attempt) = (%s, %s, %s, %s) ORDER BY seq""",
        (run, group, sample, attempt),
    )
    return [Place(**row) for row in rows]


def members(tx: Tx, run: str, rows: Sequence[tuple[int, int]]) -> list[list[Rollout]]:
    """What a step trains on: the members of each `(group, part)`, in the order given.

    Members come by sample index. Token ids and log-probabilities are numpy arrays (int32, float32).
    Two queries, whatever the number of groups.

    Raises:
        LedgerError: a part has no members.
    """
    found = tx.execute(
        """SELECT a.group_id, a.part, a.sample, a.attempt, a.status, a.reward, a.reward_parts,
            a.truncation, a.error, g.task_id
        FROM unnest(%s::bigint[], %s::int[]) AS wanted(group_id, part)
            JOIN attempts a ON a.run_id = %s AND a.group_id = wanted.group_id
                AND a.part = wanted.part AND a.member
            JOIN groups g ON g.run_id = a.run_id AND g.group_id = a.group_id
        ORDER BY a.group_id, a.part, a.sample""",
        ([group for group, _ in rows], [part for _, part in rows], run),
    ).fetchall()
    stored = _segments(tx, run, [(a["group_id"], a["sample"], a["attempt"]) for a in found])
    segments = {
        key: list(_decode(attempt))
        for key, attempt in groupby(stored, lambda s: (s["group_id"], s["sample"], s["attempt"]))
    }
    parts: dict[tuple[int, int], list[Rollout]] = {}
    for a in found:
        parts.setdefault((a["group_id"], a["part"]), []).append(
            Rollout(
                task=a["task_id"],
                group=a["group_id"],
                sample=a["sample"],
                attempt=a["attempt"],
                segments=segments.get((a["group_id"], a["sample"], a["attempt"]), []),
                status=Status(a["status"]),
                reward=a["reward"],
                components=a["reward_parts"] or {},
                cause=a["truncation"],
                detail=a["error"] or "",
            )
        )
    missing = [f"{group}.{part}" for group, part in rows if (group, part) not in parts]
    if missing:
        raise LedgerError(f"run {run!r} has no members of {', '.join(missing)} (group.part)")
    return [parts[group, part] for group, part in rows]


def _insert_once(tx: Tx, row: Row) -> bool:
    """Insert the segment under the attempt's row lock; False if this very request was committed."""
    owned = tx.execute(
        """SELECT 1 FROM attempts
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND fence = %(fence)s AND state = 'running' FOR NO KEY UPDATE""",
        row,
    ).fetchone()
    if owned is None:
        raise Fenced(
            f"attempt {row['attempt']} at sample {row['sample']} of group {row['group']} does not "
            f"run under fence {row['fence']} any more; this execution must stop writing"
        )
    inserted = tx.execute(
        """INSERT INTO segments(run_id, group_id, sample, attempt, seq, turn, chain, context_start,
            prompt_tokens, prompt_delta, tokens, sampled_ids, logprobs, version_spans,
            oldest_version, newest_version, kv_version, cached_prompt_tokens, finish_reason,
            engine_id, fence, support_ids, support_counts, images, image_places)
        VALUES (%(run)s, %(group)s, %(sample)s, %(attempt)s, %(seq)s, %(turn)s, %(chain)s,
            %(context_start)s, %(prompt_tokens)s, %(prompt_delta)b, %(tokens)s, %(sampled_ids)b,
            %(logprobs)b, %(spans)s, %(oldest)s, %(newest)s, %(kv)s, %(cached)s, %(finish_reason)s,
            %(engine)s, %(fence)s, %(support_ids)b, %(support_counts)b, %(images)s::bytea[],
            %(image_places)s::int[])
        ON CONFLICT DO NOTHING""",
        row,
    ).rowcount
    if inserted:
        return True
    same = tx.execute(
        """SELECT 1 FROM segments
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND seq = %(seq)s AND fence = %(fence)s AND sampled_ids = %(sampled_ids)b
            AND prompt_delta = %(prompt_delta)b
            AND images::bytea[] = %(images)s::bytea[]""",
        row,
    ).fetchone()
    if same is None:
        raise Fenced(
            f"segment {row['seq']} of attempt {row['attempt']} at sample {row['sample']} of group "
            f"{row['group']} was written by another execution"
        )
    return False


def _encode(segment: Segment, place: Place) -> Row:
    """Columns of a segment.

    Raises:
        LedgerError: names the token that cannot be.
    """
    where = f"segment {place.seq}"
    sampled = _ids(segment.sampled_ids, f"{where}, sampled")
    logprobs = _logprobs(segment.logprobs, where)
    if len(logprobs) != len(sampled):
        raise LedgerError(f"{where} has {len(sampled)} ids and {len(logprobs)} log-probabilities")
    delta = _ids(segment.prompt_ids[place.context_start :], f"{where}, prompt")
    support = segment.support
    if support is not None and len(support) != len(sampled):
        raise LedgerError(f"{where} has {len(sampled)} ids and {len(support)} kept sets")
    spans = [(version, tokens) for version, tokens in segment.spans if tokens]
    return {
        "seq": place.seq,
        "turn": place.turn,
        "chain": place.chain,
        "context_start": place.context_start,
        "prompt_tokens": len(delta),
        "prompt_delta": delta.tobytes(),
        "tokens": len(sampled),
        "sampled_ids": sampled.tobytes(),
        "logprobs": logprobs.tobytes(),
        "spans": [number for span in spans for number in span],
        "oldest": min((version for version, _ in spans), default=segment.version),
        "newest": segment.newest_version,
        "kv": segment.version if segment.kv_version is None else segment.kv_version,
        "cached": segment.cached_prompt_tokens,
        "finish_reason": segment.finish_reason,
        "support_ids": None if support is None else _flat(support, where).tobytes(),
        "support_counts": None
        if support is None
        else np.array([len(kept) for kept in support], IDS).tobytes(),
        "images": [bytes.fromhex(image.sha256) for image in segment.images],
        "image_places": [n for image in segment.images for n in (image.offset, image.length)],
    }


def _ids(ids: Numbers, where: str) -> NDArray[np.int32]:
    try:
        array = np.asarray(ids, dtype=IDS)
    except (OverflowError, ValueError, TypeError) as error:
        raise LedgerError(f"{where}: token ids must be 32-bit integers: {error}") from error
    if array.size and array.min() < 0:
        raise LedgerError(f"{where}: token id {array.min()} is negative")
    return array


def _logprobs(values: Numbers, where: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a float64 too large becomes inf, which is refused below
        array = np.asarray(values, dtype=LOGPROBS)
    wrong = np.flatnonzero(~np.isfinite(array))
    if wrong.size:
        raise LedgerError(
            f"{where}: the log-probability of token {wrong[0]} is {array[wrong[0]]}; the engine's "
            "answer cannot be trained on"
        )
    return array


def _flat(support: Sequence[Numbers], where: str) -> NDArray[np.int32]:
    return _ids([token for kept in support for token in kept], f"{where}, kept set")


def _segments(tx: Tx, run: str, keys: Sequence[tuple[int, int, int]]) -> Iterable[Row]:
    """Rows of all segments of the attempts `(group, sample, attempt)`, in key order."""
    with tx.cursor(binary=True) as cursor:  # text format would double the bytes of every array
        return cursor.execute(
            """SELECT s.group_id, s.sample, s.attempt, s.chain, s.context_start, s.prompt_tokens,
                s.prompt_delta, s.tokens, s.sampled_ids, s.logprobs, s.version_spans,
                s.oldest_version, s.kv_version, s.cached_prompt_tokens, s.finish_reason,
                s.support_ids, s.support_counts, s.images::bytea[] AS images,
                s.image_places
            FROM unnest(%s::bigint[], %s::int[], %s::int[]) AS wanted(group_id, sample, attempt)
                JOIN segments s ON s.run_id = %s AND s.group_id = wanted.group_id
                    AND s.sample = wanted.sample AND s.attempt = wanted.attempt
            ORDER BY s.group_id, s.sample, s.attempt, s.seq""",
            (*(list(column) for column in zip(*keys, strict=True)), run)
            if keys
            else ([], [], [], run),
        ).fetchall()


def _decode(rows: Iterable[Row]) -> Iterator[Segment]:
    """Segments of one attempt; those of a chain share one array of ids."""
    for _, chain in groupby(rows, lambda row: row["chain"]):
        parts = list(chain)
        ids = np.frombuffer(
            b"".join(piece for row in parts for piece in (row["prompt_delta"], row["sampled_ids"])),
            IDS,
        )
        for row in parts:
            prompt = row["context_start"] + row["prompt_tokens"]
            spans = row["version_spans"]
            yield Segment(
                prompt_ids=ids[:prompt],
                sampled_ids=ids[prompt : prompt + row["tokens"]],
                logprobs=np.frombuffer(row["logprobs"], LOGPROBS),
                finish_reason=row["finish_reason"],
                version=row["oldest_version"],
                version_spans=tuple(zip(spans[::2], spans[1::2], strict=True))
                if len(spans) > 2
                else None,
                kv_version=row["kv_version"],
                cached_prompt_tokens=row["cached_prompt_tokens"],
                support=_kept(row),
                images=_placed(row),
            )


def _placed(row: Row) -> tuple[PlacedImage, ...]:
    numbers = row["image_places"]
    return tuple(
        PlacedImage(digest.hex(), offset, length)
        for digest, offset, length in zip(row["images"], numbers[::2], numbers[1::2], strict=True)
    )


def _kept(row: Row) -> list[NDArray[np.int32]] | None:
    if row["support_ids"] is None:
        return None
    ends = np.cumsum(np.frombuffer(row["support_counts"], IDS))
    return np.split(np.frombuffer(row["support_ids"], IDS), ends[:-1])
