from typing import Any

import numpy
import pytest

from cpsr.checkpoint.catalogue import Retention
from cpsr.journal import RecoveryRow
from cpsr.planner.live.expectations import _measured_costs, expected_costs
from cpsr.planner.plan import Situation, fixed_plan
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import HistoryEntry, Target

SETTINGS = {"context": {"interval_iterations": 50.0}, "expected_end_cost_iterations": 12.0}


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


def costs(*, straightness: float | None = None, lost: float = 1.0) -> tuple[Any, str]:
    """Of a failure 40 iterations after a checkpoint, at an interval of 50; and where the curve comes from."""
    found = expected_costs(at(1500), Retention(), straightness, lost)
    assert found is not None
    return found[0].end_cost_iterations(numpy.array([40.0]), 50.0)[0], found[0].source


def test_a_straighter_path_promises_a_lower_cost() -> None:
    (bent, by_bent), (typical, by_typical), (straight, _) = costs(straightness=0.0), costs(), costs(straightness=0.7)
    assert straight < typical < bent
    assert by_bent == "the offline prior for the run's own path (straightness 0.00)"
    assert by_typical == "the offline prior for a typical path"


def test_a_part_of_the_state_costs_its_share() -> None:
    (whole, _), (part, source) = costs(), costs(lost=0.25)
    assert part == pytest.approx(0.25 * whole)
    assert source.endswith(", 25% of the state lost")


@pytest.mark.parametrize("iteration", [0, 15])
def test_a_run_with_too_few_checkpoints_has_no_curve(iteration: int) -> None:
    assert expected_costs(at(iteration), Retention()) is None


def recovery(**changes: Any) -> RecoveryRow:
    values: dict[str, Any] = {
        "id": "r",
        "life": 1,
        "failure_iteration": 140,
        "checkpoint_iteration": 100,
        "restored_iteration": 140,
        "method": "vitp",
        "requested_mode": "auto",
        "settings": SETTINGS,
        "outcome": "vetoed",
    }
    return RecoveryRow(**{**values, **changes})


def test_what_the_guard_refused_cost_what_was_recomputed() -> None:
    vetoed, rolled_back = _measured_costs([recovery(), recovery(outcome="rolled_back")], 1.0)
    assert (vetoed.horizon_iterations, vetoed.interval_iterations, vetoed.end_cost_iterations) == (40, 50, 40)
    assert rolled_back.end_cost_iterations == 100


def test_what_was_kept_counts_as_expected_in_proportion_to_what_was_lost() -> None:
    (whole,) = _measured_costs([recovery(outcome="kept")], 1.0)
    (part,) = _measured_costs([recovery(outcome="kept", settings={**SETTINGS, "lost_share": 0.5})], 0.25)
    assert (whole.end_cost_iterations, part.end_cost_iterations) == (12.0, 6.0)


@pytest.mark.parametrize(
    "changes", [{"failure_iteration": None}, {"checkpoint_iteration": None}, {"outcome": "watching"}, {"settings": {}}]
)
def test_other_recoveries_are_left_out(changes: dict[str, Any]) -> None:
    assert list(_measured_costs([recovery(**changes)], 1.0)) == []
