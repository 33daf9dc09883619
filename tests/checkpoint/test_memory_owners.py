"""Memory of runs that are gone is freed; of no run that lives, or whose owner is unclear."""

import json
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cpsr.checkpoint import memory_owners as orphans
from cpsr.checkpoint.file_lock import FileInUseError, FileLock
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_owners import (
    Owner,
    free_orphans,
    free_run,
    mark_owner,
    owner_of,
    owner_path,
    runs_in_memory,
)
from cpsr.checkpoint.memory_states import SlabSize

BUFFER_BYTES = 10_000


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """What stands for a machine's shared memory."""
    directory = tmp_path / "memory"
    directory.mkdir()
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return begun(tmp_path / "runs" / "first", "0123abcd")


def begun(run_dir: Path, run_id: str) -> Path:
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"run_id": run_id}))
    return run_dir


def left(memory: Path, run_id: str, run_dir: Path | None) -> list[MemoryFile]:
    """What a rank leaves that dies; still locked, as while it lives."""
    if run_dir is not None:
        mark_owner(run_id, run_dir, "node-1", memory)
    return SharedMemory(run_id, 0, 0, memory).files(["0", "1"], SlabSize.for_tensors([], BUFFER_BYTES))


def dead(memory: Path, run_id: str, run_dir: Path | None) -> None:
    for file in left(memory, run_id, run_dir):
        file.close(remove=False)


def standings(memory: Path) -> dict[str, str]:
    return {run.run_id: run.standing for run in runs_in_memory(memory)}


def owner_in(memory: Path, run_id: str = "0123abcd") -> Owner:
    owner = owner_of(run_id, memory)
    assert owner is not None
    return owner


def test_a_run_whose_directory_is_there_keeps_its_memory(memory: Path, run_dir: Path) -> None:
    dead(memory, "0123abcd", run_dir)
    before = sorted(memory.iterdir())
    assert standings(memory) == {"0123abcd": "there"}
    assert free_orphans(memory) == []
    assert sorted(memory.iterdir()) == before
    assert [run.bytes >= 2 * BUFFER_BYTES for run in runs_in_memory(memory)] == [True]


@pytest.mark.parametrize("how", ["removed", "removed with those above", "emptied", "made anew", "of another run"])
def test_of_one_whose_directory_is_gone_it_is_freed(memory: Path, run_dir: Path, how: str) -> None:
    dead(memory, "0123abcd", run_dir)
    if how == "emptied":
        (run_dir / "run.json").unlink()
    else:
        shutil.rmtree(run_dir.parent if how == "removed with those above" else run_dir)
    if how == "made anew":
        run_dir.mkdir()
    if how == "of another run":
        begun(run_dir, "4567")
    (freed,) = free_orphans(memory)
    assert (freed.run_id, freed.standing) == ("0123abcd", "freed")
    assert freed.bytes >= 2 * BUFFER_BYTES
    assert list(memory.iterdir()) == []


def test_while_a_process_uses_it_it_is_kept_and_the_process_is_named(memory: Path, run_dir: Path) -> None:
    files = left(memory, "0123abcd", run_dir)
    shutil.rmtree(run_dir)
    before = sorted(memory.iterdir())
    (run,) = free_orphans(memory)
    assert run.standing == "in use"
    assert f"process {os.getpid()} (" in run.why
    with pytest.raises(FileInUseError, match=f"process {os.getpid()} "):
        free_run("0123abcd", memory)
    assert sorted(memory.iterdir()) == before
    for file in files:
        file.close(remove=False)
    assert [run.standing for run in free_orphans(memory)] == ["freed"]


def test_nor_where_the_run_directory_is_a_mount_of_its_own(memory: Path, run_dir: Path) -> None:
    dead(memory, "0123abcd", run_dir)
    mounted = replace(owner_in(memory), places=((run_dir.stat().st_dev + 1, 2),))
    (run_dir / "run.json").unlink()
    assert owner_in(memory).look()[0] == "gone"
    assert mounted.look()[0] == "unclear"  # what is there now is the mount point
    shutil.rmtree(run_dir)
    assert mounted.look()[0] == "unclear"


@pytest.mark.parametrize("how", ["not mounted", "another run's", "file", "loop", "damaged", "no object"])
def test_nor_where_it_is_unclear_whether_it_is_gone(memory: Path, run_dir: Path, how: str) -> None:
    """As where a disk is not mounted, or in another container, which may have a run of its own there."""
    dead(memory, "0123abcd", run_dir)
    if how in ("not mounted", "another run's"):
        run_dir.parent.rename(run_dir.parent.with_name("unmounted"))
        run_dir.parent.mkdir()
        if how == "another run's":
            begun(run_dir, "4567")
    elif how in ("damaged", "no object"):
        (run_dir / "run.json").write_text("{" if how == "damaged" else "[]")
    else:
        shutil.rmtree(run_dir)
        run_dir.touch() if how == "file" else run_dir.symlink_to(run_dir)
    (run,) = free_orphans(memory)
    assert run.standing == "unclear"
    assert str(run_dir.parent) in run.why


def test_a_file_system_that_hangs_holds_nobody_up(
    memory: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead(memory, "0123abcd", run_dir)
    second = begun(tmp_path / "runs" / "second", "4567")
    dead(memory, "4567", second)
    shutil.rmtree(second)
    (run_dir / "run.json").unlink()
    os.mkfifo(run_dir / "run.json")  # to open it waits for a writer
    monkeypatch.setattr(orphans, "LOOK_SECONDS", 0.3)
    began = time.monotonic()
    assert {run.run_id: run.standing for run in free_orphans(memory)} == {"0123abcd": "unclear", "4567": "freed"}
    assert time.monotonic() - began < 10
    (hanging,) = runs_in_memory(memory)
    assert "did not answer within 0.3 s" in hanging.why
    writer = os.open(run_dir / "run.json", os.O_RDWR)  # lets those that look end
    (run_dir / "run.json").unlink()
    os.close(writer)


def test_what_has_no_owner_is_listed_and_kept(memory: Path) -> None:
    dead(memory, "0123abcd", None)
    (run,) = free_orphans(memory)
    assert (run.standing, run.owner) == ("unclear", None)
    assert len(list(memory.iterdir())) == 2
    owner_path("0123abcd", memory).write_text('{"run_dir": "/somewhere"}')  # and what cannot be read
    assert standings(memory) == {"0123abcd": "unclear"}


def test_files_of_others_and_links_are_not_touched(
    memory: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (memory / "cpsr-89ab-rank-00000-0").symlink_to(victim)
    (memory / "torch_1234").write_bytes(b"of a loader")
    assert free_orphans(memory) == []
    dead(memory, "0123abcd", run_dir)
    shutil.rmtree(run_dir)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert free_orphans(memory) == []
    assert [run.standing for run in free_orphans(memory)] == ["freed"]
    assert sorted(path.name for path in memory.iterdir()) == ["cpsr-89ab-rank-00000-0", "torch_1234"]
    assert victim.read_bytes() == b"precious"


def test_a_job_that_begins_meanwhile_keeps_it(memory: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead(memory, "0123abcd", run_dir)
    shutil.rmtree(run_dir)

    def begun_before(path: Path) -> FileLock:
        if not run_dir.exists():
            begun(run_dir, "0123abcd")
            mark_owner("0123abcd", run_dir, "node-1", memory)
        return FileLock(path)

    monkeypatch.setattr(orphans, "FileLock", begun_before)
    assert free_orphans(memory) == []
    assert len(list(memory.iterdir())) == 3


def opened() -> set[str]:
    """Files that this process has open; Linux marks those without a name."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it meanwhile
            found.add(str(link.readlink()))
    return found


def test_who_waits_for_memory_that_is_being_freed_gets_his_own(memory: Path, run_dir: Path) -> None:
    """Jobs that begin and free at once: a buffer is never one that has no name any more."""
    stop = threading.Event()

    def free() -> None:
        while not stop.is_set():
            free_orphans(memory)

    dead(memory, "0123abcd", run_dir)
    shutil.rmtree(run_dir)
    freeing = threading.Thread(target=free)
    freeing.start()
    try:
        for _ in range(100):
            (file,) = _patiently(SharedMemory("0123abcd", 0, 0, memory))
            assert str(file.path) in opened()
            file.close(remove=False)
            mark_owner("0123abcd", begun(run_dir, "0123abcd"), "node-1", memory)
            shutil.rmtree(run_dir)
    finally:
        stop.set()
        freeing.join()


def _patiently(memory: SharedMemory) -> list[MemoryFile]:
    while True:  # another thread of one process is not waited for
        try:
            return memory.files(["0"], SlabSize.for_tensors([], BUFFER_BYTES))
        except FileInUseError:
            time.sleep(0.001)
