"""What of the machines' memory counts at a restart."""

import uuid
from collections.abc import Iterator

import pytest

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.ranks.group import Group
from cpsr.restart.sources import MemorySources, what_is_left
from tests.checkpoint.conftest import make_shard


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    remove_memory_states(name)


def hold(run_id: str, iteration: int, life: int, branch: int) -> None:
    """As a process leaves it that dies."""
    memory = SharedMemory(run_id, 0, life)
    memory.branch = branch
    pool = SnapshotPool(make_shard(0), memory=memory)
    assert pool.begin(make_shard(1, iteration=iteration), iteration, {}) is not None
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
