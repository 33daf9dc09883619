"""Ranges of tensors: what was saved, from the pieces that they touch alone, each verified."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.direct_file import HASHED_PIECE_BYTES
from cpsr.checkpoint.files import hash_file, write_tensors
from cpsr.checkpoint.manifest import FileRecord
from cpsr.checkpoint.ranges import SlabFile, WantedRange
from cpsr.checkpoint.verify import DamagedFileError
from tests.checkpoint.conftest import bits

MIB = HASHED_PIECE_BYTES
# In the order of the file, behind a header of one block: float64 first.
TENSORS = {
    "double": torch.randn(3 * MIB // 16 + 7, dtype=torch.float64),
    "weights": torch.randn(5, MIB // 8),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(12.0),
    "half": torch.randn(MIB // 2 + 9).to(torch.bfloat16),
    "mask": torch.rand(MIB // 2) > 0.5,
}
DATA_START = 4096  # of the first tensor


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranges") / "file.safetensors"
    write_tensors(path, TENSORS)
    return path


@pytest.fixture(scope="module")
def record(path: Path) -> FileRecord:
    return hash_file(path)


def wanted(key: str, start: int = 0, stop: int | None = None, of: dict[str, torch.Tensor] = TENSORS) -> WantedRange:
    stop = of[key].numel() if stop is None else stop
    return WantedRange(key, start, torch.full((stop - start,), 1, dtype=of[key].dtype))


def is_right(one: WantedRange, of: dict[str, torch.Tensor] = TENSORS) -> bool:
    expected = of[one.key].reshape(-1)[one.start : one.start + one.target.numel()]
    return torch.equal(bits(one.target), bits(expected))


def touched(ranges: Iterable[WantedRange]) -> set[int]:
    """The pieces with these ranges; before them the first is read, which has the header."""
    begin, first = {}, DATA_START
    for key, tensor in TENSORS.items():
        begin[key], first = first, first + tensor.nbytes
    found: set[int] = set()
    for one in ranges:
        start = begin[one.key] + one.start * one.target.element_size()
        found |= set(range(start // MIB, -(-(start + one.target.nbytes) // MIB))) if one.target.nbytes else set()
    return found


def size_of(pieces: Iterable[int], size: int) -> int:
    return sum(min(MIB, size - index * MIB) for index in pieces)


@st.composite
def some_range(draw: st.DrawFn) -> WantedRange:
    key = draw(st.sampled_from(sorted(TENSORS)))
    numel = TENSORS[key].numel()
    start = draw(st.integers(0, numel))
    return wanted(key, start, start + draw(st.integers(0, min(300, numel - start)) | st.just(numel - start)))


@given(ranges=st.lists(some_range(), max_size=6))
@settings(max_examples=60, deadline=None)
def test_ranges_are_what_was_saved_and_other_pieces_are_not_read(
    path: Path, record: FileRecord, ranges: list[WantedRange]
) -> None:
    read: list[int] = []
    preadv = os.preadv

    def tracing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        assert offset % MIB == 0
        read.extend(range(offset // MIB, -(-(offset + count) // MIB)))
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", tracing)
        found = SlabFile(path, record).read(ranges)
    assert all(map(is_right, ranges))
    assert read == sorted({0, *touched(ranges)})
    assert found == size_of(read, record.bytes)


def flipped(path: Path, offset: int, to: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    to.write_bytes(data)
    return to


@given(offset=st.integers(0, 10**8) | st.integers(0, DATA_START))
@settings(max_examples=40, deadline=None)
def test_a_flip_is_found_where_its_piece_is_read(
    tmp_path_factory: pytest.TempPathFactory, path: Path, record: FileRecord, offset: int
) -> None:
    offset %= record.bytes
    damaged = flipped(path, offset, tmp_path_factory.getbasetemp() / "flipped")
    ranges = [wanted("double", 7, 9), wanted("weights", MIB // 2)]
    piece = offset // MIB
    if piece in {0, *touched(ranges)}:
        named = f"flipped: the xxh3-64 of its bytes {piece * MIB} to {min((piece + 1) * MIB, record.bytes)} is "
        with pytest.raises(DamagedFileError, match=named):
            SlabFile(damaged, record).read(ranges)
    else:
        SlabFile(damaged, record).read(ranges)
        assert all(map(is_right, ranges))


@pytest.mark.parametrize("size", [0, 5, DATA_START, MIB, -1, 1])
def test_a_file_of_another_length_is_damage(tmp_path: Path, path: Path, size: int) -> None:
    data = path.read_bytes()
    (tmp_path / "file").write_bytes(data + b"\0" if size == 1 else data[:size])
    with pytest.raises(DamagedFileError, match=rf"has \d+ bytes, {len(data)} were committed"):
        SlabFile(tmp_path / "file", hash_file(path)).read([wanted("scalar")])
    (tmp_path / "file").unlink()
    with pytest.raises(DamagedFileError, match="is missing"):
        SlabFile(tmp_path / "file", hash_file(path)).read([wanted("scalar")])
