from collections.abc import Mapping

import numpy
import pytest

from cpsr.planner.live.expectations import NONE_YET, expected_costs
from cpsr.planner.plan import Situation, fixed_plan
from cpsr.predictor.calibration import STALE, Context, table


def at(iteration: int, learning_rate: float) -> Situation:
    return Situation(iteration, learning_rate, 1e-3, 0.1, fixed_plan(50))


def costs(
    *, learning_rate: float = 5e-4, lost: float = 1.0, outcomes: Mapping[str, int] = NONE_YET
) -> tuple[float, str]:
    """Of a failure 40 iterations after a checkpoint; and where the curve comes from."""
    found = expected_costs(at(1500, learning_rate), lost, outcomes)
    return float(found.end_cost_iterations(numpy.array([40.0]), 50.0)[0]), found.source


def test_it_is_what_skipping_costs_net_of_any_move() -> None:
    cost, source = costs()
    assert cost == pytest.approx(table().expected(Context(40.0, 1500.0, 0.5), STALE).skip_iterations)
    assert source == "the offline prior for skipped iterations at 50% of the peak learning rate"


def test_a_lower_learning_rate_skips_less_and_nothing_pays() -> None:
    falling = [costs(learning_rate=rate)[0] for rate in (6e-4, 3e-4, 1e-4, 0.0)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] >= 0.0


def test_a_part_of_the_state_costs_less_than_its_share() -> None:
    (whole, _), (part, source) = costs(), costs(lost=0.25)
    assert 0.0 <= part <= 0.25 * whole
    assert source.endswith(", 25% of the state lost")


def test_vetoes_and_roll_backs_raise_the_expected_cost() -> None:
    """With four kept in advance: of ten predictions two repeat 40 iterations, and one of them 60 more."""
    known = {"kept": 4, "vetoed": 1, "rolled_back": 1, "watching": 1}
    (before, _), (after, source) = costs(), costs(outcomes=known)
    assert after == pytest.approx(0.8 * before + 0.2 * 40 + 0.1 * 60)
    assert source.startswith("6 recoveries of the run, on the offline prior")
