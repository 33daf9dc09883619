"""The series for the predictor, over full and thinned checkpoints."""

import threading

import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import rank_part, remove_checkpoint, slices_in, weights_file
from cpsr.checkpoint import files
from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.direct_file import BLOCK_BYTES
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.store import CheckpointStore
from cpsr.predictor.protocol import History
from tests.checkpoint.conftest import RefuseReading, make_shard, make_snapshot, save

NAME = "layers.2/weight é"


def test_full_and_thinned_checkpoints_are_one_series(store: CheckpointStore) -> None:
    for iteration in (10, 20, 30, 40):
        save(store, iteration)
    store.retain(Retention())
    assert sum(info.full for info in store.catalogue()) == 2
    disk_history = DiskHistory(store.directory, slices_in(store.directory))
    history: History = disk_history
    assert [entry.iteration for entry in history.entries] == [10, 20, 30, 40]
    assert [entry.time for entry in history.entries] == [0.01, 0.02, 0.03, 0.04]
    assert {entry.learning_rate for entry in history.entries} == {1e-3}
    assert list(history.operators) == list(make_shard().operators)
    assert history.numel(NAME) == 300
    for index, iteration in enumerate((10, 20, 30, 40)):
        expected = make_shard(iteration).operators[NAME].parameter.values
        assert torch.equal(history.read(NAME, index, 0, 300), expected)
        assert torch.equal(history.read(NAME, index, 17, 42), expected[17:42])
        assert history.taken_at(NAME, index) == iteration
    assert history.read("layers.1/weight é", 0, 0, 0).shape == (0,)
    assert disk_history.excluded == {}
    disk_history.close()


def test_operators_that_changed_are_named_and_left_out(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 10)
    snapshot = make_snapshot(20, sizes=(5, 0, 301, 7))
    store.write(snapshot)
    assert store.commit(20, 1.0, threading.Event()).committed
    history = DiskHistory(store.directory, slices_in(store.directory))
    assert list(history.operators) == ["layers.0/weight é", "layers.1/weight é"]
    assert "layers.2/weight é" in caplog.text
    assert "layers.3/weight é" in caplog.text


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1e-3", True])
def test_an_entry_without_its_time_is_excluded(store: CheckpointStore, value: object) -> None:
    snapshot = make_snapshot(10)
    snapshot.scalars["cumulative_learning_rate"] = value
    store.write(snapshot)
    assert store.commit(10, 1.0, threading.Event()).committed
    history = DiskHistory(store.directory, slices_in(store.directory))
    assert list(history.entries) == []
    assert list(history.operators) == []
    assert "cumulative_learning_rate" in history.excluded[10]


def test_what_cannot_be_read_now_is_left_out_and_reported(
    store: CheckpointStore, refuse_reading: RefuseReading, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 10)
    save(store, 20)
    refuse_reading(store.directory / "step-0000000010", 1_000)
    history = DiskHistory(store.directory, slices_in(store.directory))
    assert [entry.iteration for entry in history.entries] == [20]
    assert "cannot be read now: Input/output error" in history.excluded[10]
    assert "checkpoint 10 is left out" in caplog.text
    history.close()


@pytest.mark.parametrize("by", ["deletes", "replaces"])
def test_a_checkpoint_that_goes_meanwhile_is_not_called_damaged(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    """Retention deletes it, or another save of its iteration takes its place."""
    save(store, 10)
    save(store, 20)
    history = DiskHistory(store.directory, slices_in(store.directory), opened=False)
    steps = iter(history.open())
    next(steps)  # both are listed, and 10 is being read
    if by == "deletes":
        remove_checkpoint(store.directory / step_name(20))
    else:
        store.attempt += 1
        save(store, 20)
        store.retain(Retention())
    list(steps)
    assert [entry.iteration for entry in history.entries] == [10]
    assert not history.excluded
    assert "left out" not in caplog.text
    history.close()


def test_a_history_is_opened_piece_by_piece(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    weights = weights_file(store.directory / step_name(20))
    pieces = -(-weights.stat().st_size // BLOCK_BYTES)
    assert pieces > 1
    monkeypatch.setattr(files, "_CHUNK_BYTES", BLOCK_BYTES)
    history = DiskHistory(store.directory, slices_in(store.directory), opened=False)
    assert not history.entries
    assert len(list(history.open())) == 3 * (5 + pieces)  # its manifest, slices and files, and its bytes
    assert [entry.iteration for entry in history.entries] == [10, 20, 30]
    assert list(history.operators) == list(make_shard().operators)
    history.close()
    abandoned = DiskHistory(store.directory, slices_in(store.directory), opened=False)
    next(iter(abandoned.open()))
    abandoned.close()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    history = DiskHistory(store.directory, slices_in(store.directory))
    assert [entry.iteration for entry in history.entries] == [10, 30]
    assert "the xxh3-64 of its bytes 0 to " in history.excluded[20]
    history.close()


def test_what_was_read_before_is_not_read_again_while_it_is_the_same(store: CheckpointStore) -> None:
    for iteration in (10, 20, 30):
        save(store, iteration)
    first = DiskHistory(store.directory, slices_in(store.directory))
    known = first.known
    assert list(known) == [10, 20, 30]
    rank_part(store.directory / step_name(20)).unlink()
    again = DiskHistory(store.directory, slices_in(store.directory), known=known, opened=False)
    assert len(list(again.open())) == 3
    assert again.known == known
    assert again.entries == first.entries
    for operator in first.operators:
        count = first.numel(operator)
        assert torch.equal(again.read(operator, 1, 0, count), first.read(operator, 1, 0, count))
    again.close()
    first.close()
    remove_checkpoint(store.directory / step_name(20))
    store.write(make_snapshot(20, seed=9))  # the same iteration, another state
    assert store.commit(20, 5.0, threading.Event()).committed
    replaced = DiskHistory(store.directory, slices_in(store.directory), known=known)
    assert replaced.known[10] == known[10]
    assert replaced.known[20].sha256 != known[20].sha256
    replaced.close()
