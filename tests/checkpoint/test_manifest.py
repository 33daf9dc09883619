"""The record of a file in a manifest."""

import json
from typing import Any

import pytest
import xxhash
from pydantic import ValidationError

from cpsr.checkpoint.direct_file import HASHED_PIECE_BYTES
from cpsr.checkpoint.manifest import FileRecord, Manifest, RankRecord


@pytest.mark.parametrize(("size", "pieces"), [(0, 0), (1, 1), (HASHED_PIECE_BYTES, 1), (HASHED_PIECE_BYTES + 1, 2)])
def test_a_record_has_the_hash_of_every_piece(size: int, pieces: int) -> None:
    hashes = "0123456789abcdef" * pieces
    data = {"bytes": size, "xxh3_128": xxhash.xxh3_128_hexdigest(bytes.fromhex(hashes)), "pieces": hashes}
    assert json.loads(FileRecord.model_validate(data).to_bytes()) == data
    assert FileRecord.of_pieces(size, hashes) == FileRecord.model_validate(data)
    with pytest.raises(ValidationError, match="another hash than that of its pieces"):
        FileRecord.model_validate(data | {"xxh3_128": "0" * 32})
    for wrong in ("0" * 16 * (pieces + 1), "0" * (16 * pieces + 1), "G" + "0" * (16 * pieces - 1), "A" * 16):
        with pytest.raises(ValidationError, match="pieces"):
            FileRecord.model_validate(data | {"pieces": wrong})


@pytest.mark.parametrize("run_id", ["../../x", "a/b", "", "a" * 65, "a\n"])
def test_an_id_is_no_path(run_id: str) -> None:
    rank = RankRecord(sha256="0" * 64, files={})
    counts = {"life": 0, "attempt": 0, "iteration": 1, "world_size": 1, "sequence": 1}
    made: dict[str, Any] = {**counts, "label": None, "created_unix_seconds": 0.0, "ranks": {0: rank}}
    with pytest.raises(ValueError, match="run_id"):
        Manifest(run_id=run_id, **made)
