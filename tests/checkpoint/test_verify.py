"""Every byte of a committed checkpoint is guarded: flips and truncations are found, named, and survived."""

import os
from pathlib import Path
from typing import Any

import pytest

from cpsr.benchmarks.harness.checkpoint_files import checkpoint_files, commit_file, edit_part, is_slab, slab_files
from cpsr.checkpoint.direct_file import DIRECT
from cpsr.checkpoint.manifest import FileRecord
from cpsr.checkpoint.store import CheckpointStore, verify_run
from tests.checkpoint.conftest import rank_manifests, save


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
    for path in checkpoint_files(directory):
        original = path.read_bytes()
        large = is_slab(path)
        for offset in range(0, len(original), 7 if large else 1 if path == commit_file(directory) else 97):
            if large and original[offset : offset + 97] == b" " * 97:  # of what fills the header up
                continue
            flip(path, offset)
            assert len(verify_run(committed.parent)) == 1, (path, offset)
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
    assert {flags[path.name] for path in slab_files(committed / "step-0000000020")} == {DIRECT}


def test_problems_keep_no_manifests(committed: Path) -> None:
    for path in slab_files(committed / "step-0000000020"):
        flip(path, path.stat().st_size - 1)
    before = rank_manifests()
    problems = verify_run(committed.parent)
    assert len(problems) == len(slab_files(committed / "step-0000000020"))
    assert rank_manifests() == before


def test_a_wrong_hash_of_a_piece_is_found(committed: Path) -> None:
    def alter(record: dict[str, Any]) -> None:
        for file in record["files"].values():
            altered = ("1" if file["pieces"][0] == "0" else "0") + file["pieces"][1:]
            file |= FileRecord.of_pieces(file["bytes"], altered).model_dump()

    edit_part(committed / "step-0000000020", alter)
    problems = verify_run(committed.parent)
    assert sorted(problem.file for problem in problems) == slab_files(committed / "step-0000000020")
    assert all("the xxh3-64 of its bytes 0 to " in problem.what for problem in problems)
