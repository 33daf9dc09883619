"""Two gloo ranks that hold the same weights learn what one alone would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.checkpoint.manifest import COMMIT, file_name, step_name
from cpsr.learning.assignment import OperatorAssignment, owners
from cpsr.ranks.group import Group
from cpsr.state.shard import OperatorState, ParamSlice, Shard
from tests.learning.assignment_rank import COUNT, INTERVAL, LEFT, SCENARIOS, SIZES
from tests.two_ranks import run

SCRIPT = "from tests.learning.assignment_rank import main; main()"


def shard_of(sizes: dict[str, int]) -> Shard:
    return Shard({name: OperatorState(name, ParamSlice(torch.zeros(n), (n,)), {}, 0) for name, n in sizes.items()})


Found = dict[str, tuple[Any, Any]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks leave their checkpoints, by scenario."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(directory: Path) -> Found:
    """What the two ranks found, by scenario."""
    first, second = run(SCRIPT, directory)
    return {scenario: (first[scenario], second[scenario]) for scenario in SCENARIOS}


def test_each_takes_its_operators_alone(found: Found) -> None:
    first, second = found["even"]
    assert first["learned"] == ["embedding"]  # 900 of 1720 elements
    assert second["learned"] == sorted(SIZES.keys() - {"embedding"})
    assert first["learned alone"] == sorted(SIZES)


def test_the_network_is_that_of_one_rank_a_checkpoint_later(found: Found) -> None:
    first, second = found["even"]
    heads = first["heads"]
    assert heads[-1][1][0] > 0  # it was trained
    assert [shared for shared, _ in heads[1:]] == [alone for _, alone in heads[:-1]]
    assert [shared for shared, _ in second["heads"]] == [[0, ""]] * COUNT  # rank 1 trains none
    shared, alone = first["accuracy"]
    assert len(shared) > 3
    assert shared == alone[:-1]


@pytest.mark.parametrize("which", ["forecasts", "after a loss"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_forecasts_are_those_of_one_rank(found: Found, scenario: str, which: str) -> None:
    first, second = found[scenario]
    assert first[which][0] == second[which][0]  # to the last bit: or copies of the weights would differ
    (shared, line), (alone, line_alone) = first[which]
    assert shared.keys() == alone.keys() == SIZES.keys()
    for name, row in shared.items():
        assert row == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name  # the network is float32
    assert line == line_alone == 0


def test_a_rank_that_lags_costs_its_share_alone(found: Found) -> None:
    first, _ = found["lagging"]
    shared, alone = ([one[which] for one in first["heads"]] for which in (0, 1))
    assert shared[1 : LEFT + 1] == alone[:LEFT]
    assert shared[LEFT + 1][1] != alone[LEFT][1]  # from here on without rank 1's operators
    assert [steps for steps, _ in shared[1:]] == [steps for steps, _ in alone[:-1]]


@given(
    st.dictionaries(st.text(min_size=1), st.integers(0, 10**6), min_size=1, max_size=30),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_shares_are_fair_and_the_same_everywhere(sizes: dict[str, int], count: int, random: Any) -> None:
    members = list(range(0, 2 * count, 2))
    shuffled = list(sizes.items())
    random.shuffle(shuffled)
    found = owners(virtual(sizes), members)
    assert found == owners(virtual(dict(shuffled)), members)
    assert found.keys() == sizes.keys()
    loads = dict.fromkeys(members, 0)
    for name, member in found.items():
        loads[member] += sizes[name]
    # Whoever has most had no more than the mean before its last operator, which is no larger than any of its others.
    assert count * max(loads.values()) <= sum(sizes.values()) + (count - 1) * max(sizes.values())


def virtual(sizes: dict[str, int]) -> Shard:
    """Operators of these sizes that take no memory."""
    byte = torch.zeros(1, dtype=torch.uint8)
    return Shard({name: OperatorState(name, ParamSlice(byte.expand(n), (n,)), {}, 0) for name, n in sizes.items()})


def test_a_part_that_cannot_be_read_is_missing_alone(
    found: Found, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found

    class Both(Group):
        """Another rank holds what this one holds."""

        def gather(self, value: Any) -> list[Any]:
            return [value, value]

    assignment, store = OperatorAssignment(), directory / "even" / "checkpoints"
    assignment.open(Both(), shard_of(SIZES), [0, 1], store)
    newest = INTERVAL * (COUNT - 1)
    parts = list(assignment.learned(newest))
    assert [part and sorted(part.operators) for part in parts] == [
        ["embedding"],
        sorted(SIZES.keys() - {"embedding"}),
    ]
    step = store / step_name(newest)
    (step / file_name(1, "extra")).write_bytes(b"torn")
    for _ in range(2):
        first, second = assignment.learned(newest)
        assert first is not None
        assert first.seen == tuple(range(0, newest, INTERVAL))
        assert second is None
    assert caplog.text.count("what rank 1 has learned") == 1
    (step / COMMIT).unlink()
    assert list(assignment.learned(newest)) == []


def test_alone_everything_is_its_own(tmp_path: Path) -> None:
    assignment = OperatorAssignment()
    assert assignment.is_mine("embedding")
    assignment.open(Group(), shard_of(SIZES), [0], tmp_path)
    assert not assignment.is_shared
    assert assignment.is_mine("embedding")
    assert list(assignment.learned(50)) == []
