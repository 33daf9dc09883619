from collections.abc import Mapping

import numpy
import pytest

from cpsr.checkpoint.catalogue import Retention
from cpsr.planner.live.expectations import NONE_YET, expected_costs
from cpsr.planner.plan import Situation, fixed_plan
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import HistoryEntry, Target


def at(iteration: int) -> Situation:
    return Situation(iteration, 5e-4, 1e-3, 0.1, fixed_plan(50))


def test_the_line_follows_what_the_prior_expects() -> None:
    found = expected_costs(at(1500), Retention())
    assert found is not None
    curve, longest = found
    assert longest == 200, "400 iterations of history hold three checkpoints up to there"
    points = [HistoryEntry(at, 5e-4 * at, 5e-4) for at in range(1100, 1501, 50)]
    expected = LinePredictor().expected(points, Target(1540, 5e-4 * 1540, 1e-3))
    assert not isinstance(expected, str)
    (cost,) = curve.end_cost_iterations(numpy.array([40.0]), 50.0)
    assert cost == pytest.approx(expected.end_cost_iterations, abs=expected.deviation_iterations)


def costs(
    *, straightness: float | None = None, lost: float = 1.0, outcomes: Mapping[str, int] = NONE_YET
) -> tuple[float, str]:
    """Of a failure 40 iterations after a checkpoint, at an interval of 50; and where the curve comes from."""
    found = expected_costs(at(1500), Retention(), straightness, lost, outcomes)
    assert found is not None
    return float(found[0].end_cost_iterations(numpy.array([40.0]), 50.0)[0]), found[0].source


def test_a_straighter_path_promises_a_lower_cost() -> None:
    (bent, by_bent), (typical, by_typical), (straight, _) = costs(straightness=0.0), costs(), costs(straightness=0.7)
    assert straight < typical < bent
    assert by_bent == "the offline prior for the run's own path (straightness 0.00)"
    assert by_typical == "the offline prior for a typical path"


def test_a_part_of_the_state_costs_less_than_its_share() -> None:
    (whole, _), (part, source) = costs(straightness=0.0), costs(straightness=0.0, lost=0.25)
    assert abs(part) < 0.25 * abs(whole)
    assert source.endswith(", 25% of the state lost")


@pytest.mark.parametrize("iteration", [0, 15])
def test_a_run_with_too_few_checkpoints_has_no_curve(iteration: int) -> None:
    assert expected_costs(at(iteration), Retention()) is None


def test_vetoes_and_roll_backs_raise_the_expected_cost() -> None:
    """With four kept in advance: of ten predictions two repeat 40 iterations, and one of them 60 more."""
    known = {"kept": 4, "vetoed": 1, "rolled_back": 1, "watching": 1}
    (before, _), (after, source) = costs(), costs(outcomes=known)
    assert after == pytest.approx(0.8 * before + 0.2 * 40 + 0.1 * 60)
    assert source == "6 recoveries of the run, on the offline prior for a typical path"
