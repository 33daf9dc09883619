"""Copies sent to a target and fetched from it: committed last, whole or not there, bit for bit."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import COMMIT, commit_record
from cpsr.checkpoint.remote.copies import (
    read_copy,
    remove_old,
    scan,
    set_aside,
    verify,
)
from cpsr.checkpoint.remote.place import CopyDamagedError, CopyStoppedError, open_place
from cpsr.checkpoint.store import verify_run
from cpsr.errors import CheckpointError, RecoveryError, RunMismatchError, TargetError
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard, save
from tests.checkpoint.remote.conftest import (
    RUN,
    FaultySystem,
    commit,
    committed_at,
    fetched,
    new_run,
    send,
    target_at,
)

FOLDER = "step-0000000010"


# Sending


def test_a_copy_is_the_checkpoint_byte_for_byte(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    place = open_place(url)
    assert send(place, directory) == sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert set(place.files(directory.name)) == {path.name for path in directory.iterdir()} | {"run.json"}
    for path in directory.iterdir():
        assert place.read(directory.name, path.name) == path.read_bytes()
    assert verify(place) == []
    assert fetched(place, tmp_path / "new") == 10


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
            send(place, directory)
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
            send(place, directory)
        faulty.arm(call)
        try:
            send(place, directories[2])
            remove_old(place, RUN, 2)
            break
        except TargetError:
            faulty.arm(None)
        there = committed_at(place) if not scan(place).damaged else [10, 20]  # a commit record cut off is none
        assert there in ([10, 20], [10, 20, 30], [20, 30]), (call, there)
        newest = fetched(place, tmp_path / f"new-{call}")
        assert newest == there[-1], call
        fates.add(newest)
        send(place, directories[2])
        remove_old(place, RUN, 2)
        assert committed_at(place) == [20, 30]
        assert len(place.folders()) == 2
        assert verify(place) == []
    assert fates == {20, 30}
    assert call > 40


@pytest.mark.parametrize("name", ["rank-00000.moments.safetensors", "rank-00000.json", "manifest.json", COMMIT])
def test_a_damaged_checkpoint_is_never_committed_at_the_target(tmp_path: Path, url: str, name: str) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    data = bytearray((directory / name).read_bytes())
    data[len(data) // 2] ^= 1
    (directory / name).write_bytes(data)
    place = open_place(url)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        send(place, directory)
    assert committed_at(place) == []


def test_what_a_link_leads_to_is_not_sent(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    directory = commit(new_run(run), 10)
    (tmp_path / "secret").write_bytes(b"of somebody else")
    (directory / "rank-00000.extra.safetensors").unlink()
    (directory / "rank-00000.extra.safetensors").symlink_to(tmp_path / "secret")
    place = open_place(url)
    with pytest.raises(CheckpointError, match=r"rank-00000\.extra\.safetensors"):
        send(place, directory)
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
        send(place, directory)
    assert committed_at(place) == []


def test_retention_keeps_the_newest_by_commit_and_removes_what_was_set_aside(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    stores = new_run(run)
    place = open_place(url)
    for iteration in (10, 20, 30):
        send(place, commit(stores, iteration))
    stores[0].abandon_after(15, "a test")
    set_aside(place, "step-0000000020", "a test")
    set_aside(place, "step-0000000030", "a test")
    assert committed_at(place) == [10]
    send(place, commit(stores, 15))
    assert committed_at(place) == [10, 15]
    remove_old(place, RUN, 2)
    assert place.folders() == ["step-0000000010", "step-0000000015"]
    send(place, commit(stores, 20))  # the same iteration as one that was given up
    remove_old(place, RUN, 2)
    assert committed_at(place) == [15, 20]
    remove_old(place, RUN, 1)
    assert place.folders() == ["step-0000000020"]
    assert fetched(place, tmp_path / "new") == 20


def test_a_run_that_writes_into_the_same_folder_meanwhile_keeps_it(tmp_path: Path) -> None:
    """Two runs find the target empty at the same moment."""
    place = open_place(f"file://{tmp_path}/target")
    first, second = tmp_path / "first", tmp_path / "second"
    mine, other = commit(new_run(first), 10), commit(new_run(second, run_id="ab" * 16), 10)
    elsewhere = open_place(f"file://{tmp_path}/elsewhere")
    send(elsewhere, other)
    identity = elsewhere.read(other.name, "run.json")
    asked = iter(range(100))

    def intrude() -> bool:
        if next(asked) == 3:
            place.write(mine.name, "run.json", identity)
        return False

    place.stopped = intrude
    with pytest.raises(RunMismatchError, match="two runs have the same target"):
        send(place, mine)
    assert scan(place).usable == []
    send(place, other)
    assert [copy.manifest.run_id for copy in scan(place).usable] == ["ab" * 16]


def test_what_another_run_has_begun_and_not_committed_is_in_nobodys_way(tmp_path: Path, url: str) -> None:
    """A run that died in its first copy, and whose disk is gone, must not keep its successor from starting."""
    place = open_place(url)
    first, second = tmp_path / "first", tmp_path / "second"
    directory = commit(new_run(first), 10)
    for pieces in range(4):
        place.stopped = itertools.chain([False] * pieces, itertools.repeat(True)).__next__
        with pytest.raises(CopyStoppedError):
            send(place, directory)
    place.stopped = lambda: False
    assert fetched(place, tmp_path / "new") is None
    assert scan(place, "ab" * 16).unfinished == [directory.name]
    stores = new_run(second, run_id="ab" * 16)
    send(place, commit(stores, 20))
    remove_old(place, "ab" * 16, 2)
    assert place.folders() == ["step-0000000020"]
    assert [copy.manifest.run_id for copy in scan(place).usable] == ["ab" * 16]


# Fetching


def test_a_sparse_checkpoint_comes_back_with_experts_of_their_ages(tmp_path: Path, url: str) -> None:
    (store,) = new_run(tmp_path / "run")
    experts = frozenset(list(make_shard().operators)[1:])
    for iteration, saved in ((10, experts), (20, frozenset[str]())):
        save(store, iteration, Contents.sparse(experts, saved))
    place = open_place(url)
    send(place, store.directory / "step-0000000020")
    (back,) = new_run(tmp_path / "new", life=5)
    assert target_at(place, tmp_path / "new").fetch(back, ()) == 20
    assert verify_run(tmp_path / "new") == []
    shard = make_shard(999)
    back.load(20, shard)
    assert {name: one.iteration for name, one in shard.operators.items()} == {
        name: 10 if name in experts else 20 for name in shard.operators
    }
    expected = {name: make_shard(one.iteration).operators[name] for name, one in shard.operators.items()}
    assert_same_bits(shard, Shard(expected, make_shard(20).others))


def endless(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)


def linked(file: Path) -> None:
    file.rename(file.parents[3] / "moved")
    file.symlink_to(file.parents[3] / "moved")


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [endless, linked, piped, a_directory])
def test_what_is_no_plain_file_of_its_size_is_damage(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    place = open_place(f"file://{tmp_path}/target")
    send(place, commit(new_run(tmp_path / "run"), 10))
    damage(tmp_path / "target" / "checkpoints" / FOLDER / "rank-00000.params.safetensors")
    with pytest.raises(RecoveryError, match=r"rank-00000\.params"):
        fetched(place, tmp_path / "new")
    assert not list((tmp_path / "new" / "fetching").rglob(".*"))


def test_links_where_a_fetch_writes_lead_nowhere(tmp_path: Path, url: str) -> None:
    place = open_place(url)
    send(place, commit(new_run(tmp_path / "run"), 10))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank-00000.json").write_text("of somebody else")
    for link in ("fetching", f"fetching/{FOLDER}"):
        new = tmp_path / link.replace("/", "-")
        (new / link).parent.mkdir(parents=True)
        (new / link).symlink_to(outside)
        assert fetched(place, new) == 10
    assert [path.name for path in outside.iterdir()] == ["rank-00000.json"]


def test_manifests_cannot_name_files_outside(tmp_path: Path) -> None:
    """With hashes that fit: somebody may write at the target, but not into the run directory's surroundings."""
    place = open_place(f"file://{tmp_path}/target")
    send(place, commit(new_run(tmp_path / "run"), 10))
    folder = tmp_path / "target" / "checkpoints" / FOLDER
    (tmp_path / "target" / "evil").write_bytes(b"evil")
    digest = hash_file(tmp_path / "target" / "evil")
    for name in ("../../evil", "/etc/cpsr-evil", "rank-00000.params.safetensors/../x", "run.json"):
        record = json.loads((folder / "rank-00000.json").read_bytes())
        manifest = json.loads((folder / "manifest.json").read_bytes())
        record["files"] = {name: {"bytes": digest.bytes, "xxh3_128": digest.xxh3_128}}
        text = json.dumps(record).encode()
        manifest["ranks"]["0"] = {"sha256": hashlib.sha256(text).hexdigest(), "files": {name: digest.bytes}}
        whole = json.dumps(manifest).encode()
        forged = tmp_path / "target" / "checkpoints" / "step-0000000011"
        shutil.rmtree(forged, ignore_errors=True)
        shutil.copytree(folder, forged)
        for file, data in (("rank-00000.json", text), ("manifest.json", whole), ("COMMIT", commit_record(whole))):
            (forged / file).write_bytes(data)
        with pytest.raises(CopyDamagedError, match="is refused"):
            read_copy(place, forged.name)
