"""Every byte of a committed checkpoint is guarded: flips and truncations are found, named, and survived."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.direct_file import DIRECT
from cpsr.checkpoint.manifest import FileRecord, commit_record
from cpsr.checkpoint.store import CheckpointStore, verify_run
from tests.checkpoint.conftest import save

FILES = (
    "COMMIT",
    "manifest.json",
    "rank-00000.json",
    "rank-00000.params.safetensors",
    "rank-00000.moments.safetensors",
    "rank-00000.extra.safetensors",
)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.fixture
def committed(store: CheckpointStore) -> Path:
    save(store, 10)
    save(store, 20)
    return store.directory


def test_every_byte_of_the_small_files_and_every_7th_of_the_large(committed: Path) -> None:
    directory = committed / "step-0000000020"
    for name in FILES:
        path = directory / name
        original = path.read_bytes()
        large = name.endswith(".safetensors")
        for offset in range(0, len(original), 7 if large else 1 if name == "COMMIT" else 97):
            if large and original[offset : offset + 97] == b" " * 97:  # of what fills the header up
                continue
            flip(path, offset)
            assert len(verify_run(committed.parent)) == 1, (name, offset)
            path.write_bytes(original)
    assert verify_run(committed.parent) == []


def test_a_directory_without_checkpoints_is_a_problem_and_an_empty_run_is_not(tmp_path: Path) -> None:
    assert "no such directory" in verify_run(tmp_path)[0].what
    (tmp_path / "checkpoints").mkdir()
    assert verify_run(tmp_path) == []


def test_verifying_asks_the_disk(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: dict[str, int] = {}
    real = os.open

    def recording(path: Any, flag: int, *args: Any, **options: Any) -> int:
        flags[Path(path).name] = flag & DIRECT
        return real(path, flag, *args, **options)

    monkeypatch.setattr(os, "open", recording)
    assert verify_run(committed.parent) == []
    assert {flags[name] for name in FILES if name.endswith(".safetensors")} == {DIRECT}


def rewrite_records(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the records of the files, with the hashes above them, as a writer would that errs."""
    path = directory / "rank-00000.json"
    record = json.loads(path.read_bytes())
    for file in record["files"].values():
        edit(file)
    path.write_text(json.dumps(record))
    manifest = json.loads((directory / "manifest.json").read_bytes())
    manifest["ranks"]["0"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    data = json.dumps(manifest).encode()
    (directory / "manifest.json").write_bytes(data)
    (directory / "COMMIT").write_bytes(commit_record(data))


def test_a_wrong_hash_of_a_piece_is_found(committed: Path) -> None:
    def alter(file: dict[str, Any]) -> None:
        altered = ("1" if file["pieces"][0] == "0" else "0") + file["pieces"][1:]
        file |= FileRecord.of_pieces(file["bytes"], altered).model_dump()

    rewrite_records(committed / "step-0000000020", alter)
    problems = verify_run(committed.parent)
    assert sorted(problem.file.name for problem in problems) == sorted(FILES[3:])
    assert all("the xxh3-64 of its bytes 0 to " in problem.what for problem in problems)
