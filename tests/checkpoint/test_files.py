"""The order of the durable steps, observed at the system calls, and what is left after an error."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from cpsr.checkpoint import files
from cpsr.checkpoint.direct_file import DIRECT, HASHED_PIECE_BYTES, hash_pieces
from cpsr.checkpoint.files import for_each, hash_file, read_bytes, write_tensors
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.tensor_file import LARGE_BYTES
from cpsr.errors import SaveError
from tests.checkpoint.conftest import make_snapshot


def test_every_file_is_forced_to_the_disk_before_it_gets_its_name_and_the_commit_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, 0, 1, "run", 1)
    store.prepare()
    steps: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        steps.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def recording_replace(source: Any, target: Any) -> None:
        steps.append(("rename", Path(target).name))
        assert steps[-2] == ("fsync", Path(source).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    store.write(make_snapshot(10))
    assert store.commit(10, 1.0, threading.Event()).committed
    kept = [step for step in steps if not step[1].startswith(".")]
    directory = ("fsync", "step-0000000010")
    assert kept == [
        ("fsync", "checkpoints"),
        ("fsync", "checkpoints"),
        ("rename", "rank-00000.params-0000000010-1.0.safetensors"),
        ("rename", "rank-00000.moments-0000000010-1.0.safetensors"),
        ("rename", "rank-00000.extra-0000000010-1.0.safetensors"),
        ("fsync", "slabs"),
        ("rename", "rank-00000-1.0.json"),
        directory,
        ("fsync", "slabs"),
        directory,
        ("fsync", "checkpoints"),
        ("rename", "COMMIT"),
        directory,
    ]


def test_an_older_file_is_untouched_by_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_bytes(path, b"old")

    def refusing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(OSError, match="Input/output"):
        files.write_bytes(path, b"new")
    with pytest.raises(OSError, match="Input/output"):
        files.write_tensors(tmp_path / "tensors", {"a": torch.ones(3)})
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_small_file_that_the_disk_confirms_and_loses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    path = tmp_path / "file"
    files.write_bytes(path, b"old")
    write = os.write

    def losing(descriptor: int, data: bytes) -> int:
        write(descriptor, bytes(data)[:kept])
        return len(data)

    monkeypatch.setattr(os, "write", losing)
    with pytest.raises(OSError, match="what was read back differs"):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: bytes(len(data)),
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\xff" * 8 + data[8:],  # a header for which no memory would suffice
        lambda data: data.replace(b'"a"', b'"b"'),
        lambda data: data.replace(b"F32", b"I32"),
        lambda data: data[:-1] + b"x",
    ],
)
def test_tensors_that_read_back_differently_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]
) -> None:
    fsync = os.fsync

    def spoiling(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        path.write_bytes(spoil(path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spoiling)
    with pytest.raises(SaveError, match="what was read back differs"):
        files.write_tensors(tmp_path / "tensors", {"a": torch.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_reading_back_names_where_it_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def spoiling(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        content = bytearray(path.read_bytes())
        content[3 * HASHED_PIECE_BYTES - 1] ^= 1
        path.write_bytes(content)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spoiling)
    with pytest.raises(SaveError, match=f"differs from what was written from byte {2 * HASHED_PIECE_BYTES} on"):
        files.write_tensors(tmp_path / "tensors", {"a": torch.ones(HASHED_PIECE_BYTES)})
    assert list(tmp_path.iterdir()) == []


def test_the_hash_of_a_file_is_that_of_the_hashes_of_its_mebibytes(tmp_path: Path) -> None:
    content = os.urandom(2 * HASHED_PIECE_BYTES + 5)
    (tmp_path / "file").write_bytes(content)
    starts = range(0, len(content), HASHED_PIECE_BYTES)
    hashes = [xxhash.xxh3_64_digest(content[start : start + HASHED_PIECE_BYTES]) for start in starts]
    found = files.hash_file(tmp_path / "file")
    assert (found.bytes, found.pieces) == (len(content), b"".join(hashes).hex())
    assert found.xxh3_128 == xxhash.xxh3_128_hexdigest(b"".join(hashes))


def test_reading_back_asks_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: dict[str, list[int]] = {}
    real = os.open

    def recording(path: Any, flag: int, *args: Any, **options: Any) -> int:
        flags.setdefault(Path(path).name.split(".")[1], []).append(flag & DIRECT)
        return real(path, flag, *args, **options)

    monkeypatch.setattr(os, "open", recording)
    files.write_tensors(tmp_path / "tensors", {"a": torch.ones(3)})
    assert flags == {"tensors": [DIRECT, DIRECT]}


def test_bytes_that_were_hashed_in_memory_are_hashed_again_only_when_they_are_read_back(tmp_path: Path) -> None:
    values = torch.rand((LARGE_BYTES >> 2) + 77)
    address, known = values.data_ptr(), hash_pieces(values.view(torch.uint8).numpy().data)
    path = tmp_path / "file.safetensors"
    record = write_tensors(path, {"values": values}, hashed={address: (values.nbytes, known)})
    assert record == hash_file(path)
    assert torch.equal(load_file(path)["values"], values)
    wrong = known[:8] + bytes(8) + known[16:]
    with pytest.raises(SaveError, match=f"from byte {2 * HASHED_PIECE_BYTES} on"):  # behind a header of one MiB
        write_tensors(tmp_path / "other", {"values": values}, hashed={address: (values.nbytes, wrong)})


def test_tensors_that_go_on_behind_what_was_hashed_are_hashed_themselves(tmp_path: Path) -> None:
    """Its last MiB is a part of theirs: two experts of a rank follow each other."""
    values = torch.rand((LARGE_BYTES >> 2) + HASHED_PIECE_BYTES // 4)
    length = LARGE_BYTES + HASHED_PIECE_BYTES // 2
    known = hash_pieces(values.view(torch.uint8).numpy()[:length].data)
    path = tmp_path / "file.safetensors"
    assert write_tensors(path, {"values": values}, hashed={values.data_ptr(): (length, known)}) == hash_file(path)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 100])
@pytest.mark.parametrize("waits", [True, False])
def test_calls_on_many_files_give_their_results_in_order(
    tmp_path: Path, count: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WAIT_SECONDS", 0.0 if waits else 60.0)
    paths = [tmp_path / str(number) for number in range(count)]
    for path in paths:
        path.write_bytes(path.name.encode())
    assert list(for_each(read_bytes, paths)) == [path.name.encode() for path in paths]
    for path in paths[-1:]:
        path.unlink()
        with pytest.raises(FileNotFoundError, match=path.name):
            list(for_each(read_bytes, paths))
