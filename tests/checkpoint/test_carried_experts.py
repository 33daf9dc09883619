"""Sparse checkpoints: each holds every operator, those of experts that it did not save as they were saved before."""

import json
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.harness.checkpoint_files import slab_files
from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.commit import Attempt
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.manifest import FileRecord, Save, experts_taken_at
from cpsr.checkpoint.remote.copies import scan, upload, verify
from cpsr.checkpoint.remote.place import open_place
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.moe.operators import MODULE_LIST
from cpsr.errors import SaveError
from cpsr.experts.completeness import wrong_experts
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.checkpoint.conftest import assert_same_bits, make_shard, make_snapshot

NEVER = threading.Event()
SIZES = (5, 0, 300, 7, 7, 9)
NAMES = [f"layers.{index}/weight é" for index in range(len(SIZES))]
EXPERTS = frozenset(NAMES[2:])


NAMED = re.compile(r"(?P<layer>layers)\.(?P<index>[0-2])/")


def whole(part: ParamSlice) -> ParamSlice:
    return ParamSlice(part.values, (part.numel,))


def sparse(*saved: str) -> Contents:
    return Contents.sparse(EXPERTS, frozenset(saved))


def write(store: CheckpointStore, iteration: int, *saved: str) -> Shard:
    """A committed checkpoint that saves those experts; what a whole one of that iteration would hold."""
    snapshot = make_snapshot(iteration, sizes=SIZES)
    snapshot.contents = sparse(*saved)
    store.write(snapshot)
    assert store.commit(iteration, 5.0, NEVER).committed
    return snapshot.shard


def loaded(store: CheckpointStore, iteration: int) -> Shard:
    into = make_shard(999, SIZES)
    store.load(iteration, into)
    return into


def mixed(states: dict[int, Shard], newest: int, ages: dict[str, int]) -> Shard:
    """What a checkpoint must hold: of each operator the state of its age."""
    operators = {name: states[ages.get(name, newest)].operators[name] for name in states[newest].operators}
    return Shard(operators, states[newest].others)


def directory(store: CheckpointStore, iteration: int) -> Path:
    return store.directory / f"step-{iteration:010d}"


def test_carried_experts_take_no_more_room_and_outlive_the_checkpoint_that_saved_them(store: CheckpointStore) -> None:
    write(store, 10, *EXPERTS)
    written = store.write(sparse_snapshot(20, NAMES[2]))
    assert store.commit(20, 5.0, NEVER).committed
    carried = {path for path in slab_files(directory(store, 10)) if experts_taken_at(path.name) is not None}
    assert carried < set(slab_files(directory(store, 20)))
    new = set(slab_files(directory(store, 20))) - carried
    assert written == sum(path.stat().st_size for path in new)
    state = loaded(store, 20)
    write(store, 30, NAMES[3])
    store.retain(Retention(full_checkpoints=2, history_span_iterations=0, history_min_checkpoints=2))
    assert [info.iteration for info in store.catalogue()] == [20, 30]
    assert_same_bits(loaded(store, 20), state)


def test_a_target_gets_carried_experts_once(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "run"}))
    place, sent = open_place(f"memory://{tmp_path / 'target'}"), list[str]()
    put = place.put

    def counted(folder: str, path: Path, record: FileRecord) -> None:
        sent.append(path.name)
        put(folder, path, record)

    monkeypatch.setattr(place, "put", counted)
    write(store, 10, *EXPERTS)
    for iteration in (20, 30):
        write(store, iteration, NAMES[2])
        upload(place, directory(store, iteration), scan(place, "run").usable)
    assert [one for one in sent if experts_taken_at(one) == 10] == sorted(
        path.name for path in slab_files(directory(store, 10)) if experts_taken_at(path.name) == 10
    )
    assert len(sent) == len(set(sent))
    assert verify(place) == []


def test_the_first_of_a_life_or_attempt_must_save_all(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="must save all experts"):
        store.write(sparse_snapshot(10, NAMES[2]))
    write(store, 10, *EXPERTS)
    store.attempt += 1
    with pytest.raises(SaveError, match="must save all experts"):
        store.write(sparse_snapshot(20, NAMES[2]))
    next_life = CheckpointStore(tmp_path, 0, 1, "run", 2)
    with pytest.raises(SaveError, match="must save all experts"):
        next_life.write(sparse_snapshot(20, NAMES[2]))
    assert not list(directory(store, 20).glob("rank-*"))  # nothing is left of what was refused
    write(next_life, 20, *EXPERTS)
    write(next_life, 30, NAMES[2])


def test_what_an_abandoned_checkpoint_saved_is_carried_from_the_one_before(store: CheckpointStore) -> None:
    states = {10: write(store, 10, *EXPERTS)}
    store.write(sparse_snapshot(20, NAMES[2]))
    Attempt(directory(store, 20), "run", Save(20, 1, 0), 1).abandon("another rank skipped it")
    states[30] = write(store, 30, NAMES[3])
    ages = dict.fromkeys(EXPERTS - {NAMES[3]}, 10)
    assert_same_bits(loaded(store, 30), mixed(states, 30, ages))


@pytest.mark.parametrize(
    ("experts", "missing"),
    [
        ({0: [0, 1], 1: [2, 3]}, ""),
        ({0: [0, 1], 1: [3]}, "no rank has expert 2 of layer 'moe'"),
        ({0: [0], 1: [0]}, ""),  # every rank holds all
    ],
)
def test_nothing_is_committed_while_an_expert_is_on_no_rank(
    tmp_path: Path, experts: dict[int, list[int]], missing: str
) -> None:
    lacking = partial(wrong_experts, naming=MODULE_LIST)
    stores = [CheckpointStore(tmp_path, rank, 2, "run", 1, missing=lacking) for rank in (0, 1)]
    stores[0].prepare()
    for rank in (1, 0):
        snapshot = make_snapshot(10)
        names = [f"moe.experts.{index}.weight" for index in experts[rank]]
        operators = {
            name: OperatorState(name, ParamSlice(torch.zeros(6), (3, 2)), {"exp_avg": torch.zeros(6)}, 10)
            for name in names
        }
        snapshot.shard, snapshot.contents = Shard(operators), Contents.sparse(frozenset(names), frozenset(names))
        stores[rank].write(snapshot)
    if missing:
        with pytest.raises(SaveError, match=missing):
            stores[0].commit(10, 5.0, NEVER)
    else:
        assert stores[0].commit(10, 5.0, NEVER).committed
    assert [info.iteration for info in stores[0].catalogue()] == ([] if missing else [10])


def test_nothing_is_committed_where_a_rank_carried_an_expert_from_an_abandoned_checkpoint(tmp_path: Path) -> None:
    """A rank carried it from a checkpoint that was abandoned a moment later: what that saved is gone."""
    right = partial(wrong_experts, naming=NAMED)
    stores = [CheckpointStore(tmp_path, rank, 2, "run", 1, missing=right) for rank in (0, 1)]
    stores[0].prepare()

    def put(rank: int, iteration: int, *saved: str) -> None:
        snapshot = make_snapshot(iteration)
        shard = {name: replace(one, parameter=whole(one.parameter)) for name, one in snapshot.shard.operators.items()}
        experts = frozenset(NAMES[:3])
        snapshot.shard, snapshot.contents = Shard(shard), Contents.sparse(experts, frozenset(saved))
        stores[rank].write(snapshot)

    for rank in (1, 0):
        put(rank, 10, *NAMES[:3])
    assert stores[0].commit(10, 5.0, NEVER).committed
    put(1, 20, NAMES[2])
    put(1, 30, NAMES[1])
    Attempt(directory(stores[0], 20), "run", Save(20, 1, 0), 2).abandon("rank 0 failed")
    put(0, 30, NAMES[1])
    with pytest.raises(SaveError, match=r"rank-00001\.expert-params-0000000020-1\.0\.safetensors is not there"):
        stores[0].commit(30, 5.0, NEVER)
    assert [info.iteration for info in stores[0].catalogue()] == [10]
    for rank in (1, 0):
        put(rank, 40, *NAMES[:3])
    assert stores[0].commit(40, 5.0, NEVER).committed


def test_what_is_carried_along_counts_once_against_the_limit_of_the_disk(store: CheckpointStore) -> None:
    write(store, 10, *EXPERTS)
    for iteration in range(20, 100, 10):
        write(store, iteration)
    taken = sum(path.stat().st_size for path in store.directory.rglob("*.safetensors"))
    limits = Retention(disk_limit_bytes=taken, history_span_iterations=1000)
    assert sum(info.manifest.total_bytes for info in store.catalogue()) > 1.5 * taken
    store.retain(limits)
    assert [info.iteration for info in store.catalogue()] == list(range(10, 100, 10))
    store.retain(replace(limits, disk_limit_bytes=1))
    assert [info.iteration for info in store.catalogue()] == [90]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(st.sets(st.sampled_from(sorted(EXPERTS))), max_size=6))
def test_any_sequence_of_choices_holds_the_newest_of_each_expert(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[set[str]]
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("run"), 0, 1, "run", 1)
    store.prepare()
    states, ages = {10: write(store, 10, *EXPERTS)}, dict.fromkeys(EXPERTS, 10)
    for number, saved in enumerate(rounds, start=2):
        states[10 * number] = write(store, 10 * number, *saved)
        ages |= dict.fromkeys(saved, 10 * number)
    newest = max(states)
    assert_same_bits(loaded(store, newest), mixed(states, newest, ages))


def sparse_snapshot(iteration: int, *saved: str) -> Snapshot:
    snapshot = make_snapshot(iteration, sizes=SIZES)
    snapshot.contents = sparse(*saved)
    return snapshot
