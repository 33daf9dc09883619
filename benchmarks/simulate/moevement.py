"""MoEvement's Table 3 and Fig. 11, simulated from the configurations that its paper states."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from cpsr.benchmarks.simulate.table3 import HALF_CENTISECOND, MODELS, MTBF_MINUTES, Model
from cpsr.planner.baselines import Gemini
from cpsr.planner.inputs import PlannerInputs
from cpsr.simulate.arrivals import poisson
from cpsr.simulate.closed_forms import exact_ettr, formula_ettr
from cpsr.simulate.iteration import sparse_window_iterations
from cpsr.simulate.run import simulate
from cpsr.simulate.system import Checkpoints, Job, Replay, Rollback, System

__all__ = ["CLUSTERS", "Cell", "Cluster", "ScaledCell", "figure_11", "report", "table_3"]

MINUTE_SECONDS = 60.0
WALL_SECONDS = 12 * 3600.0  # section 5.2: "over 12-hour training runs"
RUNS = 1000
SEED = 0

# The paper's Fig. 1a: taking a checkpoint at every iteration slows DeepSeek-16.4B by so much under Gemini.
SLOWDOWN_AT_EVERY_ITERATION = 2.5
# Section 3.2: bytes of a parameter's master weight and optimizer state, and of its compute weight.
FULL_BYTES, COMPUTE_BYTES = 12, 2
# Operators of a layer of the evaluated model that are snapshotted one by one: 64 experts, the rest, the gate.
OPERATORS = 66
GPUS_PER_NODE = 8
REFERENCE_PARAMETERS, REFERENCE_NODES = 16.4e9, 12
# Overhead of MoEvement on an iteration, Table 3: at most 2%.
SPARSE_OVERHEAD_FRACTION = 0.02
# Section 3.4: localized recovery is 23% faster. The micro-batches of Fig. 11 are not stated, so that the share of its
# pipelines' bubbles is not known.
LOCALIZED_TIME_FRACTION = 0.77
FIGURE_MTBF_MINUTES = (60, 30, 10)
# Iteration times are not stated: in proportion to the state of a node, and this much off it.
ITERATION_FACTORS = (1.0, 0.75, 1.5)


@dataclass(frozen=True)
class Cell:
    """One cell of Table 3.

    Attributes:
        model: of the row.
        system: of the column.
        mtbf_minutes: of the row.
        interval_iterations: as stated, or the oracle's.
        paper_ettr: as printed.
        simulated_ettr: from the configuration; its standard error; least and greatest that the rounding of the
            configuration allows, by the closed form.
        formula_ettr: by the paper's formula from its own overhead and its own recovery times.
        paper_recovery_seconds: in all, over 12 hours, as printed; simulated: time repeated.
        unexplained_seconds: more for each failure would make the simulated ETTR the printed one.
    """

    model: str
    system: str
    mtbf_minutes: int
    interval_iterations: int
    paper_ettr: float
    simulated_ettr: float
    standard_error: float
    simulated_low: float
    simulated_high: float
    formula_ettr: float
    paper_recovery_seconds: float
    simulated_recovery_seconds: float
    unexplained_seconds: float

    @property
    def difference(self) -> float:
        """Simulated less printed."""
        return self.simulated_ettr - self.paper_ettr


def table_3() -> list[Cell]:
    """Every cell whose configuration is stated: CheckFreq, Gemini under its oracle, MoEvement."""
    return [
        _cell(model, system, index)
        for model, system, index in product(MODELS, ("CheckFreq", "Gemini", "MoEvement"), range(len(MTBF_MINUTES)))
    ]


def _cell(model: Model, system: str, index: int) -> Cell:
    mtbf = MTBF_MINUTES[index] * MINUTE_SECONDS
    paper_ettr, paper_recovery = {
        "CheckFreq": (model.checkfreq_ettr, model.checkfreq_recovery_seconds),
        "Gemini": (model.gemini_ettr, model.gemini_recovery_seconds),
        "MoEvement": (model.moevement_ettr, model.moevement_recovery_seconds),
    }[system]
    overhead = model.overheads[{"CheckFreq": 0, "Gemini": 1, "MoEvement": 3}[system]].seconds
    setting = _setting(model, system, mtbf, model.iteration_seconds, overhead, sum(model.gemini_interval_range) / 2)
    job = Job(model.iteration_seconds, WALL_SECONDS)
    outcome = simulate(job, setting, poisson(mtbf), RUNS, SEED)
    ettr, error = outcome.mean_and_error(outcome.ettr)
    corners = list(_corners(model, system, mtbf, overhead))
    stall = setting.checkpoints.stall_seconds
    interval = setting.checkpoints.interval_iterations
    failures = WALL_SECONDS / mtbf
    by_formula = formula_ettr(model.iteration_seconds, interval, stall, paper_recovery[index] / failures, mtbf)
    return Cell(
        model.name,
        system,
        MTBF_MINUTES[index],
        interval,
        paper_ettr[index],
        ettr,
        error,
        min(corners),
        max(corners),
        by_formula,
        paper_recovery[index],
        float(outcome.lost_seconds.mean()),
        mtbf * (ettr / paper_ettr[index] - 1),
    )


def _setting(
    model: Model, system: str, mtbf_seconds: float, iteration_seconds: float, overhead_seconds: float, at_2h: float
) -> System:
    if system == "CheckFreq":
        interval = model.checkfreq_interval
        return System(system, Checkpoints(interval, overhead_seconds * interval), Rollback())
    if system == "MoEvement":
        window = model.window
        replay = Replay(conversion_iterations=window, time_fraction=model.bubble_free_fraction)
        return System(system, Checkpoints(window, overhead_seconds * window), replay)
    # Its overhead at 2 hours is the stall of one checkpoint over the interval there.
    stall = overhead_seconds * at_2h
    choice = Gemini().choose(PlannerInputs(iteration_seconds, stall, 0.0, 1 / mtbf_seconds))
    return System(system, Checkpoints(choice.interval_iterations, stall), Rollback())


def _corners(model: Model, system: str, mtbf_seconds: float, overhead_seconds: float) -> Iterator[float]:
    """ETTR at the ends of what the rounding of the printed configuration allows."""
    overheads = (max(overhead_seconds - HALF_CENTISECOND, 0.0), overhead_seconds + HALF_CENTISECOND)
    for seconds, overhead, at_2h in product(model.iteration_seconds_range, overheads, model.gemini_interval_range):
        checkpoints = _setting(model, system, mtbf_seconds, seconds, overhead, at_2h).checkpoints
        interval, stall = checkpoints.interval_iterations, checkpoints.stall_seconds
        if system == "MoEvement":
            recovery = 1.5 * interval * seconds * model.bubble_free_fraction
            yield formula_ettr(seconds, interval, stall, recovery, mtbf_seconds)
        else:
            yield exact_ettr(seconds, interval, stall, 0.0, mtbf_seconds)


@dataclass(frozen=True)
class Cluster:
    """One point of Fig. 11's x axis (section 5.4)."""

    name: str
    parameters: float
    gpus: int
    stages: int
    pipelines: int

    @property
    def state_ratio(self) -> float:
        """State of a node over that of the evaluated 16.4B cluster; every pipeline holds the whole model."""
        nodes = self.gpus / self.pipelines / GPUS_PER_NODE
        return self.parameters / nodes / (REFERENCE_PARAMETERS / REFERENCE_NODES)


CLUSTERS = (
    Cluster("32B", 32e9, 512, 16, 4),
    Cluster("67B", 67e9, 1536, 24, 8),
    Cluster("145B", 145e9, 4096, 32, 16),
    Cluster("671B", 671e9, 16384, 64, 32),
)
# Section 5.4 gives two values in figures; the rest of Fig. 11 is a picture.
PAPER_FIGURE = {("671B", 10, "MoEvement"): 0.86, ("671B", 10, "Gemini"): 0.55}


@dataclass(frozen=True)
class ScaledCell:
    """One point of Fig. 11.

    Attributes:
        cluster: by its model's size.
        system: Gemini under its oracle, or MoEvement.
        mtbf_minutes: of the job.
        iteration_factor: the iteration time over what is in proportion to a node's state.
        interval_iterations: of Gemini, or the window.
        simulated_ettr: mean, and its standard error.
        paper_ettr: where it is given in figures.
        missing_seconds: more for each failure would make the two equal.
    """

    cluster: str
    system: str
    mtbf_minutes: int
    iteration_factor: float
    iteration_seconds: float
    interval_iterations: int
    simulated_ettr: float
    standard_error: float
    paper_ettr: float | None
    missing_seconds: float | None


def figure_11() -> list[ScaledCell]:
    """All points at the assumed iteration times."""
    points = product(CLUSTERS, FIGURE_MTBF_MINUTES, ITERATION_FACTORS)
    return [cell for cluster, minutes, factor in points for cell in _scaled(cluster, minutes, factor)]


def _scaled(cluster: Cluster, minutes: int, factor: float) -> Iterator[ScaledCell]:
    reference = next(model for model in MODELS if model.name == "DeepSeek-MoE").iteration_seconds
    # A checkpoint that overlaps with one iteration and still makes it 2.5 times as long takes 2.5 of them.
    transfer = SLOWDOWN_AT_EVERY_ITERATION * reference * cluster.state_ratio
    seconds = reference * cluster.state_ratio * factor
    mtbf = minutes * MINUTE_SECONDS
    job = Job(seconds, WALL_SECONDS)
    for system in (_scaled_gemini(seconds, transfer, mtbf), _scaled_moevement(cluster, seconds, transfer)):
        outcome = simulate(job, system, poisson(mtbf), RUNS, SEED)
        ettr, error = outcome.mean_and_error(outcome.ettr)
        paper = PAPER_FIGURE.get((cluster.name, minutes, system.name))
        missing = None if paper is None else mtbf * (ettr / paper - 1)
        interval = system.checkpoints.interval_iterations
        yield ScaledCell(cluster.name, system.name, minutes, factor, seconds, interval, ettr, error, paper, missing)


def _scaled_gemini(iteration_seconds: float, transfer_seconds: float, mtbf_seconds: float) -> System:
    stall = max(transfer_seconds - iteration_seconds, 0.0)
    choice = Gemini().choose(PlannerInputs(iteration_seconds, stall, 0.0, 1 / mtbf_seconds))
    return System("Gemini", Checkpoints(choice.interval_iterations, stall), Rollback())


def _scaled_moevement(cluster: Cluster, iteration_seconds: float, transfer_seconds: float) -> System:
    bytes_per_second = OPERATORS * FULL_BYTES / transfer_seconds
    window = sparse_window_iterations(OPERATORS, FULL_BYTES, COMPUTE_BYTES, bytes_per_second, iteration_seconds)
    stall = SPARSE_OVERHEAD_FRACTION * iteration_seconds * window
    return System("MoEvement", Checkpoints(window, stall), Replay(window, LOCALIZED_TIME_FRACTION))


def report(cells: Sequence[Cell], scaled: Sequence[ScaledCell]) -> dict[str, Any]:
    """Plain data."""
    return {
        "benchmark": "simulate moevement",
        "simulated": True,
        "runs": RUNS,
        "seed": SEED,
        "wall_seconds": WALL_SECONDS,
        "models": [asdict(model) | {"iteration_seconds_range": model.iteration_seconds_range} for model in MODELS],
        "table_3": [asdict(cell) | {"difference": cell.difference} for cell in cells],
        "figure_11": [asdict(cell) for cell in scaled],
    }
