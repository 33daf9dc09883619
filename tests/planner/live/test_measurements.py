from dataclasses import replace

import pytest

from cpsr.checkpoint.writer import SaveOutcome
from cpsr.planner.live.measurements import RankCosts, RankTimes, of_job

COSTS = RankCosts(0.02, 0.2, 1000, 1e-6)


def test_the_second_moment_is_the_mean_over_the_weights_of_all_ranks() -> None:
    ranks = [replace(COSTS, parameters=parameters, mean_second_moment=at) for parameters, at in ((1, 4.0), (3, 8.0))]
    found = of_job([*ranks, replace(COSTS, mean_second_moment=None)])
    assert (found.mean_second_moment, found.parameters) == (7.0, 1004)


def test_costs_of_other_versions_are_read_as_far_as_they_are_known() -> None:
    meter = RankTimes(1000)
    meter.restore({**vars(COSTS), "iteration": 100, "saves": 3}, replicates=True)
    assert meter.costs() == COSTS
    meter.restore({"stall_seconds": 0.02, "persist_seconds": 0.2}, replicates=True)
    assert meter.costs() is None


def stall(meter: RankTimes, blocked_seconds: float) -> float:
    """The cost of checkpoints that all stall alike."""
    meter.durable(SaveOutcome(100, "committed", "", 100, 0.1, 0.1, blocked_seconds, None))
    costs = meter.costs()
    assert costs is not None
    return costs.stall_seconds


def metered(calm: int, under_way: list[float], blocked_seconds: float = 0.01) -> float:
    meter = RankTimes(1)
    for _ in range(calm):
        meter.steps_seconds.append(0.1)
    meter.begun()
    for seconds in under_way:
        meter.steps_seconds.append(seconds)
    return stall(meter, blocked_seconds)


def test_slower_steps_while_it_is_written_are_its_cost() -> None:
    assert metered(20, [0.15, 0.13, 0.1]) == pytest.approx(0.08)


def test_snapshots_to_memory_meanwhile_are_not_its_cost() -> None:
    meter = RankTimes(1)
    for _ in range(20):
        meter.steps_seconds.append(0.1)
        meter.snapshot(0.02, 0.0)
        meter.steps_seconds.append(0.12)
    meter.begun()
    for _ in range(5):
        meter.snapshot(0.02, 0.0)
        meter.steps_seconds.append(0.13)
    assert stall(meter, 0.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("step_seconds", "stall_seconds"),
    [
        (0.1, 0.002),  # a core had nothing else to do: what training waited
        (0.104, 0.004),
        (9.0, 0.007),  # the script evaluates in these steps: what it waited, and the copy
    ],
)
@pytest.mark.parametrize("disk_is_slow", [False, True])
def test_a_snapshot_to_memory_costs_what_its_step_takes_longer(
    step_seconds: float, stall_seconds: float, disk_is_slow: bool
) -> None:
    meter = RankTimes(1)
    if disk_is_slow:  # so that a checkpoint is always under way
        meter.begun()
    for _ in range(8):
        for _ in range(9):
            meter.steps_seconds.append(0.1)
        meter.snapshot(0.002, 0.005)
        meter.steps_seconds.append(step_seconds)
    costs = meter.costs(memory_alone=True)
    assert costs is not None
    assert costs.memory["stall_seconds"] == pytest.approx(stall_seconds)
    assert "longer_seconds" not in costs.memory


def test_until_enough_steps_show_what_a_snapshot_costs_that_of_the_last_life_stands_for_it() -> None:
    """A single step may as well be shorter: snapshots would then be planned for what training waits alone."""
    meter, costs = RankTimes(1000), []
    meter.restore(vars(replace(COSTS, memory={"stall_seconds": 0.03})), replicates=False)
    for _ in range(9):
        meter.steps_seconds += [0.1] * 9
        meter.snapshot(0.0003, 0.05)
        meter.steps_seconds.append(0.09)
        meter.settle()
        if (known := meter.costs()) is not None:
            costs.append(known.memory["stall_seconds"])
    assert costs == [0.03] * 7 + [0.0003] * 2


@pytest.mark.parametrize(("calm", "under_way"), [(4, [9.0]), (20, [])])
def test_without_a_pace_or_a_step_it_is_what_training_waited(calm: int, under_way: list[float]) -> None:
    assert metered(calm, under_way) == 0.01
