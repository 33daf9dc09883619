"""What of the machines' memory counts at a restart."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id as run_id_of
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.ranks.group import Group
from cpsr.restart.sources import MemorySources, what_is_left
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import make_shard
from tests.two_ranks import run


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    remove_memory_states(name)


def hold(run_id: str, iteration: int, life: int, branch: int, shard: Shard | None = None) -> None:
    """As a process leaves it that dies."""
    memory = SharedMemory(run_id, 0, life)
    memory.branch = branch
    pool = SnapshotPool(shard or make_shard(0), memory=memory)
    assert pool.begin(shard or make_shard(1, iteration=iteration), iteration, {}) is not None
    pool.finish()
    pool.close(remove=False)


@pytest.mark.parametrize(("life", "branch"), [(3, 0), (2, 5)])
def test_a_state_from_before_the_run_went_back_does_not_count(run_id: str, life: int, branch: int) -> None:
    hold(run_id, 2000, life, branch)
    sources = MemorySources(run_id, Group(), make_shard(0), (3, 1))
    decision = sources.decide(600, 700, make_shard(0))
    assert [source.iteration for source in decision.exact] == [600]
    assert decision.departed == ()


def test_a_state_of_the_branch_that_the_run_is_on_counts(run_id: str) -> None:
    hold(run_id, 650, life=3, branch=1)
    sources = MemorySources(run_id, Group(), make_shard(0), (3, 1))
    assert [source.iteration for source in sources.decide(600, 700, make_shard(0)).exact] == [650]


NONE: list[list[int]] = [[], []]


@pytest.mark.parametrize(
    ("own", "replicas", "left"),
    [
        ([[0, 1], [0, 1]], NONE, "process"),  # two ranks of one machine
        ([[0], [1]], [[], [0]], "process"),
        ([[0], []], [[1], []], "machine"),  # rank 1's machine is gone, and its replica is in the other
        ([[1], [0]], NONE, "machine"),  # the ranks have changed places
        ([[0], []], NONE, "machine"),  # there were no replicas
        ([[0], [], []], [[1], [], []], "everything"),  # the machine of rank 2 is gone with its replica
        ([[1], []], [[0], []], "machine"),  # rank 0 has moved to where its replica is
        ([[], []], [[], [0]], "everything"),
        (NONE, NONE, "everything"),
    ],
)
def test_what_a_failure_has_left(own: list[list[int]], replicas: list[list[int]], left: str) -> None:
    replicas = replicas + [[]] * (len(own) - len(replicas))
    assert what_is_left(own, replicas, told=True) == left
    assert what_is_left(own, replicas, told=False) == ("process" if left == "process" else None)


def left_of(run_id: str, *, held: bool, first: tuple[int, int] = (3, 0)) -> str | None:
    sources = MemorySources(run_id, Group(), make_shard(0), first, held)
    sources.decide(None, None, None)
    return sources.left


def test_a_life_that_held_nothing_in_memory_tells_nothing(run_id: str) -> None:
    """It had sealed no snapshot yet, or had no shared memory."""
    assert left_of(run_id, held=False) is None
    assert left_of(run_id, held=True) == "everything"


def test_a_state_of_an_earlier_branch_shows_that_the_memory_is_there(run_id: str) -> None:
    hold(run_id, 500, life=3, branch=0)
    assert left_of(run_id, held=True, first=(3, 1)) == "process"


def test_what_earlier_lives_have_left_tells_nothing(run_id: str) -> None:
    hold(run_id, 500, life=2, branch=5)
    assert left_of(run_id, held=False) is None
    assert left_of(run_id, held=True) == "everything"


@pytest.mark.parametrize("slot", ["replica-00001-0", "fetched-00000-snapshot"])
def test_a_replica_on_a_ranks_machine_is_no_buffer_of_its_own(run_id: str, slot: str) -> None:
    hold(run_id, 500, life=3, branch=0)
    (state,) = Arena(run_id).list()
    state.path.rename(SharedMemory(run_id, 0, 3).path(slot))
    assert left_of(run_id, held=False) is None
    assert left_of(run_id, held=True) == ("machine" if slot.startswith("replica") else "everything")


def test_a_state_that_is_older_than_the_checkpoint_shows_that_the_memory_is_there(run_id: str) -> None:
    hold(run_id, 500, life=3, branch=1)
    sources = MemorySources(run_id, Group(), make_shard(0), (0, 0), held=True)
    assert [source.tier for source in sources.decide(600, 700, make_shard(0)).exact] == ["disk"]
    assert sources.left == "process"


# Both ranks hold the same; rank 1 has the first of the snapshots alone.
RESTART = """
import json, sys, threading
from pathlib import Path

import torch.distributed as dist

from cpsr.benchmarks.harness.checkpoint_files import weights_file
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import CheckpointConfig
from cpsr.ranks.group import Group
from cpsr.restart.sources import MemorySources, NewestCheckpoint
from tests.checkpoint.conftest import make_shard, make_snapshot

dist.init_process_group("gloo")
group, run_dir = Group(), Path(sys.argv[1]).parent
store = CheckpointStore(run_dir, group.rank, 2, "run", 1)
if group.rank == 0:
    store.prepare()
group.barrier()
for iteration in (80, 90):
    store.write(make_snapshot(iteration))
    if group.rank == 0:
        assert store.commit(iteration, 60.0, threading.Event()).committed
    group.barrier()
if DAMAGED and group.rank == 0:
    weights_file(store.directory_of(90)).write_bytes(b"damaged")

live = make_shard()
pool = SnapshotPool(live, BUFFERS, SharedMemory(RUN, group.rank, 1))
for iteration in SNAPSHOTS if group.rank == 0 else SNAPSHOTS[:1]:
    snapshot = pool.begin(live, iteration, {})
    pool.finish()
    pool.release(snapshot)
if group.rank == 0:
    pool.dump(lambda: live, 175, dict)
pool.close(remove=False)
group.barrier()

pool = SnapshotPool(live, BUFFERS, SharedMemory(RUN, group.rank, 2))
memory = MemorySources(RUN, group, live, (1, 0))
newest = NewestCheckpoint(group, store, CheckpointTarget(CheckpointConfig(), run_dir, group), pool, memory)
loaded = newest.load(175, inexact=True)
decided = memory.decide(loaded.iteration, 175, loaded.shard)
found = [loaded.iteration, *([one.iteration for one in sources] for sources in (decided.exact, decided.departed))]
Path(f"{sys.argv[1]}.{group.rank}").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("snapshots", "damaged", "found"),
    [
        ([100, 140], False, [90, [100, 100], [175, 175]]),
        ([100, 140, 170], False, [90, [100, 100], [175, 175]]),
        ([90, 140], True, [80, [90, 90], [175, 175]]),
    ],
)
def test_a_restart_reads_its_checkpoint_over_no_state_that_it_may_go_on_from(
    tmp_path: Path, run_id: str, snapshots: list[int], damaged: bool, found: list[object]
) -> None:
    """The oldest state is the newest that every rank has, and every buffer holds one."""
    given = f"RUN, SNAPSHOTS, BUFFERS, DAMAGED = {run_id!r}, {snapshots}, {len(snapshots) + 1}, {damaged}"
    assert run(given + RESTART, tmp_path) == (found, found)


def restored(config: dict[str, Any]) -> tuple[int, int, Shard]:
    """A life of ten iterations: which one it is, the iteration that it began with, and the shard of its engine."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        for batch in recovery.resume(torch.ones(10, 8, 4)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return recovery.life.job.journal.life, recovery.restored.restored_iteration, recovery.life.job.shard


def test_the_newest_branch_in_memory_counts_where_the_run_directory_is_lost(tmp_path: Path) -> None:
    """A holder has kept a replica of what the run had gone back behind, when the disk was lost."""
    kept = {"interval_iterations": 5, "shared_memory": True, "target": f"file://{tmp_path / 'target'}"}
    config: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "mode": "exact", "checkpoint": kept}
    _, _, shard = restored(config)
    name = run_id_of(tmp_path / "run")
    try:
        hold(name, 50, life=7, branch=0, shard=shard)
        (given_up,) = Arena(name).list()
        given_up.path.rename(Arena(name).path(0, "replica-00001-0"))
        hold(name, 5, life=7, branch=1, shard=shard)
        shutil.rmtree(tmp_path / "run")
        assert restored(config)[:2] == (8, 10)
    finally:
        remove_memory_states(name)
