"""The record of a file in a manifest."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cpsr.checkpoint.direct_file import HASHED_PIECE_BYTES
from cpsr.checkpoint.manifest import FileRecord, Manifest, RankRecord

WHOLE = "0" * 32


@pytest.mark.parametrize(("size", "pieces"), [(0, 0), (1, 1), (HASHED_PIECE_BYTES, 1), (HASHED_PIECE_BYTES + 1, 2)])
def test_a_record_has_the_hash_of_every_piece(size: int, pieces: int) -> None:
    data = {"bytes": size, "xxh3_128": WHOLE, "pieces": "0123456789abcdef" * pieces}
    assert json.loads(FileRecord.model_validate(data).to_bytes()) == data
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
