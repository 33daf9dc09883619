"""The ranks' agreement through files: real threads for the ranks, each with a store of its own."""

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from cpsr.benchmarks.harness.checkpoint_files import files_left
from cpsr.checkpoint import commit, files
from cpsr.checkpoint.files import sync_directory
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import read_manifest
from cpsr.errors import SaveError
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot

NEVER = threading.Event()


@pytest.fixture
def stores(tmp_path: Path) -> tuple[CheckpointStore, CheckpointStore]:
    first, second = (CheckpointStore(tmp_path, rank, 2, "run", 3) for rank in (0, 1))
    first.prepare()
    return first, second


def test_two_ranks_commit(stores: tuple[CheckpointStore, CheckpointStore], tmp_path: Path) -> None:
    def rank_one() -> None:
        for iteration in (10, 20, 30):
            time.sleep(0.05)  # the late one
            stores[1].write(make_snapshot(iteration, seed=iteration + 1))

    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(rank_one)
        for iteration in (10, 20, 30):
            stores[0].write(make_snapshot(iteration))
            assert stores[0].commit(iteration, 10.0, NEVER).committed
        late.result()
    assert [info.manifest.world_size for info in stores[1].catalogue()] == [2, 2, 2]
    for rank in (0, 1):
        shard = make_shard(99)
        assert stores[rank].load(20, shard)["step"] == 20
        assert_same_bits(shard, make_shard(20 + rank))
    assert verify_run(tmp_path) == []


def test_a_skip_of_rank_one_abandons_the_step_at_once(stores: tuple[CheckpointStore, CheckpointStore]) -> None:
    stores[0].write(make_snapshot(10))
    stores[1].skip(10, "no host buffer is free")
    started = time.monotonic()
    result = stores[0].commit(10, 60.0, NEVER)
    assert time.monotonic() - started < 5
    assert not result.committed
    assert result.reason == "rank 1 skipped it: no host buffer is free"
    assert files_left(stores[0].directory / "step-0000000010") == ["rank-00000.skip"]
    assert stores[0].catalogue() == []


def test_a_rank_that_never_comes_runs_into_the_timeout(stores: tuple[CheckpointStore, CheckpointStore]) -> None:
    stores[0].write(make_snapshot(10))
    result = stores[0].commit(10, 0.1, NEVER)
    assert result.reason == "the shards of ranks [1] did not come within 0.1 s"


def test_after_a_slow_look_the_next_one_comes_within_a_second_and_before_the_deadline(
    stores: tuple[CheckpointStore, CheckpointStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noted(threading.Event):
        pauses: ClassVar[list[float]] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.pauses.append(timeout or 0.0)
            return super().wait(timeout)

    def slow(directory: Path) -> list[str]:
        time.sleep(0.1)  # 20 times as long is more than a second
        return files.names_in(directory)

    stores[0].write(make_snapshot(10))
    with monkeypatch.context() as patched:
        patched.setattr(commit, "names_in", slow)
        assert not stores[0].commit(10, 1.3, Noted()).committed
    assert Noted.pauses[0] == 1.0
    assert sum(Noted.pauses) <= 1.2


def test_a_late_writer_finds_out_and_leaves_nothing(stores: tuple[CheckpointStore, CheckpointStore]) -> None:
    stores[0].write(make_snapshot(10))
    stores[0].commit(10, 0.0, NEVER)
    with pytest.raises(SaveError, match="abandoned by rank 0: the shards of ranks"):
        stores[1].write(make_snapshot(10))
    assert files_left(stores[0].directory / "step-0000000010") == ["rank-00000.skip"]
    for store in reversed(stores):
        store.write(make_snapshot(20))
    assert stores[0].commit(20, 5.0, NEVER).committed
    assert [info.iteration for info in stores[0].catalogue()] == [20]


def test_what_rank_0_has_abandoned_stays_so_for_itself(stores: tuple[CheckpointStore, CheckpointStore]) -> None:
    stores[0].write(make_snapshot(10))
    stores[0].commit(10, 0.0, NEVER)
    for store in stores:
        with pytest.raises(SaveError, match="abandoned by rank 0: the shards of ranks"):
            store.write(make_snapshot(10))
    assert files_left(stores[0].directory / "step-0000000010") == ["rank-00000.skip"]


def test_a_shard_of_another_life_never_counts(stores: tuple[CheckpointStore, CheckpointStore], tmp_path: Path) -> None:
    CheckpointStore(tmp_path, 1, 2, "run", 2).write(make_snapshot(10))
    stores[0].write(make_snapshot(10))
    assert not stores[0].commit(10, 0.1, NEVER).committed


def test_a_shard_or_skip_from_before_a_roll_back_never_counts(stores: tuple[CheckpointStore, CheckpointStore]) -> None:
    stores[1].write(make_snapshot(10))
    stores[1].skip(20, "before the roll-back")
    stores[0].attempt = 1
    for iteration, reason in ((10, "did not come"), (20, "did not come")):
        stores[0].write(make_snapshot(iteration))
        result = stores[0].commit(iteration, 0.1, NEVER)
        assert not result.committed
        assert reason in result.reason
    # Rank 1 rolls back too: the markers of the attempt before bind nobody, once the next attempt is the same.
    for store in stores:
        store.attempt = 2
        store.write(make_snapshot(10))
    assert stores[0].commit(10, 5.0, NEVER).committed
    assert not (stores[0].directory / "step-0000000010" / "rank-00000.skip").exists()


def test_a_checkpoint_stays_until_another_save_of_its_iteration_is_committed(
    stores: tuple[CheckpointStore, CheckpointStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stores[0].directory / "step-0000000010"

    def begin(attempt: int, *ranks: int) -> None:
        for rank in ranks:
            stores[rank].attempt = attempt
            stores[rank].write(make_snapshot(10, seed=10 * attempt + rank))

    def holds(attempt: int) -> None:
        for rank in (0, 1):
            shard = make_shard(99)
            stores[rank].load(10, shard)
            assert_same_bits(shard, make_shard(10 * attempt + rank))
        assert verify_run(tmp_path) == []

    begin(0, 1, 0)
    assert stores[0].commit(10, 5.0, NEVER).committed
    begin(1, 0)
    stores[1].attempt = 1
    stores[1].skip(10, "no host buffer is free")
    assert not stores[0].commit(10, 5.0, NEVER).committed
    holds(0)
    begin(2, 1, 0)
    holds(0)

    def refusing(path: Path) -> None:
        if path == directory and read_manifest(directory).attempt == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_directory(path)

    with monkeypatch.context() as patched:
        patched.setattr(files, "sync_directory", refusing)  # with the commit record in place, perhaps not for long
        with pytest.raises(SaveError, match="Input/output error"):
            stores[0].commit(10, 5.0, NEVER)
    holds(2)
    begin(3, 1, 0)
    assert not stores[1].is_settled(10)
    assert stores[0].commit(10, 5.0, NEVER).committed
    assert stores[1].is_settled(10)
    holds(3)
    begin(4, 1)
    CheckpointStore(tmp_path, 0, 2, "run", 4).prepare()
    assert [name for name in files_left(directory) if "3.3" not in name] == ["COMMIT"]
    holds(3)


def test_beside_a_damaged_commit_record_nothing_of_its_checkpoint_goes(
    stores: tuple[CheckpointStore, CheckpointStore], tmp_path: Path
) -> None:
    for store in stores:
        store.write(make_snapshot(10))
    assert stores[0].commit(10, 5.0, NEVER).committed
    directory = tmp_path / "checkpoints" / step_name(10)
    first = files_left(directory)
    for store in stores:
        store.attempt = 1
        store.write(make_snapshot(10, seed=7))
    record = (directory / "COMMIT").read_bytes()
    (directory / "COMMIT").write_bytes(record.replace(b"weights_only", b"weights-only"))
    stores[1].skip(10, "no host buffer is free")
    assert not stores[0].commit(10, 5.0, NEVER).committed
    (directory / "COMMIT").write_bytes(record)
    assert set(first) <= set(files_left(directory))
    assert verify_run(tmp_path) == []


def test_after_a_roll_back_the_same_iterations_can_be_saved(stores: tuple[CheckpointStore, CheckpointStore]) -> None:
    for iteration in (10, 20):
        for store in stores:
            store.write(make_snapshot(iteration))
        assert stores[0].commit(iteration, 5.0, NEVER).committed
    stores[1].write(make_snapshot(30))
    stores[0].write(make_snapshot(40))
    stores[0].commit(40, 0.0, NEVER)
    assert stores[1].abandon_after(10, "diverged") == []  # rank 0 alone acts
    assert [path.name for path in stores[0].abandon_after(10, "diverged")] == ["abandoned-step-0000000020-2-0"]
    for iteration in (20, 30, 40):
        for store in stores:
            store.write(make_snapshot(iteration, seed=iteration + 500))
        assert stores[0].commit(iteration, 5.0, NEVER).committed
    assert [info.iteration for info in stores[0].catalogue()] == [10, 20, 30, 40]
    shard = make_shard()
    stores[1].load(30, shard)
    assert_same_bits(shard, make_shard(530))
