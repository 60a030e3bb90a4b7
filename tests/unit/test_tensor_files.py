"""Files of tensors: the library's bytes, and slices that any number of readers can share."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer import tensor_files
from trainer.sharding import WHOLE, Slice

TENSORS = {
    "layer.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "b.wide": torch.arange(5, dtype=torch.float64),
    "a.ä": torch.ones(7, 2).bfloat16(),
    "mask": torch.tensor([True, False]),
    "one row": torch.ones(1, 6),
    "none": torch.zeros(0, 2),
    "ids": torch.arange(3),
    "step": torch.tensor(3.0),
}


def sliced(part: Slice) -> dict[str, torch.Tensor]:
    """What the holder of a slice has; a scalar has no rows, so everyone has it."""
    found = {}
    for name, tensor in TENSORS.items():
        rows = part.rows(len(tensor)) if tensor.dim() else None
        found[name] = tensor if rows is None else tensor[rows.start : rows.stop]
    return found


@pytest.mark.parametrize("names", [list(TENSORS), ["layer.weight", "step"], ["a.ä"]])
def test_a_file_is_the_one_that_the_library_writes(tmp_path: Path, names: list[str]) -> None:
    tensors = {name: TENSORS[name] for name in names}
    tensor_files.write(tmp_path / "own", dict(reversed(tensors.items())))
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "own").read_bytes() == (tmp_path / "library").read_bytes()


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("writers", [1, 2, 5])
def test_any_number_reads_what_any_number_wrote(tmp_path: Path, writers: int, readers: int) -> None:
    files = [tmp_path / str(part) for part in range(writers)]
    for part, file in enumerate(files):
        tensor_files.write(file, sliced(Slice(part, writers)))
    for part in range(readers):
        expected = sliced(Slice(part, readers))
        found = tensor_files.read(files, Slice(part, readers))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_slices_are_the_chunks_that_torch_divides_a_tensor_into(length: int, parts: int) -> None:
    rows = torch.arange(length)
    chunks = [chunk.tolist() for chunk in rows.chunk(parts)] if length else [[]]
    chunks += [[]] * (parts - len(chunks))
    assert [list(Slice(part, parts).rows(length)) for part in range(parts)] == chunks
    assert list(WHOLE.rows(length)) == rows.tolist()
