"""Copies at a target: committed last, whole or not there, bit for bit."""

import itertools
import os
from pathlib import Path

import pytest

from cpsr.checkpoint.manifest import COMMIT
from cpsr.checkpoint.remote.catalogue import scan, verify
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.remote.upload import CopyStoppedError, retain, set_aside, upload
from cpsr.errors import CheckpointError, CPSRError, RunMismatchError, TargetError
from tests.checkpoint.remote.conftest import (
    RUN,
    FaultySystem,
    commit,
    committed_at,
    fetched,
    identity_of,
    new_run,
    send,
)


def test_a_copy_is_the_checkpoint_byte_for_byte(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    place = open_place(url)
    uploaded = send(place, run, directory)
    assert uploaded.bytes == sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert set(place.files(directory.name)) == {path.name for path in directory.iterdir()} | {"run.json"}
    for path in directory.iterdir():
        assert place.read(directory.name, path.name) == path.read_bytes()
    assert verify(place) == []
    assert fetched(place, tmp_path / "new") == 10


def test_two_ranks_copy_as_one(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    place = open_place(url)
    send(place, run, commit(new_run(run, world_size=2), 10))
    assert len([name for name in place.files("step-0000000010") if name.endswith(".safetensors")]) == 6
    assert verify(place) == []


def test_the_commit_record_comes_last_and_the_manifests_after_the_files(
    tmp_path: Path, faulty: type[FaultySystem]
) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run, world_size=2), 10)
    place = open_place("faulty://bucket/target")
    order: list[str] = []
    for call in itertools.count(1):
        faulty.reset()
        faulty.arm(call)
        try:
            send(place, run, directory)
        except TargetError:
            faulty.arm(None)
            order += [name for name in place.files(directory.name) if name not in order]
        else:
            break
    parts = ("extra.safetensors", "moments.safetensors", "params.safetensors")
    files = [f"rank-{rank:05d}.{part}" for rank in range(2) for part in parts]
    # The commit record comes last of all calls but for its being read back.
    assert order == ["run.json", *files, "rank-00000.json", "rank-00001.json", "manifest.json", COMMIT]


def test_interrupted_at_every_call_the_newest_copy_is_whole(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    """The target goes away at every single call of an upload and a retention pass, in the middle of writes too."""
    run = tmp_path / "run"
    stores = new_run(run)
    directories = [commit(stores, iteration) for iteration in (10, 20, 30)]
    place = open_place("faulty://bucket/target")
    fates = set()
    for call in itertools.count(1):
        faulty.reset()
        for directory in directories[:2]:
            send(place, run, directory)
        faulty.arm(call)
        try:
            send(place, run, directories[2])
            retain(place, RUN, 2)
            break
        except TargetError:
            faulty.arm(None)
        there = committed_at(place) if not scan(place).damaged else [10, 20]  # a commit record cut off is none
        assert there in ([10, 20], [10, 20, 30], [20, 30]), (call, there)
        newest = fetched(place, tmp_path / f"new-{call}")
        assert newest == there[-1], call
        fates.add(newest)
        send(place, run, directories[2])
        retain(place, RUN, 2)
        assert committed_at(place) == [20, 30]
        assert len(place.folders()) == 2
        assert verify(place) == []
    assert fates == {20, 30}
    assert call > 40


def test_one_call_that_fails_is_one_copy_that_is_tried_again(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    place = open_place("faulty://bucket/target")
    faulty.arm(9, heals=True)
    with pytest.raises(TargetError, match=r"faulty://bucket/target/checkpoints/step-0000000010"):
        send(place, run, directory)
    assert committed_at(place) == []
    send(place, run, directory)
    assert fetched(place, tmp_path / "new") == 10


@pytest.mark.parametrize("name", ["rank-00000.moments.safetensors", "rank-00000.json", "manifest.json", COMMIT])
def test_a_damaged_checkpoint_is_never_committed_at_the_target(tmp_path: Path, url: str, name: str) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    data = bytearray((directory / name).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / name).write_bytes(data)
    place = open_place(url)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        send(place, run, directory)
    assert committed_at(place) == []


def test_what_a_link_leads_to_is_not_sent(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    (tmp_path / "secret").write_bytes(b"of somebody else")
    (directory / "rank-00000.extra.safetensors").unlink()
    (directory / "rank-00000.extra.safetensors").symlink_to(tmp_path / "secret")
    place = open_place(url)
    with pytest.raises(CheckpointError, match=r"rank-00000\.extra\.safetensors cannot be read"):
        send(place, run, directory)
    sent = [place.read("step-0000000010", name) for name in place.files("step-0000000010")]
    assert not [data for data in sent if b"somebody" in data]


def test_what_is_read_back_differently_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    place = open_place(f"file://{tmp_path}/target")
    # A disk that confirms a file and keeps another: the read finds what the test has put there.
    real = os.fsync
    broken = tmp_path / "target" / "checkpoints" / directory.name

    def losing(descriptor: int) -> None:
        real(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(broken) and "moments" in path.name:
            with path.open("r+b") as file:
                file.seek(40)
                file.write(b"\xff")

    monkeypatch.setattr(os, "fsync", losing)
    with pytest.raises(TargetError, match="read back differs"):
        send(place, run, directory)
    assert committed_at(place) == []


def test_stopping_leaves_nothing_committed(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    for pieces in range(6):
        left = itertools.chain([False] * pieces, itertools.repeat(True))
        with pytest.raises(CopyStoppedError):
            upload(open_place(url), directory, identity_of(run), left.__next__)
        assert committed_at(open_place(url)) == []


def test_retention_keeps_the_newest_by_commit_and_removes_what_was_set_aside(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    stores = new_run(run)
    place = open_place(url)
    for iteration in (10, 20, 30):
        send(place, run, commit(stores, iteration))
    stores[0].abandon_after(15, "a test")
    set_aside(place, "step-0000000020", "a test")
    set_aside(place, "step-0000000030", "a test")
    assert committed_at(place) == [10]
    send(place, run, commit(stores, 15))
    assert committed_at(place) == [10, 15]
    assert sorted(retain(place, RUN, 2)) == ["step-0000000020", "step-0000000030"]
    send(place, run, commit(stores, 20))  # the same iteration as one that was given up
    assert retain(place, RUN, 2) == ["step-0000000010"]
    assert committed_at(place) == [15, 20]
    assert retain(place, RUN, 1) == ["step-0000000015"]
    assert fetched(place, tmp_path / "new") == 20


def test_another_runs_target_is_refused_and_untouched(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    first, second = tmp_path / "first", tmp_path / "second"
    send(place, first, commit(new_run(first), 10))
    stores = new_run(second, run_id="ab" * 16)
    with pytest.raises(RunMismatchError, match=f"is of the run '{RUN}', this is '{'ab' * 16}'"):
        scan(place, "ab" * 16)
    with pytest.raises(RunMismatchError):
        retain(place, "ab" * 16, 1)
    assert commit(stores, 10)
    assert fetched(place, tmp_path / "new") == 10


def test_a_run_that_writes_into_the_same_folder_meanwhile_keeps_it(tmp_path: Path) -> None:
    """Two runs find the target empty at the same moment."""
    place = open_place(f"file://{tmp_path}/target")
    first, second = tmp_path / "first", tmp_path / "second"
    mine, other = commit(new_run(first), 10), commit(new_run(second, run_id="ab" * 16), 10)
    asked = iter(range(100))

    def intrude() -> bool:
        if next(asked) == 3:
            place.write(mine.name, "run.json", identity_of(second).to_bytes())
        return False

    with pytest.raises(RunMismatchError, match="two runs have the same target"):
        upload(place, mine, identity_of(first), intrude)
    assert scan(place).copies == []
    send(place, second, other)
    assert [copy.identity.run_id for copy in scan(place).copies] == ["ab" * 16]


def test_what_another_run_has_begun_and_not_committed_is_in_nobodys_way(tmp_path: Path, url: str) -> None:
    """A run that died in its first copy, and whose disk is gone, must not keep its successor from starting."""
    place = open_place(url)
    first, second = tmp_path / "first", tmp_path / "second"
    directory = commit(new_run(first), 10)
    for pieces in range(4):
        stopped = itertools.chain([False] * pieces, itertools.repeat(True))
        with pytest.raises(CopyStoppedError):
            upload(place, directory, identity_of(first), stopped.__next__)
    assert fetched(place, tmp_path / "new") is None
    assert scan(place, "ab" * 16).unfinished == {directory.name: RUN}
    stores = new_run(second, run_id="ab" * 16)
    send(place, second, commit(stores, 20))
    assert retain(place, "ab" * 16, 2) == [directory.name]
    assert [copy.identity.run_id for copy in scan(place).copies] == ["ab" * 16]


def test_every_error_of_a_file_system_is_one_of_ours(tmp_path: Path, faulty: type[FaultySystem]) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    place = open_place("faulty://bucket/target")
    for call in range(1, 200):
        faulty.arm(call)
        try:
            send(place, run, directory)
        except CPSRError:
            continue
        break
    assert call > 20
