"""Chains: the segments of a rollout merged by strict prefix.

A segment joins the last chain iff its prompt starts with every id and every image of that chain;
otherwise it starts a new one. Each sampled id is trainable exactly once, in the chain of the segment that sampled it; in
a later chain's prompt it is context. Nothing is kept after a chain's last sampled id.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from domain.images import PlacedImage
from domain.rollouts import Numbers, Segment


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled ids `start..stop` (half-open) of a chain, from segment number `segment`."""

    start: int
    stop: int
    segment: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Token ids (int32) in order, and which of them were sampled."""

    ids: "array[int]"
    spans: tuple[Span, ...]
    images: tuple[PlacedImage, ...] = ()
    """Those whose tokens lie in it."""

    def __len__(self) -> int:
        """Tokens of the chain."""
        return len(self.ids)


def merge(segments: Sequence[Segment]) -> list[Chain]:
    """Chains of a rollout, in order; those without a sampled id are left out."""
    chains: list[Chain] = []
    ids = array("i")
    spans: list[Span] = []
    images: tuple[PlacedImage, ...] = ()
    for number, segment in enumerate(segments):
        prompt = _int32(segment.prompt_ids)
        same = prompt[: len(ids)] == ids and segment.images[: len(images)] == images
        if not ids or not same:
            _close(chains, ids, spans, images)
            ids, spans = array("i"), []
        images = segment.images
        ids.extend(prompt[len(ids) :])
        if len(segment.sampled_ids):
            start = len(ids)
            ids.extend(_int32(segment.sampled_ids))
            spans.append(Span(start, len(ids), number))
    _close(chains, ids, spans, images)
    return chains


def chain_lengths(segments: Sequence[Segment]) -> list[int]:
    """Tokens of each chain that `merge` gives."""
    return [len(chain) for chain in merge(segments)]


def _close(
    chains: list[Chain], ids: "array[int]", spans: list[Span], images: tuple[PlacedImage, ...]
) -> None:
    if spans:
        stop = spans[-1].stop
        held = tuple(image for image in images if image.offset < stop)
        chains.append(Chain(ids[:stop], tuple(spans), held))


def _int32(ids: Numbers) -> "array[int]":
    """The ids as int32; one memory copy when they lie in a 4-byte buffer already."""
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    if hasattr(ids, "tobytes") and getattr(ids, "itemsize", 0) == 4:
        copy = array("i")
        copy.frombytes(ids.tobytes())
        return copy
    return array("i", ids)
