"""From single recoveries to cells and grids: means, intervals over training runs, and verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from scipy import stats

from cpsr.benchmarks.harness.intervals import CONFIDENCE
from cpsr.benchmarks.recovery.grid import Cell
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods import LINE, MOVED, PREDICTORS, RECOMPUTE, STALE
from cpsr.benchmarks.recovery.selection import Selection
from cpsr.fitter.end_cost import IterationWorth

__all__ = [
    "END_COST_AIM",
    "MIN_SEEDS",
    "CellResult",
    "GridMean",
    "Mean",
    "RecoveryResult",
    "Sample",
    "cell_results",
    "grid_mean",
    "summarise",
    "verdict",
]

# Failures of one run share the run that never failed, and its luck: only runs with other seeds are independent.
MIN_SEEDS = 3
TOLERATED_HORIZONS = 0.1  # a method is at most this much worse before a cell counts against it
END_COST_AIM = 0.2  # mean end cost over the grid, in horizons, on workloads that the prior was fitted to


@dataclass(frozen=True)
class Mean:
    """A mean; `low` and `high` bound its 95% interval over training runs, None with fewer than three seeds."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Sample:
    """One number of a failure: of which workload and seed."""

    workload: str
    seed: int
    value: float


@dataclass(frozen=True)
class CellResult:
    """One method in one cell.

    Attributes:
        cell: the cell.
        method: its name.
        points: failures with an end cost.
        diverged: failures after which training diverged; they are in no mean, and forbid a verdict.
        declined: failures at which the method advised against itself, so that the horizon was recomputed.
        end_cost: over the horizon; 1 is what recomputing costs.
        against_stale: `end_cost` minus that of going on from the checkpoint, paired; None where that was not measured.
        recover_iterations: forecasting, predicting and injecting, in training iterations; median.
        verdicts: `better`, `not worse`, `worse` or `undetermined`, against recomputing and against stale.
    """

    cell: Cell
    method: str
    points: int
    diverged: int
    declined: int
    end_cost: Mean
    against_stale: Mean | None
    recover_iterations: float | None
    verdicts: dict[str, str]


@dataclass(frozen=True)
class GridMean:
    """A method's end cost over the horizon, averaged over cells of the grid that count alike.

    Attributes:
        method: its name.
        workload: of the cells; None for all.
        fraction: of the cells; None for all.
        interval: of the cells; None for all.
        lost: part of the state, of the cells.
        cells: how many there are.
        end_cost: the mean; 1 is what recomputing costs.
        of_all_horizons: sum of the end costs over sum of the horizons: what counts for the time lost.
    """

    method: str
    workload: str | None
    fraction: float | None
    interval: int | None
    lost: PartName
    cells: int
    end_cost: Mean
    of_all_horizons: float


@dataclass(frozen=True)
class RecoveryResult:
    """What is printed, drawn and written.

    Attributes:
        selection: what was asked for.
        cells: every method in every cell.
        means: over cells.
        against_moved: by method, end cost over the horizon minus that of recomputing and moving as far, paired.
        against_line: the same minus that of `line`.
        worths: loss that an iteration is worth, by workload.
    """

    selection: Selection
    cells: list[CellResult]
    means: list[GridMean]
    against_moved: dict[str, Mean]
    against_line: dict[str, Mean]
    worths: Mapping[str, IterationWorth]

    def mean(
        self, method: str, fraction: float | None = None, interval: int | None = None, lost: PartName = "all"
    ) -> GridMean | None:
        """The mean over all workloads of these cells, None where nothing was measured."""
        wanted = (method, None, fraction, interval, lost)
        found = (
            one for one in self.means if (one.method, one.workload, one.fraction, one.interval, one.lost) == wanted
        )
        return next(found, None)

    def to_json(self, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
        """Plain data; each failure is `[seed, interval, checkpoint, failure, lost, end cost, final gap]`."""
        return {
            "selection": asdict(self.selection),
            "aim": {"mean_end_cost_over_horizon": END_COST_AIM},
            "means": [asdict(mean) for mean in self.means],
            "against_recompute_moved": {name: asdict(mean) for name, mean in self.against_moved.items()},
            "against_line": {name: asdict(mean) for name, mean in self.against_line.items()},
            "cells": [asdict(cell) for cell in self.cells],
            "worths": {name: asdict(worth) for name, worth in self.worths.items()},
            "failures": {name: _failures(of) for name, of in outcomes.items()},
        }


def summarise(
    selection: Selection, outcomes: dict[str, list[Outcome]], worths: Mapping[str, IterationWorth]
) -> RecoveryResult:
    """Cells, and their means by workload, by stage and by interval.

    Args:
        selection: what was asked for.
        outcomes: by workload.
        worths: of an iteration, by workload.
    """
    by_cell: dict[Cell, list[Outcome]] = {}
    for name, of in outcomes.items():
        for one in of:
            cell = Cell(name, one.point.interval, one.point.fraction, one.point.lost)
            by_cell.setdefault(cell, []).append(one)
    methods, groups = selection.methods, list[tuple[float | None, int | None]]([(None, None)])
    groups += [(fraction, None) for fraction in selection.fractions]
    groups += [(None, interval) for interval in selection.intervals]
    wanted = [
        (method, workload, fraction, interval, lost)
        for method in methods
        for lost in selection.lost
        for workload in (None, *selection.workloads)
        for fraction, interval in groups
    ]
    guarded = [method for method in methods if method in PREDICTORS and PREDICTORS[method].guarded]
    others = [method for method in methods if method in PREDICTORS and method != LINE]
    return RecoveryResult(
        selection,
        [result for cell, of in by_cell.items() for result in cell_results(cell, of)],
        [mean for asked in wanted if (mean := _grid_mean(by_cell, *asked)) is not None],
        against_moved=_against(by_cell, guarded, MOVED),
        against_line=_against(by_cell, others, LINE),
        worths=worths,
    )


def cell_results(cell: Cell, outcomes: Sequence[Outcome]) -> list[CellResult]:
    """Every method of one cell, in the order in which they appear; a method that always diverged is left out."""
    stale = _with_cost(outcomes, STALE)
    found = []
    for method in dict.fromkeys(outcome.method for outcome in outcomes):
        known = _with_cost(outcomes, method)
        if not known:
            continue
        diverged = sum(one.method == method for one in outcomes) - len(known)
        costs = _samples(cell.workload, known)
        beside = _differences(cell.workload, known, stale)
        against_stale = grid_mean([beside]) if beside else None
        verdicts = {}
        if method != RECOMPUTE:
            against = grid_mean([[Sample(one.workload, one.seed, one.value - 1.0) for one in costs]])
            verdicts[RECOMPUTE] = verdict(against, diverged)
        if against_stale is not None and method != STALE:
            verdicts[STALE] = verdict(against_stale, diverged + len(known) - len(beside))
        recover = [one.recover_iterations for one in known if one.recover_iterations is not None]
        found.append(
            CellResult(
                cell=cell,
                method=method,
                points=len(known),
                diverged=diverged,
                declined=0 if method in (RECOMPUTE, MOVED) else sum(not one.predicted for one in known),
                end_cost=grid_mean([costs]),
                against_stale=against_stale,
                recover_iterations=float(numpy.median(recover)) if recover else None,
                verdicts=verdicts,
            )
        )
    return found


def grid_mean(cells: Sequence[Sequence[Sample]]) -> Mean:
    """Mean over cells that count alike; in a cell, failures of a seed count as one.

    The interval is Student's over training runs. A seed of a workload is one run, whatever cells it appears in; the
    workload's seeds scatter around their mean, workloads are independent, and their degrees of freedom are combined as
    Welch and Satterthwaite do.

    Raises:
        ValueError: there is no cell, or one without samples.
    """
    if not cells or not all(cells):
        raise ValueError("no samples")
    parts: dict[str, dict[int, float]] = {}
    for samples in cells:
        seeds: dict[tuple[str, int], list[float]] = {}
        for sample in samples:
            seeds.setdefault((sample.workload, sample.seed), []).append(sample.value)
        for (workload, seed), values in seeds.items():
            of = parts.setdefault(workload, {})
            of[seed] = of.get(seed, 0.0) + float(numpy.mean(values)) / len(seeds) / len(cells)
    value = sum(part for of in parts.values() for part in of.values())
    if any(len(of) < MIN_SEEDS for of in parts.values()):
        return Mean(value, None, None)
    variances = [len(of) * float(numpy.var(list(of.values()), ddof=1)) for of in parts.values()]
    total = sum(variances)
    if total == 0.0:
        return Mean(value, value, value)
    freedom = 1.0 / sum(
        (variance / total) ** 2 / (len(of) - 1) for variance, of in zip(variances, parts.values(), strict=True)
    )
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)) * math.sqrt(total)
    return Mean(value, value - half, value + half)


def verdict(difference: Mean, missing: int = 0) -> str:
    """What a paired difference in horizons says: `better`, `not worse`, `worse` or `undetermined`.

    Args:
        difference: of the method to what it is compared with; positive costs more.
        missing: points that are not in it.
    """
    if missing or difference.low is None or difference.high is None:
        return "undetermined"
    if difference.low > 0.0:
        return "worse"
    if difference.high < 0.0:
        return "better"
    return "not worse" if difference.high <= TOLERATED_HORIZONS else "undetermined"


def _with_cost(outcomes: Sequence[Outcome], method: str) -> list[Outcome]:
    return [one for one in outcomes if one.method == method and one.end_cost_iterations is not None]


def _share(outcome: Outcome) -> float:
    assert outcome.end_cost_iterations is not None
    return outcome.end_cost_iterations / outcome.point.horizon


def _samples(workload: str, outcomes: Sequence[Outcome]) -> list[Sample]:
    return [Sample(workload, one.seed, _share(one)) for one in outcomes]


def _differences(workload: str, outcomes: Sequence[Outcome], others: Sequence[Outcome]) -> list[Sample]:
    """End costs over horizons minus those of another method, at the failures that both have."""
    beside = {(other.seed, other.point): _share(other) for other in others}
    return [
        Sample(workload, one.seed, _share(one) - beside[one.seed, one.point])
        for one in outcomes
        if (one.seed, one.point) in beside
    ]


def _grid_mean(
    by_cell: dict[Cell, list[Outcome]],
    method: str,
    workload: str | None,
    fraction: float | None,
    interval: int | None,
    lost: PartName,
) -> GridMean | None:
    found = [
        (cell, known)
        for cell, of in by_cell.items()
        if cell.lost == lost
        and workload in (None, cell.workload)
        and fraction in (None, cell.fraction)
        and interval in (None, cell.interval)
        and (known := _with_cost(of, method))
    ]
    if not found:
        return None
    outcomes = [outcome for _, known in found for outcome in known]
    horizons = sum(one.point.horizon for one in outcomes)
    return GridMean(
        method=method,
        workload=workload,
        fraction=fraction,
        interval=interval,
        lost=lost,
        cells=len(found),
        end_cost=grid_mean([_samples(cell.workload, known) for cell, known in found]),
        of_all_horizons=sum(_share(one) * one.point.horizon for one in outcomes) / horizons,
    )


def _against(by_cell: dict[Cell, list[Outcome]], methods: Sequence[str], other: str) -> dict[str, Mean]:
    found = {}
    for method in methods:
        cells = [
            _differences(cell.workload, _with_cost(of, method), _with_cost(of, other)) for cell, of in by_cell.items()
        ]
        if any(cells):
            found[method] = grid_mean([cell for cell in cells if cell])
    return found


def _failures(outcomes: Sequence[Outcome]) -> dict[str, list[list[float | str | None]]]:
    found: dict[str, list[list[float | str | None]]] = {}
    for one in outcomes:
        cost, gap = one.end_cost_iterations, one.final_gap_nats
        row = [one.seed, one.point.interval, one.point.checkpoint, one.point.failure, one.point.lost]
        measured = [None if cost is None else round(cost, 2), None if gap is None else round(gap, 6)]
        found.setdefault(one.method, []).append([*row, *measured])
    return found
