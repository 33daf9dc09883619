"""Everything that one call measured, and its aims."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpsr.benchmarks.recovery.grid import INTERVALS, Cell, Selection
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods.roster import LINE, MOVED, PREDICTORS, STALE
from cpsr.benchmarks.recovery.statistics import (
    CellResult,
    Mean,
    cell_results,
    cost_samples,
    differences,
    grid_mean,
    lag_samples,
)
from cpsr.fitter.end_cost import IterationWorth

__all__ = [
    "END_COST_AIM",
    "PAPER_BELOW",
    "PAPER_SAVED",
    "PAPER_SAVED_MEAN",
    "GridMean",
    "RecoveryResult",
    "summarise",
]

GUARDED = {name for name, method in PREDICTORS.items() if method.guarded}
END_COST_AIM = 0.2  # mean end cost over the feasible grid, in horizons, on workloads that the prior was fitted to
# What the paper measured, beside which ours is printed: recovery cost saved by stage and on average, and the share of
# the time below the baseline's loss (sections VI-C and Fig. 8).
PAPER_SAVED = {0.25: 0.186, 0.5: 0.508, 0.75: 0.554}
PAPER_SAVED_MEAN = 0.4166
PAPER_BELOW = 0.589


@dataclass(frozen=True)
class GridMean:
    """A method's cost over the horizon, averaged over cells of the feasible grid that count alike.

    Attributes:
        method: its name.
        workload: of the cells; None for all.
        fraction: of the cells; None for all.
        interval: of the cells; None for all.
        lost: part of the state, of the cells.
        cells: how many there are.
        end_cost: the mean; 1 is what recomputing costs.
        lag: mean lag after 60 to 160 iterations; None where a cell has none.
        diverged: failures after which training diverged, which are in no mean.
        of_all_horizons: sum of the end costs over sum of the horizons: what counts for the time lost.
    """

    method: str
    workload: str | None
    fraction: float | None
    interval: int | None
    lost: PartName
    cells: int
    end_cost: Mean
    lag: Mean | None
    diverged: int
    of_all_horizons: float


@dataclass(frozen=True)
class RecoveryResult:
    """What is printed, drawn and written.

    Attributes:
        selection: what was asked for.
        machine: where it was measured.
        methods: their names.
        cells: every method in every cell.
        means: over cells.
        against_moved: by method, end cost over the horizon minus that of recomputing and moving as far, paired.
        against_line: the same minus that of `line`.
        against_line_predicted: the same over the failures at which both predict.
        worths: loss that an iteration is worth, by workload.
    """

    selection: Selection
    machine: dict[str, Any]
    methods: tuple[str, ...]
    cells: list[CellResult]
    means: list[GridMean]
    against_moved: dict[str, Mean]
    against_line: dict[str, Mean]
    against_line_predicted: dict[str, Mean]
    worths: Mapping[str, IterationWorth]

    def mean(
        self,
        method: str,
        workload: str | None = None,
        fraction: float | None = None,
        interval: int | None = None,
        lost: PartName = "all",
    ) -> GridMean | None:
        """The grid mean of these cells, None where nothing was measured."""
        wanted = (method, workload, fraction, interval, lost)
        found = (
            one for one in self.means if (one.method, one.workload, one.fraction, one.interval, one.lost) == wanted
        )
        return next(found, None)

    def to_json(self, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
        """Plain data; each failure is `[seed, interval, checkpoint, failure, lost, end cost, final gap, lag]`."""
        return {
            "selection": asdict(self.selection),
            "aim": {"mean_end_cost_over_horizon": END_COST_AIM},
            "anchors": {
                "paper_saved_by_stage": {str(fraction): saved for fraction, saved in PAPER_SAVED.items()},
                "paper_saved_mean": PAPER_SAVED_MEAN,
                "paper_share_below_baseline": PAPER_BELOW,
            },
            "means": [asdict(mean) for mean in self.means],
            "against_recompute_moved": _plain(self.against_moved),
            "against_line": _plain(self.against_line),
            "against_line_where_both_predict": _plain(self.against_line_predicted),
            "cells": [asdict(cell) for cell in self.cells],
            "worths": {name: asdict(worth) for name, worth in self.worths.items()},
            "failures": {name: _failures(of) for name, of in outcomes.items()},
        }


def summarise(
    selection: Selection,
    machine: dict[str, Any],
    methods: Sequence[str],
    outcomes: dict[str, list[Outcome]],
    worths: Mapping[str, IterationWorth],
) -> RecoveryResult:
    """Cells, and their means by workload and by stage.

    Args:
        selection: what was asked for.
        machine: where it was measured.
        methods: their names, in order.
        outcomes: by workload.
        worths: of an iteration, by workload.
    """
    by_cell = {
        Cell(workload, interval, fraction, lost): [
            outcome
            for outcome in of
            if (outcome.point.interval, outcome.point.fraction, outcome.point.lost) == (interval, fraction, lost)
        ]
        for workload, of in outcomes.items()
        for interval in selection.intervals
        for fraction in selection.fractions
        for lost in selection.lost
    }
    cells = [result for cell, of in by_cell.items() for result in cell_results(cell, of)]
    means = []
    for method in methods:
        intervals = [interval for interval in selection.intervals if interval in INTERVALS]
        for lost in selection.lost:
            mine = {cell: of for cell, of in _feasible(by_cell, method).items() if cell.lost == lost}
            for workload in (None, *selection.workloads):
                for fraction in (None, *selection.fractions):
                    means += _grid_mean(mine, method, workload, fraction, None, lost)
                for interval in intervals:
                    means += _grid_mean(mine, method, workload, None, interval, lost)
    guarded = [method for method in methods if method in GUARDED]
    others = [method for method in methods if method in PREDICTORS and method not in (LINE, STALE)]
    predicted = {cell: [one for one in of if one.predicted] for cell, of in by_cell.items()}
    return RecoveryResult(
        selection,
        machine,
        tuple(methods),
        cells,
        means,
        against_moved=_against(by_cell, guarded, MOVED),
        against_line=_against(by_cell, others, LINE),
        against_line_predicted=_against(predicted, others, LINE),
        worths=worths,
    )


def _feasible(by_cell: dict[Cell, list[Outcome]], method: str) -> dict[Cell, list[Outcome]]:
    """A method's outcomes in the cells of the feasible grid that have any end cost of it."""
    mine = {
        cell: [outcome for outcome in of if outcome.method == method]
        for cell, of in by_cell.items()
        if cell.interval in INTERVALS
    }
    return {cell: found for cell, found in mine.items() if cost_samples(cell.workload, found)}


def _grid_mean(
    mine: dict[Cell, list[Outcome]],
    method: str,
    workload: str | None,
    fraction: float | None,
    interval: int | None,
    lost: PartName,
) -> list[GridMean]:
    chosen = {
        cell: found
        for cell, found in mine.items()
        if workload in (None, cell.workload) and fraction in (None, cell.fraction) and interval in (None, cell.interval)
    }
    if not chosen:
        return []
    outcomes = [outcome for found in chosen.values() for outcome in found]
    known = [(one.end_cost_iterations, one.point.horizon) for one in outcomes if one.end_cost_iterations is not None]
    lags = [lag_samples(cell.workload, found) for cell, found in chosen.items()]
    return [
        GridMean(
            method=method,
            workload=workload,
            fraction=fraction,
            interval=interval,
            lost=lost,
            cells=len(chosen),
            end_cost=grid_mean([cost_samples(cell.workload, found) for cell, found in chosen.items()]),
            lag=grid_mean(lags) if all(lags) else None,
            diverged=len(outcomes) - len(known),
            of_all_horizons=sum(cost for cost, _ in known) / sum(horizon for _, horizon in known),
        )
    ]


def _against(by_cell: dict[Cell, list[Outcome]], methods: Sequence[str], other: str) -> dict[str, Mean]:
    beside = _feasible(by_cell, other)
    found = {}
    for method in methods:
        cells = [
            differences(cell.workload, of, beside[cell])
            for cell, of in _feasible(by_cell, method).items()
            if cell in beside
        ]
        if any(cells):
            found[method] = grid_mean([cell for cell in cells if cell])
    return found


def _plain(means: Mapping[str, Mean]) -> dict[str, Any]:
    return {name: asdict(mean) for name, mean in means.items()}


def _failures(outcomes: Sequence[Outcome]) -> dict[str, list[list[float | str | None]]]:
    found: dict[str, list[list[float | str | None]]] = {}
    for one in outcomes:
        point = one.point
        row = [one.seed, point.interval, point.checkpoint, point.failure, point.lost]
        measured = [
            _rounded(one.end_cost_iterations, 2),
            _rounded(one.final_gap_nats, 6),
            _rounded(one.lag_iterations, 2),
        ]
        found.setdefault(one.method, []).append([*row, *measured])
    return found


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
