"""What of the machines' memory counts at a restart."""

import uuid
from collections.abc import Iterator

import pytest

from cpsr.checkpoint.memory import SharedMemory
from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.config import PeersConfig
from cpsr.ranks.group import Group
from cpsr.restart.ladder import Ladder, what_is_left
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
    hold(run_id, 2000, life, branch)  # a holder that was not reached, when the others forgot
    ladder = Ladder(run_id, Group(), make_shard(0), (3, 1), PeersConfig())
    decision = ladder.decide(600, 700, make_shard(0))
    assert [source.iteration for source in decision.exact] == [600]
    assert decision.departed == ()


def test_a_state_of_the_branch_that_the_run_is_on_counts(run_id: str) -> None:
    hold(run_id, 650, life=3, branch=1)
    ladder = Ladder(run_id, Group(), make_shard(0), (3, 1), PeersConfig())
    assert [source.iteration for source in ladder.decide(600, 700, make_shard(0)).exact] == [650]


@pytest.mark.parametrize(
    ("held", "left"),
    [
        ([[0, 1], [0, 1]], "process"),  # two ranks of one machine
        ([[0], [1, 0]], "process"),
        ([[0, 1], []], "machine"),  # rank 1's machine is gone, and its replica is in the other
        ([[1], [0]], "machine"),
        ([[0], []], "everything"),
        ([[], []], "everything"),
    ],
)
def test_what_a_failure_has_left(held: list[list[int]], left: str) -> None:
    assert what_is_left(held) == left


def test_a_state_that_is_older_than_the_checkpoint_shows_that_the_memory_is_there(run_id: str) -> None:
    ladder = Ladder(run_id, Group(), make_shard(0), (0, 0), PeersConfig())
    ladder.decide(None, None, None)
    found = [ladder.left]
    hold(run_id, 500, life=3, branch=1)
    assert [source.tier for source in ladder.decide(600, 700, make_shard(0)).exact] == ["disk"]
    assert [*found, ladder.left] == ["everything", "process"]
