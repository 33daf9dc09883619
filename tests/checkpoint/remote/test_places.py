"""One set of promises, kept by every kind of place: list, put, open, drop, and what is committed there."""

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.checkpoint_files import (
    checkpoint_files,
    commit_file,
    rank_part,
    rest_file,
    slab_files,
    small_state_file,
    weights_file,
)
from cpsr.checkpoint.files import hash_file
from cpsr.checkpoint.manifest import COMMIT, FileRecord
from cpsr.checkpoint.remote.copies import scan, upload, verify
from cpsr.checkpoint.remote.place import CopyDamagedError, Place, open_place
from cpsr.errors import CheckpointError, ConfigError, RecoveryError, RunMismatchError, TargetError
from tests.checkpoint.remote.conftest import (
    OTHER_RUN,
    RUN,
    Faults,
    commit,
    committed_at,
    copied_run,
    copy_newest,
    fetched,
    folder_of,
    new_run,
    overwrite,
    remove,
    target_at,
)

FOLDER = "step-0000000010"
REGIONS = 12  # of a large file


def kind_of(place: Place) -> str:
    return place.shown.split(":")[0]


# Files


def test_list_put_open_drop(tmp_path: Path, place: Place) -> None:
    assert place.list() == []
    assert place.list(FOLDER) == []
    place.make(FOLDER)
    place.make(FOLDER)
    for data in (b"first", b"", b"second"):
        place.write(FOLDER, COMMIT, data)
    (tmp_path / "large").write_bytes(b"a" * 5_000_000 + b"b" * 3_000_000)
    (tmp_path / "empty").touch()
    for name in ("large", "empty"):
        record = hash_file(tmp_path / name)
        place.put(FOLDER, tmp_path / name, record)
        assert b"".join(place.open(FOLDER, name, record)) == (tmp_path / name).read_bytes()
        place.make("copy")
        place.repeat("copy", name, FOLDER, record)
        assert place.read("copy", name) == (tmp_path / name).read_bytes()
    assert sorted(place.list()) == ["copy", FOLDER]
    assert place.list(FOLDER) == [COMMIT, "empty", "large"]
    assert place.read(FOLDER, COMMIT) == b"second"
    for name in ("copy", FOLDER, FOLDER):
        place.drop(name)
    assert place.list() == []


def test_what_is_not_what_was_recorded_is_damage(tmp_path: Path, place: Place) -> None:
    """Before a byte is given out where the size differs; after the last one where the hash does."""
    place.make(FOLDER)
    (tmp_path / "large").write_bytes(bytes(3_000_000))
    record = hash_file(tmp_path / "large")
    with pytest.raises(CopyDamagedError, match="large is missing"):
        place.check(FOLDER, "large", record)
    place.put(FOLDER, tmp_path / "large", record)
    overwrite(place, FOLDER, "large", bytes(2_999_999))
    with pytest.raises(CopyDamagedError, match="has 2999999 bytes, 3000000 were committed"):
        next(place.open(FOLDER, "large", record))
    overwrite(place, FOLDER, "large", bytes(2_999_999) + b"x")
    pieces = place.open(FOLDER, "large", record)
    with pytest.raises(CopyDamagedError, match="large is not what was committed"):
        assert sum(map(len, pieces)) == 3_000_000
    with pytest.raises(CopyDamagedError, match="large is not what was committed"):
        place.put(FOLDER, tmp_path / "large", FileRecord.of_pieces(3_000_000, "0" * 48))


def test_what_is_absent_is_reported_so(place: Place) -> None:
    with pytest.raises(CopyDamagedError, match=FOLDER):
        place.read(FOLDER, COMMIT)
    place.make(FOLDER)
    with pytest.raises(CopyDamagedError, match=COMMIT):
        place.read(FOLDER, COMMIT)


# Copies


def test_a_copy_is_the_checkpoint_byte_for_byte(tmp_path: Path, place: Place) -> None:
    assert fetched(place, tmp_path / "empty") is None
    assert not (tmp_path / "empty" / "run.json").exists()
    directory = commit(new_run(tmp_path / "run"), 10)
    assert upload(place, directory).total_bytes == sum(path.stat().st_size for path in slab_files(directory))
    (folder,) = place.list()
    assert set(place.list(folder)) == {path.name for path in checkpoint_files(directory)} | {"run.json"}
    for path in [*checkpoint_files(directory), tmp_path / "run" / "run.json"]:
        assert place.read(folder, path.name) == path.read_bytes()
    assert verify(place) == []
    assert fetched(place, tmp_path / "new") == 10
    assert (tmp_path / "new" / "run.json").read_bytes() == (tmp_path / "run" / "run.json").read_bytes()


def test_only_copies_are_listed(tmp_path: Path, place: Place) -> None:
    upload(place, commit(new_run(tmp_path / "run"), 10))
    (folder,) = place.list()
    for name in (FOLDER, "other", "damaged-" + folder, folder + "0", folder.replace(RUN, "a/b")):
        if "/" not in name:
            place.make(name)
            place.write(name, COMMIT, b"x")
    found = scan(place)
    assert list(found.usable) == [folder]
    assert (found.damaged, found.unfinished) == ({}, [])
    assert verify(place) == []


def test_the_commit_record_comes_last_and_the_manifests_after_the_files(tmp_path: Path, place: Place) -> None:
    directory = commit(new_run(tmp_path / "run", world_size=2), 10)
    order: list[str] = []
    faults = Faults(place)
    for call in itertools.count(1, {"memory": 1, "file": 1, "s3": 5}[kind_of(place)]):
        faults.arm(call)
        try:
            upload(place, directory)
        except TargetError:
            faults.arm()
            for folder in place.list():
                order += [name for name in place.list(folder) if name not in order]
        else:
            break
    files = [*slab_files(directory), rank_part(directory), rank_part(directory, 1)]
    # The commit record comes last of all calls but for its being read back.
    expected = [path.name for path in (*files, tmp_path / "run" / "run.json", commit_file(directory))]
    assert [name for name in expected if name in order] == order
    assert kind_of(place) == "s3" or order == expected


def test_a_torn_put_leaves_the_newest_copy_whole(tmp_path: Path, place: Place) -> None:
    """The place goes away at every single call of a life that copies, in the middle of writes too."""
    store = new_run(tmp_path / "run")[0]
    for iteration in (10, 20):
        commit([store], iteration)
        copy_newest(place, store)
    commit([store], 30)
    before = {folder: {file: place.read(folder, file) for file in place.list(folder)} for folder in place.list()}
    faults, fates = Faults(place), list[int]()
    for call in itertools.count(1, {"memory": 1, "file": 3, "s3": 60}[kind_of(place)]):
        faults.arm(call)
        reports = copy_newest(place, store)
        if faults.calls < call:
            break
        assert "does not answer" in reports[-1].message, call
        faults.arm()
        there = committed_at(place)
        assert there in ([10, 20], [10, 20, 30], [20, 30]), (call, there)
        assert fetched(place, tmp_path / f"new-{call}") == there[-1], call
        fates.append(there[-1])
        copy_newest(place, store)
        assert committed_at(place) == [20, 30]
        assert len(place.list()) == 2
        assert verify(place) == []
        for folder in place.list():
            place.drop(folder)
        for folder, files in before.items():
            place.make(folder)
            for file, data in files.items():
                overwrite(place, folder, file, data)
    assert set(fates) == {20, 30}
    assert fates == sorted(fates)
    assert call > 60


def test_a_full_place_loses_nothing_and_has_room_again_for_the_next(tmp_path: Path, place: Place) -> None:
    store = new_run(tmp_path / "run")[0]
    commit([store], 10)
    copy_newest(place, store, keep=1)
    faults = Faults(place)
    faults.free_bytes = 4000  # less than the largest file
    commit([store], 20)
    for _ in range(2):
        (report,) = copy_newest(place, store, keep=1)
        assert (report.kind, report.iteration) == ("target copy failed", 20)
        assert "No space left on device" in report.message
        assert committed_at(place) == [10]
    faults.free_bytes = None
    assert len(place.list()) == 2
    commit([store], 30)
    copy_newest(place, store, keep=1)
    assert committed_at(place) == [30]
    assert len(place.list()) == 1
    assert fetched(place, tmp_path / "new") == 30


def test_two_runs_at_one_place(tmp_path: Path, place: Place) -> None:
    """Both find it empty at the same moment: the first to commit has it, and the other one is told."""
    store = new_run(tmp_path / "run")[0]
    mine, other = commit([store], 10), commit(new_run(tmp_path / "other", run_id=OTHER_RUN), 20)
    faults = Faults(place)
    faults.arm(before={12: lambda: upload(place, other)})
    with pytest.raises(RunMismatchError, match="give each run a target of its own"):
        upload(place, mine)
    assert [one.run_id for one in scan(place).usable.values()] == [OTHER_RUN]
    faults.arm()
    (report,) = copy_newest(place, store)
    assert report.kind == "target copy failed"
    assert "holds copies of another run" in report.message
    with pytest.raises(RunMismatchError, match="holds copies of another run"):
        target_at(place, tmp_path / "run").fetch(store, ())
    assert verify(place) == []
    assert fetched(place, tmp_path / "new") == 20
    # What the first has left is in nobody's way, and goes with the next copy of the second.
    assert len(place.list()) == 2
    (second,) = new_run(tmp_path / "other", run_id=OTHER_RUN, life=2)
    commit([second], 30)
    copy_newest(place, second)
    assert committed_at(place) == [20, 30]
    assert len(place.list()) == 2


@pytest.mark.parametrize("same", [False, True])
def test_two_jobs_of_one_run_never_mix_their_bytes(tmp_path: Path, place: Place, same: bool) -> None:
    """They commit the same iteration; at any moment of the one's copy the other one makes its own."""
    mine, other = new_run(tmp_path / "mine"), new_run(tmp_path / "other", life=2)
    directories = [commit(mine, 10), commit(other, 10)]
    if same:
        shutil.rmtree(tmp_path / "other")
        shutil.copytree(tmp_path / "mine", tmp_path / "other")
    faults = Faults(place)
    for call in itertools.count(1, {"memory": 1, "file": 5, "s3": 20}[kind_of(place)]):
        faults.arm(before={call: lambda: upload(place, directories[1])})
        upload(place, directories[0])
        met = not faults.before
        faults.arm()
        assert len(scan(place).usable) == 1 + (met and not same), call
        assert scan(place).damaged == {}
        assert verify(place) == [], call
        for folder in place.list():
            place.drop(folder)
        if not met:
            break
    assert call > 25


def test_a_job_that_removes_what_another_one_is_copying_is_noticed(tmp_path: Path, place: Place) -> None:
    directory = commit(new_run(tmp_path / "run"), 10)
    lost = small_state_file(directory).name
    faults = Faults(place)
    faults.arm(before={12: lambda: remove(place, place.list()[0], lost)})
    with pytest.raises(TargetError, match="is gone: another job removes files"):
        upload(place, directory)
    assert committed_at(place) == []


def altered(data: bytes) -> dict[str, bytes]:
    """A file with one byte changed, in small files each and in large ones one in every region; cut off; longer."""
    step = 5 if len(data) <= 65 else max(len(data) // REGIONS, 1)
    found = {f"byte {at}": data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :] for at in range(0, len(data), step)}
    found |= {f"cut at {at}": data[:at] for at in (0, len(data) // 2, len(data) - 1)}
    return found | {"longer": data + b"\0"}


def test_damage_to_each_class_of_bytes(tmp_path: Path, place: Place) -> None:
    """Whatever is damaged there, it is found and named, the older copy is used, and nothing of it stays behind."""
    copied_run(tmp_path / "run", place)
    folder, tried = folder_of(place, 20), 0
    for file in place.list(folder):
        data = place.read(folder, file)
        for how, content in itertools.islice(altered(data).items(), 0, None, 15 if kind_of(place) == "s3" else 1):
            overwrite(place, folder, file, content)
            problems = verify(place)
            assert problems, (file, how)
            assert all(folder in problem for problem in problems), (file, how)
            assert_older_is_used(place, tmp_path, f"{file} {how}")
            tried += 1
        remove(place, folder, file)
        assert_older_is_used(place, tmp_path, f"{file} is gone")
        overwrite(place, folder, file, data)
    assert fetched(place, tmp_path / "new") == 20
    assert tried > (6 if kind_of(place) == "s3" else 100)


def assert_older_is_used(place: Place, base: Path, what: str) -> None:
    assert fetched(place, base / "new") == 10, what
    shutil.rmtree(base / "new")


def test_the_newest_stay_by_their_commits_and_states_that_were_given_up_go(tmp_path: Path, place: Place) -> None:
    store = new_run(tmp_path / "run")[0]
    for iteration in (10, 20, 30):
        commit([store], iteration)
        copy_newest(place, store)
    assert committed_at(place) == [20, 30]
    store.abandon_after(10, "a test")
    assert target_at(place, tmp_path / "run").fetch(store, ()) is None  # they do not come back
    copy_newest(place, store)
    assert committed_at(place) == [10]  # the state that holds is copied again before they go
    commit([store], 15)
    copy_newest(place, store)
    commit([store], 20)  # the same iteration as one that was given up
    copy_newest(place, store)
    assert committed_at(place) == [15, 20]
    assert fetched(place, tmp_path / "new") == 20


def identity(directory: Path) -> Path:
    return directory.parents[1] / "run.json"


@pytest.mark.parametrize("chosen", [rest_file, rank_part, commit_file, identity])
def test_a_damaged_checkpoint_is_never_committed_at_the_place(
    tmp_path: Path, place: Place, chosen: Callable[[Path], Path]
) -> None:
    directory = commit(new_run(tmp_path / "run"), 10)
    file = chosen(directory)
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if chosen is not identity else 0] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=re.escape(file.name)):
        upload(place, directory)
    assert committed_at(place) == []


def test_what_a_link_leads_to_is_not_sent(tmp_path: Path, place: Place) -> None:
    directory = commit(new_run(tmp_path / "run"), 10)
    (tmp_path / "secret").write_bytes(b"of somebody else")
    file = small_state_file(directory)
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=re.escape(file.name)):
        upload(place, directory)
    sent = [place.read(folder, name) for folder in place.list() for name in place.list(folder)]
    assert not [data for data in sent if b"somebody" in data]


# URLs, and what only a place on this machine can do


def test_user_and_password_are_never_shown() -> None:
    place = open_place("memory://user:secret@x/run")
    assert place.shown == "memory://x/run"
    with pytest.raises(ConfigError) as refused:
        open_place("nosuchsystem://user:secret@x/run")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [("nosuchsystem://x", "nosuchsystem"), ("simplecache::memory://x", "chain of file systems")],
)
def test_urls_that_are_not_usable(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_place(url)


def test_a_target_and_a_run_directory_do_not_lie_in_one_another(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "x" / ".." / "run"):
        with pytest.raises(ConfigError, match="lie in one another"):
            open_place(f"file://{target}", tmp_path / "run")
    open_place(f"file://{tmp_path}/target", tmp_path / "run")


def test_the_folder_above_a_local_target_must_exist(tmp_path: Path) -> None:
    """A mount that is missing must not be filled underneath."""
    place = open_place(f"file://{tmp_path}/mount/target")
    assert place.list() == []
    with pytest.raises(TargetError):
        place.make(FOLDER)
    assert not (tmp_path / "mount").exists()


def test_links_at_a_local_target_are_not_followed(tmp_path: Path, local: Place) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / COMMIT).write_bytes(b"of somebody else")
    (tmp_path / "target" / "checkpoints").mkdir(parents=True)
    (tmp_path / "target" / "checkpoints" / FOLDER).symlink_to(outside)
    assert local.list() == []
    with pytest.raises(TargetError):
        local.list(FOLDER)
    with pytest.raises(CopyDamagedError):
        local.read(FOLDER, COMMIT)
    with pytest.raises(TargetError):
        local.write(FOLDER, COMMIT, b"ours")
    with pytest.raises(TargetError):
        local.drop(FOLDER)
    assert (outside / COMMIT).read_bytes() == b"of somebody else"


def test_what_is_read_back_differently_is_refused(
    tmp_path: Path, local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = commit(new_run(tmp_path / "run"), 10)
    # A disk that confirms a file and keeps another: the read finds what the test has put there.
    real, broken = os.fsync, tmp_path / "target"

    def losing(descriptor: int) -> None:
        real(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_relative_to(broken) and rest_file(directory).name in path.name:
            with path.open("r+b") as file:
                file.seek(40)
                file.write(b"\xff")

    monkeypatch.setattr(os, "fsync", losing)
    with pytest.raises(TargetError, match="read back differs"):
        upload(local, directory)
    assert committed_at(local) == []


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
def test_what_is_no_plain_file_of_its_size_is_damage(
    tmp_path: Path, local: Place, damage: Callable[[Path], None]
) -> None:
    directory = commit(new_run(tmp_path / "run"), 10)
    upload(local, directory)
    name = weights_file(directory).name
    damage(tmp_path / "target" / "checkpoints" / local.list()[0] / name)
    with pytest.raises(RecoveryError, match=re.escape(name)):
        fetched(local, tmp_path / "new")
    assert not list((tmp_path / "new" / "checkpoints").rglob(".*"))
