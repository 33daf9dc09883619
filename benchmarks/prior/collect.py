"""Measuring recoveries with settings drawn at random, at failures drawn at random: what the prior is fitted to."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.prior.runs import PriorRun
from cpsr.benchmarks.recovery.lost import LostPart, PartName, lost_part
from cpsr.benchmarks.recovery.predict import target_of
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import CachedHistory, Trajectory
from cpsr.fitter.curve import LossCurve
from cpsr.fitter.lag import paired_lag
from cpsr.predictor.combine import combine
from cpsr.predictor.gram import gram
from cpsr.predictor.line import line_coefficients
from cpsr.predictor.obstacles import window_start
from cpsr.predictor.protocol import Target
from cpsr.predictor.series_predictor import CHUNK_ELEMENTS
from cpsr.predictor.straightness import path_positions, reach_factor, straightness

__all__ = ["Asked", "collect", "read_rows"]

SEED = 0  # of what is drawn
# Of how failures are drawn and measured: raise it where that changes, and everything is measured anew.
VERSION = 3
INTERVALS = (10, 20, 30, 50, 70, 100)
FRACTIONS = (0.15, 0.92)
HORIZON_SHARES = (0.4, 1.0)
WINDOWS = (60, 100, 150, 200, 300)
# How far the line is followed: from half the horizon to three horizons, or to 1.5 windows where that is more.
SHORTEST_HORIZONS, LONGEST_HORIZONS, LONGEST_WINDOWS = 0.5, 3.0, 1.5
LONGEST_ITERATIONS = 200  # what is longer than three horizons is no longer than this
MIN_CHECKPOINTS = 3
# Every so many failures of a run take one shard of the state; the rest take all of it.
SHARD_EVERY = 4
SHARDS: tuple[PartName, ...] = ("1/2", "1/4", "1/8")
MEASURED = (60, 160)
MAX_LAG_ITERATIONS = 300
VALIDATION_ITERATIONS = 5
# Checkpoints whose mutual products are kept with each failure.
PRODUCTS_CHECKPOINTS = 20


@dataclass(frozen=True)
class Failure:
    """Where a run fails, and the checkpoints it has."""

    interval: int
    checkpoint: int
    failure: int


@dataclass(frozen=True)
class Asked:
    """One failure of a run to be measured; plain enough to be sent to another process.

    Attributes:
        run: which fails.
        index: of the failure.
        settings: drawn at it, beside going on from the checkpoint itself.
        cache: of the fault-free runs and of what was measured.
    """

    run: PriorRun
    index: int
    settings: int
    cache: Path


def collect(
    runs: Sequence[PriorRun],
    failures: int,
    settings: int,
    cache: Path,
    workers: Workers,
    tick: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Measure every failure of every run, or read what was measured before; one row a failure.

    Args:
        runs: that fail.
        failures: of each run.
        settings: drawn at each.
        cache: of the fault-free runs and of what was measured.
        workers: processes that measure.
        tick: called with the number of failures done.
    """
    asked = [Asked(run, index, settings, cache) for index in range(failures) for run in runs]
    return workers.each(_measured, asked, tick)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """What was measured, one failure a line; nothing where there is no file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _measured(asked: Asked) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = asked.run
    trajectory = run.in_cache(asked.cache).trajectory()
    # The directory is that of this training alone: what was measured on another text or by another trainer is not read.
    path = trajectory.directory / "drawn" / f"{asked.index:03d}-{asked.settings}-v{VERSION}.json"
    kept: dict[str, Any] | None = read_json(path)
    if kept is None:
        trajectory.extend(run.workload.iterations)
        name = run.workload.name
        kept = {"run": name, "index": asked.index} | _measure(asked, trajectory, _draws(f"{name} {asked.index}"))
        write_json(path, kept)
    return kept


def _draws(name: str) -> random.Random:
    return random.Random(f"{SEED} {name}")  # noqa: S311 - which failures are drawn is no secret


def _draw_failure(run: PriorRun, draw: random.Random) -> Failure:
    while True:
        interval = draw.choice(INTERVALS)
        failure = round(run.workload.iterations * draw.uniform(*FRACTIONS))
        horizon = max(1, round(interval * draw.uniform(*HORIZON_SHARES)))
        checkpoint = (failure - horizon) // interval * interval
        if checkpoint >= MIN_CHECKPOINTS * interval:
            return Failure(interval, checkpoint, checkpoint + horizon)


def _draw_reach(horizon: int, window: int, draw: random.Random) -> float:
    shortest = SHORTEST_HORIZONS * horizon
    longest = max(LONGEST_HORIZONS * horizon, min(LONGEST_WINDOWS * window, LONGEST_ITERATIONS))
    return float(shortest * (longest / shortest) ** draw.random())


def _lost(asked: Asked, trajectory: Trajectory, at: Failure, draw: random.Random) -> LostPart:
    survived = trajectory.at(at.failure).state()
    if asked.index % SHARD_EVERY < SHARD_EVERY - 1:
        return lost_part("all", survived, 0)
    return lost_part(draw.choice(SHARDS), survived, draw.randrange(8))


def _measure(asked: Asked, trajectory: Trajectory, draw: random.Random) -> dict[str, Any]:
    at = _draw_failure(asked.run, draw)
    workload = asked.run.workload
    checkpoint = trajectory.at(at.checkpoint).state()
    lost = _lost(asked, trajectory, at, draw)
    history = trajectory.history(at.checkpoint, at.interval)
    target = target_of(workload, at.failure)
    stale = lost.complete(replace(checkpoint, iteration=at.failure))
    measured = [{"setting": None} | _recover(trajectory, stale)]
    factors = _factors(history)
    windows = [window for window in WINDOWS if window >= (MIN_CHECKPOINTS - 1) * at.interval]
    for _ in range(asked.settings):
        window = min(draw.choice(windows), at.checkpoint - at.interval)
        gain = _draw_reach(at.failure - at.checkpoint, window, draw) / (at.failure - at.checkpoint)
        state = _line(history, target, checkpoint, window, gain, factors)
        setting = {"window_iterations": window, "gain": gain}
        measured.append({"setting": setting} | _recover(trajectory, lost.complete(state)))
    return {
        **asdict(at),
        "lost_share": round(lost.share, 6),
        "iterations": workload.iterations,
        "learning_rate": workload.learning_rate(at.checkpoint),
        "peak_learning_rate": target.peak_learning_rate,
        **_motion(history),
        "recoveries": measured,
    }


def _motion(history: CachedHistory) -> dict[str, Any]:
    """Products of the whole model's differences between the newest checkpoints, relative to their mean square."""
    places = range(max(0, len(history.entries) - PRODUCTS_CHECKPOINTS), len(history.entries))
    products = torch.stack([gram(history, name, list(places)) for name in history.operators]).sum(0)
    return {
        "times": [history.entries[place].time for place in places],
        "products": [[round(value, 4) for value in row] for row in (products / products.diagonal().mean()).tolist()],
    }


def _factors(history: CachedHistory) -> dict[str, float]:
    """How far each operator follows the line, as the predictor decides it."""
    positions = path_positions(history, range(len(history.entries)))
    products = {name: gram(history, name, positions) for name in history.operators}
    whole = straightness(torch.stack(list(products.values())).sum(0))
    return {name: reach_factor(one, whole) for name, one in products.items()}


def _line(
    history: CachedHistory, target: Target, checkpoint: State, window: int, gain: float, factors: Mapping[str, float]
) -> State:
    """The line with these settings, also where the predictor would not go so far."""
    start = window_start(history.entries, window)
    times = [entry.time for entry in history.entries[start:]]
    rows = {
        name: (0.0,) * start + line_coefficients(times, target.time, gain * factor, base=0.0)
        for name, factor in factors.items()
    }
    weights = {name: torch.empty_like(values) for name, values in checkpoint.weights.items()}
    for name, begin, values in combine(history, rows, CHUNK_ELEMENTS):
        weights[name][begin : begin + values.numel()] = values
    return replace(checkpoint, iteration=target.iteration, weights=weights)


def _recover(trajectory: Trajectory, state: State) -> dict[str, Any]:
    """Train on to the end from a state that stands at the failure; the final gap, and the lag soon after."""
    failure, end = state.iteration, trajectory.workload.iterations
    trainer = trajectory.trainer()
    trainer.load(state)
    injected = float(trainer.validate().mean())
    iterations, losses = [], []
    while trainer.iteration < end:
        trainer.step()
        inside = failure + MEASURED[0] <= trainer.iteration <= failure + MEASURED[1]
        if inside and trainer.iteration % VALIDATION_ITERATIONS == 0:
            iterations.append(trainer.iteration)
            losses.append(trainer.validate())
    gap = float((trainer.final_losses() - trajectory.final_losses()).mean())
    if not (numpy.isfinite(gap) and numpy.isfinite(injected) and numpy.isfinite(losses).all()):
        return {"injected_nats": None, "final_gap_nats": None, "lag_iterations": None}
    recovered = LossCurve(numpy.array(iterations), numpy.array(losses))
    return {
        "injected_nats": round(injected, 4),
        "final_gap_nats": round(gap, 6),
        "lag_iterations": _lag(trajectory, recovered, failure),
    }


def _lag(trajectory: Trajectory, recovered: LossCurve, failure: int) -> float | None:
    first, last = failure - 2 * MAX_LAG_ITERATIONS, failure + MEASURED[1] + MAX_LAG_ITERATIONS
    fault_free = trajectory.curve(first, last)
    try:
        lag = paired_lag(recovered, fault_free, failure, MEASURED, max_lag_iterations=MAX_LAG_ITERATIONS)
    except ValueError:
        return None
    return round(lag.iterations, 2)
