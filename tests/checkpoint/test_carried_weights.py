"""Partial checkpoints: what they hold, where they count, what is refused, and what damage and abandoning leave."""

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from cpsr.checkpoint.catalogue import CheckpointInfo
from cpsr.checkpoint.contents import WEIGHTS, WHOLE, Contents, weights_of
from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.checkpoint.writer import CheckpointWriter
from cpsr.config import CheckpointConfig
from cpsr.errors import CheckpointError, SaveError, UnsupportedEngineError
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot, partial_snapshot

NEVER = threading.Event()
NAME = "layers.2/weight é"
PARAMS = ("rank-00000.params.safetensors", "rank-00001.params.safetensors")
Stores = tuple[CheckpointStore, CheckpointStore]


Part = Literal["whole", "weights", "carried"]


def snapshot(iteration: int, rank: int, part: Part) -> Snapshot:
    """What a rank contributes: values follow from rank and iteration."""
    if part == "whole":
        return make_snapshot(iteration, seed=iteration + rank)
    return partial_snapshot(iteration, carried=part == "carried", seed=iteration + rank)


def save(stores: Stores, iteration: int, *parts: Part) -> None:
    for rank in (1, 0):
        stores[rank].write(snapshot(iteration, rank, parts[rank]))
    assert stores[0].commit(iteration, 5.0, NEVER).committed


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    """Two ranks after a whole checkpoint at 10, partial ones at 20 (rank 0) and 30 (rank 1), a whole one at 40."""
    first, second = (CheckpointStore(tmp_path, rank, 2, "run", 1, fsync=False) for rank in (0, 1))
    first.prepare()
    save((first, second), 10, "whole", "whole")
    save((first, second), 20, "weights", "carried")
    save((first, second), 30, "carried", "weights")
    save((first, second), 40, "whole", "whole")
    return first, second


def directory(stores: Stores, iteration: int) -> Path:
    return stores[0].directory / f"step-{iteration:010d}"


def taken(stores: Stores, rank: int) -> list[int]:
    history = DiskHistory(stores[0].directory, rank)
    return [history.taken_at(NAME, entry) for entry in range(len(history.entries))]


def test_the_catalogue_distinguishes_them_from_whole_and_thinned_ones(stores: Stores, tmp_path: Path) -> None:
    infos = stores[1].catalogue()
    assert [(info.iteration, info.full, info.partial) for info in infos] == [
        (10, True, False),
        (20, False, True),
        (30, False, True),
        (40, True, False),
    ]
    assert infos[1].label == "trained"
    assert infos[1].bytes == sum((directory(stores, 20) / name).stat().st_size for name in PARAMS)
    assert sorted(path.name for path in directory(stores, 20).iterdir()) == sorted(
        [*PARAMS, "rank-00000.json", "rank-00001.json", "manifest.json", "COMMIT"]
    )
    assert verify_run(tmp_path) == []
    assert stores[0].problems() == []


def test_history_holds_each_ranks_own_ages(stores: Stores) -> None:
    assert taken(stores, 0) == [10, 20, 20, 40]
    assert taken(stores, 1) == [10, 10, 30, 40]
    for rank in (0, 1):
        history = DiskHistory(stores[0].directory, rank)
        assert [entry.iteration for entry in history.entries] == [10, 20, 30, 40]
        assert [entry.time for entry in history.entries] == [0.01, 0.02, 0.03, 0.04]
        assert history.partial_iterations == [20, 30]
        for entry in range(4):
            expected = make_shard(history.taken_at(NAME, entry) + rank).operators[NAME].parameter.values
            assert torch.equal(history.read(NAME, entry, 0, 300), expected)
    whole = DiskHistory(stores[0].directory, 1, partial=False)
    assert [entry.iteration for entry in whole.entries] == [10, 40]
    assert whole.partial_iterations == []


def test_carried_weights_are_the_same_file_with_the_same_hash(stores: Stores) -> None:
    own, carried = directory(stores, 10) / PARAMS[1], directory(stores, 20) / PARAMS[1]
    assert own.samefile(carried)
    records = [
        read_rank_manifest(directory(stores, step), read_manifest(directory(stores, step)), 1) for step in (10, 20)
    ]
    assert records[0].files[PARAMS[1]] == records[1].files[PARAMS[1]]
    assert records[1].files[PARAMS[1]].pieces
    assert list(records[1].files) == [PARAMS[1]]
    assert {one.iteration for one in records[1].operators.values()} == {10}
    assert all(one.moments == {} for one in records[1].operators.values())


def test_training_cannot_restart_at_one(stores: Stores) -> None:
    shard = make_shard(5)
    with pytest.raises(CheckpointError, match="keeps the weights only"):
        stores[0].load(20, shard)
    assert_same_bits(shard, make_shard(5))
    stores[1].load(40, shard)
    assert_same_bits(shard, make_shard(41))


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_without_links_a_copy_is_made(stores: Stores, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    save(stores, 50, "weights", "carried")
    own, copied = directory(stores, 40) / PARAMS[1], directory(stores, 50) / PARAMS[1]
    assert not own.samefile(copied)
    assert own.read_bytes() == copied.read_bytes()
    assert stores[0].verify(50) == []
    own.write_bytes(own.read_bytes()[:-1] + b"x")
    copied.write_bytes(own.read_bytes())
    with pytest.raises(SaveError, match="differs from what was written"):
        stores[1].write(snapshot(60, 1, "carried"))
    assert list(directory(stores, 60).iterdir()) == []


def test_what_is_carried_outlives_the_checkpoints_that_owned_it(stores: Stores) -> None:
    save(stores, 50, "weights", "carried")
    for step in (20, 30, 40):
        stores[0].quarantine(step, "a test")
    save(stores, 60, "weights", "carried")
    assert taken(stores, 1) == [10, 40, 40]
    for step in (10, 50, 60):
        stores[0].quarantine(step, "a test")
    with pytest.raises(SaveError, match="no weights to carry"):
        stores[1].write(snapshot(70, 1, "carried"))


def test_nothing_is_carried_from_another_life_or_from_before_a_roll_back(stores: Stores, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="no weights to carry"):
        CheckpointStore(tmp_path, 1, 2, "run", 2, fsync=False).write(snapshot(50, 1, "carried"))
    for store in stores:
        store.attempt += 1
    with pytest.raises(SaveError, match="no weights to carry"):
        stores[1].write(snapshot(50, 1, "carried"))
    save(stores, 50, "whole", "whole")
    save(stores, 60, "weights", "carried")
    assert taken(stores, 1)[-2:] == [50, 50]


def test_without_a_whole_one_nothing_is_committed(tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path, rank, 2, "run", 1, fsync=False) for rank in (0, 1)]
    stores[0].prepare()
    for rank, store in enumerate(stores):
        store.write(snapshot(10, rank, "weights"))
    result = stores[0].commit(10, 5.0, NEVER)
    assert not result.committed
    assert "no whole checkpoint" in result.reason
    assert stores[0].remains() == []


def test_a_rank_without_weights_abandons_it_for_all(stores: Stores) -> None:
    stores[0].write(snapshot(50, 0, "weights"))
    stores[1].skip(50, "it has written no weights")
    result = stores[0].commit(50, 5.0, NEVER)
    assert result.reason == "rank 1 skipped it: it has written no weights"
    save(stores, 60, "carried", "carried")
    assert taken(stores, 0)[-1] == 40, "the weights of the abandoned one are gone; those before them are not"


def test_scalars_with_tensors_have_no_place_in_one(stores: Stores) -> None:
    partial = snapshot(50, 0, "weights")
    partial.scalars["rng"] = torch.zeros(3)
    with pytest.raises(SaveError, match="hold tensors"):
        stores[0].write(partial)
    assert list(directory(stores, 50).iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_is_found_and_leaves_the_others_alone(stores: Stores, tmp_path: Path, rank: int) -> None:
    """Of rank 1 the damaged file is in the whole one before too, under its other name: both are reported."""
    path = directory(stores, 20) / PARAMS[rank]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = {(problem.iteration, problem.file.name) for problem in verify_run(tmp_path)}
    assert found == {(step, PARAMS[rank]) for step in ([20, 30], [10, 20])[rank]}
    history = DiskHistory(stores[0].directory, rank)
    assert sorted(history.excluded) == ([20, 30], [10, 20])[rank]
    assert [entry.iteration for entry in DiskHistory(stores[0].directory, 1 - rank).entries] == [10, 20, 30, 40]


@pytest.mark.parametrize("missing", ["COMMIT", "manifest.json", "rank-00001.json", PARAMS[1]])
def test_one_that_is_torn_is_no_checkpoint(stores: Stores, missing: str) -> None:
    (directory(stores, 30) / missing).unlink()
    assert 30 not in taken(stores, 1)
    assert [info.iteration for info in stores[0].catalogue() if info.full] == [10, 40]
    save(stores, 50, "whole", "whole")
    assert stores[0].verify(50) == []


def test_an_abandoned_one_gives_its_iteration_free(stores: Stores) -> None:
    save(stores, 50, "weights", "carried")
    assert [path.name for path in stores[0].abandon_after(40, "a test")] == ["abandoned-step-0000000050-0"]
    for store in stores:
        store.attempt += 1
    save(stores, 50, "whole", "whole")
    assert [info.iteration for info in stores[0].catalogue() if info.full] == [10, 40, 50]


# Retention


def test_partial_ones_never_take_the_place_of_whole_ones(stores: Stores, tmp_path: Path) -> None:
    config = CheckpointConfig(history_span_iterations=0, history_min_checkpoints=2)
    for iteration in (50, 60, 70, 80, 90):
        save(stores, iteration, "weights", "carried")
        stores[0].retain(config)
        assert [info.iteration for info in stores[0].catalogue() if info.full] == [10, 40]
        assert taken(stores, 1)[0] == 10
    save(stores, 100, "whole", "whole")
    stores[0].retain(config)
    found = {info.iteration: info.full for info in stores[0].catalogue()}
    assert found == {40: True, **dict.fromkeys((50, 60, 70, 80, 90), False), 100: True}
    save(stores, 110, "weights", "carried")
    save(stores, 120, "whole", "whole")
    stores[0].retain(config)
    assert [info.iteration for info in stores[0].catalogue()] == [100, 110, 120]
    assert taken(stores, 1) == [100, 100, 120]
    assert verify_run(tmp_path) == []


def test_the_cap_drops_them_with_the_history(stores: Stores) -> None:
    whole = sum(info.bytes for info in stores[0].catalogue() if info.full)
    stores[0].retain(CheckpointConfig(disk_limit_bytes=whole))
    assert [info.iteration for info in stores[0].catalogue()] == [10, 40]


def test_what_was_set_aside_waits_for_whole_ones(stores: Stores) -> None:
    aside = stores[0].quarantine(10, "damaged")
    assert aside is not None
    for iteration in (50, 60, 70):
        save(stores, iteration, "weights", "carried")
        stores[0].retain(CheckpointConfig())
        assert aside.exists()
    for iteration in (80, 90):
        save(stores, iteration, "whole", "whole")
        stores[0].retain(CheckpointConfig())
    assert not aside.exists()


# Snapshots and the writer


def test_a_snapshot_of_weights_copies_nothing_else() -> None:
    pool = SnapshotPool(make_shard(1))
    try:
        for seed in (2, 3):
            pool.begin(make_shard(seed), seed, {}, WHOLE if seed == 2 else WEIGHTS)
            found = pool.finish()
            assert found is not None
            expected = make_shard(seed) if seed == 2 else weights_of(make_shard(seed))
            assert_same_bits(found.shard, expected)
            pool.release(found)
        missing = make_shard(4)
        del missing.operators[NAME]
        pool.begin(missing, 4, {}, WEIGHTS)
        with pytest.raises(UnsupportedEngineError, match="is gone"):
            pool.finish()
    finally:
        pool.close()


def test_the_writer_keeps_whole_ones_alone_for_a_recovery(store: CheckpointStore) -> None:
    pool = SnapshotPool(make_shard(1))
    writer = CheckpointWriter(store, pool, CheckpointConfig())
    place = {"cumulative_learning_rate": 0.0, "learning_rate": 0.0, "origin": "trained"}
    carried = Contents.carried_weights(frozenset(make_shard().operators))
    for iteration, contents in enumerate((WHOLE, WEIGHTS, WEIGHTS, WEIGHTS, carried), start=1):  # more than buffers
        if contents.carried:
            writer.submit(Snapshot(iteration, Shard({}), place, contents=contents))
        else:
            pool.begin(make_shard(iteration), iteration, place, contents)
            taken = pool.finish()
            assert taken is not None
            writer.submit(taken)
        assert writer.drain(5.0)
    outcomes = writer.outcomes()
    assert [outcome.status for outcome in outcomes] == ["committed"] * 5
    assert outcomes[0].mean_second_moment is not None
    assert {outcome.mean_second_moment for outcome in outcomes[1:]} == {None}
    assert pool.recovery is not None
    assert pool.recovery.iteration == 1
    history = DiskHistory(store.directory, 0)
    assert [history.entries[-1].iteration, history.taken_at(NAME, -1)] == [5, 4]
    writer.close(5.0)
    pool.close()


def test_a_description_without_it_is_of_a_checkpoint_that_is_not_partial(stores: Stores) -> None:
    info = stores[0].catalogue()[1]
    assert isinstance(info, CheckpointInfo)
    assert not CheckpointInfo(**{k: v for k, v in vars(replace(info)).items() if k != "partial"}).partial
