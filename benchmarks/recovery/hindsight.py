"""Settings chosen after they were measured: how far a better choice among the line's arms could go."""

import math
from collections.abc import Sequence
from dataclasses import replace

from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods import ARMS, CELL_BEST, HINDSIGHT

__all__ = ["chosen_outcomes"]


def chosen_outcomes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """What would have been measured, had each failure been recovered with the arm that hindsight chooses.

    `line-hindsight` takes at each failure the arm that cost least there: optimistic, since the same measurement
    chooses and judges. `line-cell-best` takes the arm with the least mean over the cell's *other* failures (those after
    the same checkpoint count as one with it), so that no failure judges a choice that it took part in.

    Args:
        outcomes: the arms' among them, of one workload.

    Returns:
        One of each kind for every failure at which the arms were measured.
    """
    cells: dict[tuple[int, float], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.method in ARMS:
            cells.setdefault((outcome.point.interval, outcome.point.fraction), []).append(outcome)
    return [chosen for cell in cells.values() for chosen in (*_at_each_point(cell), *_of_the_cell(cell))]


def _at_each_point(cell: Sequence[Outcome]) -> list[Outcome]:
    return [_named(HINDSIGHT, min(arms, key=_cost)) for arms in _by_point(cell)]


def _of_the_cell(cell: Sequence[Outcome]) -> list[Outcome]:
    chosen = []
    for arms in _by_point(cell):
        others = [one for one in cell if (one.seed, one.point.checkpoint) != (arms[0].seed, arms[0].point.checkpoint)]
        if others:
            means = {arm: _mean_cost([one for one in others if one.method == arm]) for arm in ARMS}
            best = min(means, key=lambda arm: means[arm])
            chosen.append(_named(CELL_BEST, next(one for one in arms if one.method == best)))
        else:
            nothing = "no other failure in the cell to choose an arm by"
            none = Outcome(CELL_BEST, arms[0].seed, arms[0].point, False, nothing, None)
            chosen.append(none)
    return chosen


def _by_point(cell: Sequence[Outcome]) -> list[list[Outcome]]:
    points: dict[tuple[int, int], list[Outcome]] = {}
    for outcome in cell:
        points.setdefault((outcome.seed, outcome.point.failure), []).append(outcome)
    return list(points.values())


def _mean_cost(outcomes: Sequence[Outcome]) -> float:
    return math.fsum(_cost(outcome) for outcome in outcomes) / len(outcomes)


def _cost(outcome: Outcome) -> float:
    """Lag over the horizon; an arm without a lag is never chosen where another has one."""
    return math.inf if outcome.lag_iterations is None else outcome.lag_iterations / outcome.point.horizon


def _named(name: str, outcome: Outcome) -> Outcome:
    return replace(outcome, method=name, settings={**(outcome.settings or {}), "arm": outcome.method})
