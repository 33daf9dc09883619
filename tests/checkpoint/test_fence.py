"""No life writes into a run in which a newer one has begun."""

import errno
import threading
from pathlib import Path

import pytest

from cpsr.checkpoint.commit import SupersededError, claim_life
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import RunDirectoryError
from cpsr.ranks.group import Group
from cpsr.ranks.heartbeat import HeartbeatFiles, newer_life
from tests.checkpoint.conftest import make_snapshot, save


def store(run_dir: Path, life: int, rank: int = 0, ranks: int = 1) -> CheckpointStore:
    return CheckpointStore(run_dir, rank, ranks, "run", life)


def files(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (run_dir / "checkpoints").rglob("*") if path.is_file()}


def test_of_many_that_claim_a_number_at_once_one_has_it(tmp_path: Path) -> None:
    begin, won, refused = threading.Barrier(8), [], []

    def claim() -> None:
        begin.wait()
        try:
            claim_life(tmp_path, 0, Group())
            won.append(1)
        except RunDirectoryError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [1]
    assert all("another job has begun life 0" in one for one in refused)


def test_a_life_that_another_has_replaced_commits_nothing(tmp_path: Path) -> None:
    claim_life(tmp_path, 0, Group())
    old = store(tmp_path, 0)
    save(old, 5)
    old.write(make_snapshot(10))
    claim_life(tmp_path, 1, Group())
    with pytest.raises(SupersededError, match=r"life 1 of the run .* has begun, this process is of life 0"):
        old.commit(10, 5.0, threading.Event())
    assert [info.iteration for info in old.catalogue()] == [5]


def test_it_leaves_what_the_newer_one_writes_alone(tmp_path: Path) -> None:
    claim_life(tmp_path, 0, Group())
    old = store(tmp_path, 0)
    old.write(make_snapshot(10))
    claim_life(tmp_path, 1, Group())
    new = store(tmp_path, 1)
    new.prepare()
    new.write(make_snapshot(10))
    written = files(tmp_path)
    for act in (
        lambda: old.write(make_snapshot(10)),
        lambda: old.commit(10, 0.5, threading.Event()),
        lambda: old.abandon_after(0, "it goes back"),
    ):
        with pytest.raises(SupersededError):
            act()
        assert files(tmp_path) == written
    assert new.commit(10, 5.0, threading.Event()).committed
    assert verify_run(tmp_path) == []


@pytest.mark.parametrize("during", ["its files", "the look at all parts", "the names of all parts"])
def test_what_a_newer_one_commits_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str) -> None:
    """The old life hangs in a save, and its file system then fails it; its files there are the newer life's by now."""

    def newer(*_: object, **__: object) -> str:
        monkeypatch.undo()
        claim_life(tmp_path, 1, Group())
        new = store(tmp_path, 1)
        new.prepare()
        save(new, 10)
        written.update(files(tmp_path))
        raise OSError(errno.ESTALE, "stale file handle")

    written = dict[str, bytes]()
    claim_life(tmp_path, 0, Group())
    meanwhile = newer if during == "the look at all parts" else None
    old = CheckpointStore(tmp_path, 0, 1, "run", 0, missing=meanwhile)
    if during == "its files":
        monkeypatch.setattr("cpsr.checkpoint.rank_part.write_tensors", newer)
    if during != "its files":
        old.write(make_snapshot(10))
    if during == "the names of all parts":
        monkeypatch.setattr("cpsr.checkpoint.commit.sync_directory", newer)
    with pytest.raises(SupersededError):
        old.write(make_snapshot(10)) if during == "its files" else old.commit(10, 5.0, threading.Event())
    assert written == files(tmp_path)
    assert [info.iteration for info in old.catalogue()] == [10]
    assert verify_run(tmp_path) == []


def test_a_claim_outlives_the_heartbeats_of_lives_before(tmp_path: Path) -> None:
    for life in range(3):
        claim_life(tmp_path, life, Group())
    HeartbeatFiles(tmp_path, 2).remove_earlier()
    assert newer_life(tmp_path, 0) == newer_life(tmp_path, 1) == 2
