import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cpsr.checkpoint.mapped import MappedTensors
from cpsr.checkpoint.verify import DamagedFileError, map_tensors


def test_pieces_are_those_that_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    tensors = {f"w{place}": torch.randn(3, 5 + place).to(dtype) for place, dtype in enumerate(dtypes)}
    save_file({**tensors, "none": torch.empty(0)}, path, metadata={"format": "pt"})
    found = MappedTensors(path)
    with safe_open(path, framework="pt") as file:
        for name in tensors:
            expected = file.get_tensor(name).flatten()
            assert found.flat(name).dtype == expected.dtype
            assert torch.equal(found.flat(name), expected)
            assert torch.equal(found.flat(name)[2:7], expected[2:7])
    assert found.flat("none").shape == (0,)
    with pytest.raises(ValueError, match="has no tensor 'w9'"):
        found.flat("w9")


def test_pieces_outlive_the_file_and_never_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.arange(4.0)}, path)
    piece = MappedTensors(path).flat("w")
    piece.add_(1.0)
    assert torch.equal(MappedTensors(path).flat("w"), torch.arange(4.0))
    path.unlink()
    assert piece.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "content",
    [b"", b"\1\0", b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{,"],
    ids=["empty", "short", "long header", "no object", "no JSON"],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=re.escape(path.name)):
        map_tensors(path)


def test_a_missing_file_and_a_tensor_beyond_the_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="is missing"):
        map_tensors(tmp_path / "none")
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match="lies at 0 to 16 of 8"):
        MappedTensors(path).flat("w")
