"""The hashes of a file: of the whole and of every MiB, however its bytes come."""

import numpy
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.file_hash import HASHED_PIECE_BYTES, Digest, FileHash, piece_hash, pieces_in

MIB = HASHED_PIECE_BYTES
DATA = numpy.random.default_rng(0).integers(0, 256, 3 * MIB + 5, numpy.uint8).tobytes()


@given(size=st.integers(0, len(DATA)) | st.sampled_from([MIB, 2 * MIB]), part=st.integers(4096, 2 * MIB))
@settings(max_examples=40, deadline=None)
def test_they_are_those_of_the_bytes_in_parts_of_any_size(size: int, part: int) -> None:
    data, found, whole = DATA[:size], FileHash(pieces=True), FileHash()
    for start in range(0, size, part):
        found.take(memoryview(data)[start : start + part])
        whole.take(memoryview(data)[start : start + part])
    expected = [xxhash.xxh3_64_hexdigest(data[start : start + MIB]) for start in range(0, size, MIB)]
    digest = found.digest()
    assert digest == whole.digest() == Digest(size, xxhash.xxh3_128_hexdigest(data))
    assert digest.pieces == "".join(expected)
    assert [piece_hash(digest.pieces, index) for index in range(pieces_in(size))] == expected
    assert whole.digest().pieces is None


@pytest.mark.parametrize(("size", "pieces"), [(0, 0), (1, 1), (MIB, 1), (MIB + 1, 2)])
def test_the_last_piece_may_be_shorter(size: int, pieces: int) -> None:
    assert pieces_in(size) == pieces
