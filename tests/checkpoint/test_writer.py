"""The background writer under real faults: full disks, file size limits, slow disks, lost ranks."""

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.checkpoint_files import files_left, is_rest
from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.direct_file import write_piece
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import DamagedFileError, UnreadableFileError
from cpsr.checkpoint.writer import CheckpointWriter
from tests.checkpoint.conftest import make_shard

SAVE_SECONDS = 20.0
LARGE = (5, 0, 300_000)  # about 3.6 MB of state


class Rank:
    """One rank's pool, store and writer."""

    def __init__(self, run_dir: Path, rank: int = 0, world_size: int = 1, sizes: tuple[int, ...] = (5, 0, 300)) -> None:
        self.store = CheckpointStore(run_dir, rank, world_size, "run", 1)
        if rank == 0:
            self.store.prepare()
        self.sizes = sizes
        self.pool = SnapshotPool(make_shard(0, sizes))
        self.writer = CheckpointWriter(self.store, self.pool, SAVE_SECONDS)

    def snapshot(self, iteration: int) -> Snapshot | None:
        scalars = {"step": iteration, "cumulative_learning_rate": 0.0, "learning_rate": 0.1}
        self.pool.begin(make_shard(iteration, self.sizes), iteration, scalars)
        return self.pool.finish()

    def save(self, iteration: int) -> None:
        snapshot = self.snapshot(iteration)
        assert snapshot is not None
        self.writer.submit(snapshot)

    def free_buffers(self) -> int:
        acquired = [self.pool.acquire(0) for _ in range(3)]
        free = [snapshot for snapshot in acquired if snapshot is not None]
        for snapshot in free:
            self.pool.release(snapshot)
        return len(free)


def test_a_slow_disk_never_blocks_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slow(descriptor: int, piece: memoryview, path: Path) -> None:
        gate.wait(20)
        write_piece(descriptor, piece, path)

    monkeypatch.setattr("cpsr.checkpoint.files.write_piece", slow)
    rank = Rank(tmp_path)
    started = time.monotonic()
    for iteration in (1, 2, 3):
        rank.save(iteration)
    assert rank.snapshot(4) is None  # to be skipped
    rank.writer.skip(4, "no host buffer is free")
    assert time.monotonic() - started < 5
    assert not rank.writer.drain(0.05)
    gate.set()
    assert rank.writer.drain(20)
    statuses = {outcome.iteration: outcome.status for outcome in rank.writer.outcomes()}
    assert statuses == {4: "skipped", 1: "committed", 2: "committed", 3: "committed"}
    assert rank.free_buffers() == 3
    rank.save(5)
    assert rank.writer.close(20)
    assert [info.iteration for info in rank.store.catalogue()][-1] == 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB where mounting is permitted."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_survived_and_reported(small_disk: Path) -> None:
    rank = Rank(small_disk, sizes=LARGE)
    rank.save(10)
    assert rank.writer.drain(20)
    (small_disk / "filler").write_bytes(bytes(6 << 20))
    rank.save(20)
    assert rank.writer.drain(20)
    (first, second) = rank.writer.outcomes()
    assert first.status == "committed"
    assert second.status == "failed"
    assert "No space left on device" in second.reason
    assert rank.free_buffers() == 3  # the failed one's buffer is free again
    # Its half-written files are gone.
    assert files_left(rank.store.directory / "step-0000000020") == ["rank-00000.skip"]
    assert [info.iteration for info in rank.store.catalogue()] == [10]
    assert verify_run(small_disk) == []
    (small_disk / "filler").unlink()
    rank.save(30)
    assert rank.writer.drain(20)
    assert [outcome.status for outcome in rank.writer.outcomes()] == ["committed"]
    rank.writer.close(5)


def test_a_failing_rank_makes_rank_zero_abandon_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(tmp_path, rank, 2) for rank in (0, 1)]

    def failing(descriptor: int, piece: memoryview, path: Path) -> None:
        if is_rest(path, 10) and "rank-00001" in path.name:
            raise OSError(5, "Input/output error")
        write_piece(descriptor, piece, path)

    monkeypatch.setattr("cpsr.checkpoint.files.write_piece", failing)
    started = time.monotonic()
    for rank in ranks:
        rank.save(10)
    assert all(rank.writer.drain(20) for rank in ranks)
    assert time.monotonic() - started < 10  # and not the 20 s of the timeout
    (zero,), (one,) = (rank.writer.outcomes() for rank in ranks)
    assert (zero.status, one.status) == ("skipped", "failed")
    assert "rank 1 skipped it: [Errno 5] Input/output error" in zero.reason
    monkeypatch.setattr("cpsr.checkpoint.files.write_piece", write_piece)
    for rank in ranks:
        rank.save(20)
    assert all(rank.writer.close(20) for rank in ranks)
    assert [rank.writer.outcomes()[0].status for rank in ranks] == ["committed", "written"]


def test_an_unexpected_exception_is_logged_surfaced_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(rank.store, "write", lambda snapshot: 1 / 0)
        rank.save(10)
        assert rank.writer.drain(20)
    (outcome,) = rank.writer.outcomes()
    assert outcome.status == "failed"
    assert "unexpected ZeroDivisionError" in outcome.reason
    assert "Traceback" in caplog.text
    rank.save(20)
    assert rank.writer.drain(20)
    assert [outcome.status for outcome in rank.writer.outcomes()] == ["committed"]
    rank.writer.close(5)


@pytest.mark.parametrize(
    "error",
    [
        OSError(30, "Read-only file system"),
        DamagedFileError(Path("COMMIT"), "is missing"),
        UnreadableFileError(Path("COMMIT"), "cannot be read now: Input/output error"),
    ],
)
def test_retention_that_fails_leaves_the_commit_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rank = Rank(tmp_path)

    def refusing(rules: Retention) -> None:
        raise error

    monkeypatch.setattr(rank.store, "retain", refusing)
    rank.save(10)
    assert rank.writer.close(20)
    (outcome,) = rank.writer.outcomes()
    assert outcome.status == "committed"
    assert str(error) in outcome.reason
    assert rank.free_buffers() == 3


def test_close_cancels_a_commit_that_waits_and_drops_what_is_queued(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 2)  # rank 1 never comes
    rank.save(10)
    rank.save(20)
    started = time.monotonic()
    assert rank.writer.close(0.3)
    assert time.monotonic() - started < 5
    rank.save(30)  # after close: dropped, not lost silently
    outcomes = rank.writer.outcomes()
    assert [(outcome.iteration, outcome.status) for outcome in outcomes] == [
        (10, "skipped"),
        (20, "skipped"),
        (30, "skipped"),
    ]
    assert "cancelled" in outcomes[0].reason
    assert "closed" in outcomes[1].reason
    assert rank.free_buffers() == 3


def test_a_skip_behind_a_save_is_marked_even_where_the_writer_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rank 0, which goes on, would wait for its timeout."""
    rank, gate, write = Rank(tmp_path, 1, 2), threading.Event(), CheckpointStore.write

    def waiting(store: CheckpointStore, snapshot: Snapshot) -> int:
        gate.wait(20)
        return write(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "write", waiting)
    rank.save(10)
    rank.writer.skip(20, "no host buffer is free")
    threading.Timer(0.5, gate.set).start()
    assert rank.writer.close(0.1)
    assert [outcome.status for outcome in rank.writer.outcomes()] == ["written", "skipped"]
    assert (rank.store.directory / "step-0000000020" / "rank-00001.skip").exists()
