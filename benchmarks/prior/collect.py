"""Measuring recoveries with settings drawn at random, at failures drawn at random: what the prior is fitted to."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from cpsr.benchmarks.prior.runs import RUNS, PriorRun
from cpsr.benchmarks.recovery.predict import applied, target_of
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import CachedHistory, Trajectory
from cpsr.fitter.curve import LossCurve
from cpsr.fitter.lag import persistent_lag
from cpsr.predictor.combine import combine
from cpsr.predictor.line import LinePredictor, line_coefficients
from cpsr.predictor.obstacles import window_start
from cpsr.predictor.protocol import Target
from cpsr.predictor.series_predictor import CHUNK_ELEMENTS
from cpsr.predictor.vitp import VITPPredictor

__all__ = ["collect", "collect_directions", "read_rows"]

SEED = 0  # of what is drawn
INTERVALS = (10, 20, 30, 50, 70, 100, 150, 200)
FRACTIONS = (0.1, 0.9)
HORIZON_SHARES = (0.4, 1.0)
WINDOWS = (60, 100, 150, 200, 300, 400, 500, 700)
# How far the line is followed, in iterations: from half the horizon to this share of the window or of three horizons.
REACH_SHARES = (0.5, 0.8, 3.0)
BASES = (0.0, 0.0, 0.5, 1.0)
MIN_CHECKPOINTS = 3
MEASURED = (60, 160)
MAX_LAG_ITERATIONS = 300
VALIDATION_ITERATIONS = 5


@dataclass(frozen=True)
class Failure:
    """Where a run fails, and the checkpoints it has."""

    interval: int
    checkpoint: int
    failure: int


def collect(path: Path, cache: Path, failures: int, settings: int, on_failure: Callable[[], None]) -> None:
    """Append recoveries to a file of JSON lines, one failure a line, going through all runs in turn.

    Args:
        path: what is there already is kept, and not measured again.
        cache: of the fault-free runs.
        failures: of each run.
        settings: drawn at each failure, beside going on from the checkpoint itself.
        on_failure: called after each.
    """

    def measured(run: PriorRun, trajectory: Trajectory, index: int) -> dict[str, Any]:
        return _measure(run, trajectory, _draws(f"{run.workload.name} {index}"), settings)

    _collect(path, cache, failures, measured, on_failure)


def collect_directions(path: Path, cache: Path, failures: int, on_failure: Callable[[], None]) -> None:
    """Append pairs of recoveries that differ in their direction alone, with the setting that the table likes best.

    Args:
        path: what is there already is kept, and not measured again.
        cache: of the fault-free runs.
        failures: of each run.
        on_failure: called after each.
    """

    def measured(run: PriorRun, trajectory: Trajectory, index: int) -> dict[str, Any]:
        return _measure_directions(run, trajectory, _draws(f"directions {run.workload.name} {index}"))

    _collect(path, cache, failures, measured, on_failure)


def _collect(
    path: Path,
    cache: Path,
    failures: int,
    measured: Callable[[PriorRun, Trajectory, int], dict[str, Any]],
    on_failure: Callable[[], None],
) -> None:
    torch.set_num_threads(1)
    done = {(row["run"], row["index"]) for row in read_rows(path)}
    for index in range(failures):
        for run in RUNS:
            if (run.workload.name, index) not in done:
                trajectory = Trajectory(run.workload, run.workload.task(), run.seed, cache)
                trajectory.extend(run.workload.iterations)
                row = {"run": run.workload.name, "index": index} | measured(run, trajectory, index)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            on_failure()


def _measure_directions(run: PriorRun, trajectory: Trajectory, draw: random.Random) -> dict[str, Any]:
    at = _draw_failure(run, draw)
    workload = run.workload
    trainer = trajectory.at(at.checkpoint)
    checkpoint = trainer.state()
    target = target_of(workload, at.failure)
    learning = VITPPredictor()
    for iteration in range(at.interval, at.checkpoint + 1, at.interval):
        for _ in learning.learn(trajectory.history(iteration, at.interval)):
            pass
    history = trajectory.history(at.checkpoint, at.interval)
    line = LinePredictor(base="checkpoint")
    chosen = line.forecast(history, target).settings
    bent = VITPPredictor(chosen["window_iterations"], chosen["gain"], "checkpoint", direction="vitp")
    bent.load_state_dict(learning.state_dict())
    measured = []
    for predictor in (line, bent):
        forecast = predictor.forecast(history, target)
        state = applied(predictor, history, forecast, at.failure, checkpoint)
        setting = {key: forecast.settings[key] for key in ("window_iterations", "gain", "base", "direction")}
        measured.append({"setting": setting} | _recover(trajectory, state))
    return {
        **asdict(at),
        "iterations": workload.iterations,
        "learning_rate": workload.learning_rate(at.checkpoint),
        "peak_learning_rate": target.peak_learning_rate,
        "updates": forecast.settings["updates"],
        "recoveries": measured,
    }


def _draws(name: str) -> random.Random:
    return random.Random(f"{SEED} {name}")  # noqa: S311 - which failures are drawn is no secret


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """What was measured before, one failure a line; nothing where there is no file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _draw_failure(run: PriorRun, draw: random.Random) -> Failure:
    while True:
        interval = draw.choice(INTERVALS)
        failure = round(run.workload.iterations * draw.uniform(*FRACTIONS))
        horizon = max(1, round(interval * draw.uniform(*HORIZON_SHARES)))
        checkpoint = (failure - horizon) // interval * interval
        if checkpoint >= MIN_CHECKPOINTS * interval and checkpoint + horizon + MEASURED[1] <= run.workload.iterations:
            return Failure(interval, checkpoint, checkpoint + horizon)


def _draw_reach(horizon: int, window: int, draw: random.Random) -> float:
    least, of_window, of_horizon = REACH_SHARES
    shortest, longest = least * horizon, max(of_window * window, of_horizon * horizon)
    return float(shortest * (longest / shortest) ** draw.random())


def _measure(run: PriorRun, trajectory: Trajectory, draw: random.Random, settings: int) -> dict[str, Any]:
    at = _draw_failure(run, draw)
    workload = run.workload
    trainer = trajectory.at(at.checkpoint)
    checkpoint = trainer.state()
    history = trajectory.history(at.checkpoint, at.interval)
    target = target_of(workload, at.failure)
    measured = [{"setting": None} | _recover(trajectory, replace(checkpoint, iteration=at.failure))]
    windows = [window for window in WINDOWS if window >= (MIN_CHECKPOINTS - 1) * at.interval]
    for _ in range(settings):
        window, base = min(draw.choice(windows), at.checkpoint - at.interval), draw.choice(BASES)
        gain = _draw_reach(at.failure - at.checkpoint, window, draw) / (at.failure - at.checkpoint)
        state = _line(history, target, checkpoint, window, gain, base)
        setting = {"window_iterations": window, "gain": gain, "base": base}
        measured.append({"setting": setting} | _recover(trajectory, state))
    return {
        **asdict(at),
        "iterations": workload.iterations,
        "learning_rate": workload.learning_rate(at.checkpoint),
        "peak_learning_rate": target.peak_learning_rate,
        "recoveries": measured,
    }


def _line(history: CachedHistory, target: Target, checkpoint: State, window: int, gain: float, base: float) -> State:
    """The line with these settings, also where the predictor would not go so far."""
    start = window_start(history.entries, window)
    times = [entry.time for entry in history.entries[start:]]
    row = (0.0,) * start + line_coefficients(times, target.time, gain, base)
    weights = {name: torch.empty_like(values) for name, values in checkpoint.weights.items()}
    for name, begin, values in combine(history, dict.fromkeys(history.operators, row), CHUNK_ELEMENTS):
        weights[name][begin : begin + values.numel()] = values
    return replace(checkpoint, iteration=target.iteration, weights=weights)


def _recover(trajectory: Trajectory, state: State) -> dict[str, Any]:
    """Train on from a state that stands at the failure, and measure the lag."""
    failure = state.iteration
    trainer = trajectory.trainer()
    trainer.load(state)
    injected = float(trainer.validate().mean())
    iterations, losses = [], []
    while trainer.iteration < failure + MEASURED[1]:
        trainer.step()
        inside = trainer.iteration >= failure + MEASURED[0]
        if inside and trainer.iteration % VALIDATION_ITERATIONS == 0:
            iterations.append(trainer.iteration)
            losses.append(trainer.validate())
    first, last = failure - 2 * MAX_LAG_ITERATIONS, failure + MEASURED[1] + MAX_LAG_ITERATIONS
    fault_free = trajectory.curve(first, last)
    result: dict[str, Any] = {"injected_nats": injected, "lag_iterations": None, "obstacle": None}
    if not numpy.isfinite(losses).all():
        return result | {"obstacle": "diverged"}
    try:
        lag = persistent_lag(
            LossCurve(numpy.array(iterations), numpy.array(losses)),
            fault_free,
            failure,
            MEASURED,
            max_lag_iterations=MAX_LAG_ITERATIONS,
        )
    except ValueError as error:
        return result | {"obstacle": str(error)}
    return result | asdict(lag) | {"lag_iterations": lag.iterations, "obstacle": None}
