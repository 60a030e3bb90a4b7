"""Tensors in safetensors files: written one at a time, and read a slice at a time.

The library writes a file from tensors that are all in memory twice. Weights that are divided among
ranks are gathered one by one, so that no process needs more memory for a file than for its largest
tensor. The files are the library's, byte for byte, and the library reads them.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trainer import sharding
from trainer.sharding import Slice

# Wide ones first, in the library's order, which keeps every tensor of a file aligned.
_KINDS = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write(path: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Tensors as a file; equal tensors give equal bytes.

    Args:
        path: where; None writes nothing, and only takes part in the gathering.
        tensors: by name; sharded ones are gathered, which is a collective.
    """
    order = list(_KINDS)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    if path is None:
        for name in names:
            sharding.whole(tensors[name])
        return
    with path.open("wb") as file:
        header = _header({name: tensors[name] for name in names})
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            tensor = sharding.whole(tensors[name]).cpu().contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def read(files: Sequence[Path], part: Slice) -> dict[str, Tensor]:
    """One slice of tensors whose slices lie in these files, in order; scalars are in each.

    Raises:
        SafetensorError: a file is no safetensors file. It can hold nothing that would run.
    """
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        parts = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        for name in parts[0].keys():  # noqa: SIM118  # it is no mapping
            slices = [opened.get_slice(name) for opened in parts]
            if not slices[0].get_shape():
                found[name] = parts[0].get_tensor(name)
                continue
            lengths = [piece.get_shape()[0] for piece in slices]
            wanted, start = part.rows(sum(lengths)), 0
            pieces: list[Tensor] = []
            for piece, length in zip(slices, lengths, strict=True):
                first, last = max(wanted.start - start, 0), min(wanted.stop - start, length)
                if first < last or (not pieces and piece is slices[-1]):
                    pieces.append(piece[first : max(first, last)])
                start += length
            found[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return found


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        stop = at + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return header + b" " * (-len(header) % _ALIGNMENT)
