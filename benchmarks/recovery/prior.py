"""`cpsr bench prior`: recoveries with settings drawn at random, on runs of their own, and the prior table of them."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.harness.measurement import Measurement, measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.lost import LostPart, PartName, lost_part
from cpsr.benchmarks.recovery.methods import target_of
from cpsr.benchmarks.recovery.prior_fit import Judged, Measured, fit, judge, measured_of
from cpsr.benchmarks.recovery.run import train
from cpsr.benchmarks.recovery.tasks import TASKS
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import CachedHistory, Run, Trajectory
from cpsr.benchmarks.recovery.workload import (
    ITERATIONS,
    RATE_STEP,
    OptimizerName,
    Schedule,
    Workload,
    trained_with,
)
from cpsr.predictor.calibration import MOVE_TERMS, SKIP_TERMS, Table
from cpsr.predictor.checkpoint_series import path_positions, reach_factor, straightness, window_start
from cpsr.predictor.line import line_coefficients
from cpsr.predictor.protocol import Target
from cpsr.predictor.weight_pieces import combine, gram

__all__ = ["CACHE", "RUNS", "PriorRun", "collect", "main"]

CACHE = Path("runs/bench-prior")
DATA = Path("benchmarks/results/2026-11-24-prior")  # recoveries.jsonl, one failure a line, and worths.json
SEED = 0  # of what is drawn
# Of how failures are drawn and measured: raise it where that changes, and everything is measured anew.
VERSION = 3
INTERVALS = (10, 20, 30, 50, 70, 100)
FRACTIONS = (0.15, 0.92)
HORIZON_SHARES = (0.4, 1.0)
SETTINGS = 4  # of the line, drawn at each failure
WINDOWS = (60, 100, 150, 200, 300)
# How far the line is followed: from half the horizon to three horizons, or to 1.5 windows where that is more.
SHORTEST_HORIZONS, LONGEST_HORIZONS, LONGEST_WINDOWS = 0.5, 3.0, 1.5
LONGEST_ITERATIONS = 200  # what is longer than three horizons is no longer than this
MIN_CHECKPOINTS = 3
# Every so many failures of a run take one shard of the state; the rest take all of it.
SHARD_EVERY = 4
SHARDS: tuple[PartName, ...] = ("1/2", "1/4", "1/8")
# Checkpoints whose mutual products are kept with each failure.
PRODUCTS_CHECKPOINTS = 20


@dataclass(frozen=True)
class PriorRun:
    """A workload and the seed of its one run; seeds from 100 on are drawn nowhere else.

    Attributes:
        workload: that is trained.
        seed: of its one run.
        family: of models, tasks, schedules and optimizers, that is held out as one.
    """

    workload: Workload
    seed: int
    family: str

    def in_cache(self, cache: Path) -> Run:
        """The run as it is trained, kept there."""
        return Run(self.workload, self.seed, cache)


# Task, optimizer, peak rate at which trainings with `cosine10` end best (as `cpsr bench tune` found it), schedules of
# the runs, and how far their rates go from the best, in steps of 1.4. Most jobs are tuned roughly, and rather below the
# best rate than above. A group's place decides the seeds of its runs: add others at the end. Muon takes four times as
# long here.
GROUPS: tuple[tuple[str, OptimizerName, float, tuple[Schedule, ...], tuple[int, ...]], ...] = (
    ("gpt-0.1M", "adamw", 2.7e-3, ("cosine", "cosine10", "wsd"), (-4, -2, 0, 1)),
    ("gpt-0.1M", "sgd", 2.744e-1, ("cosine10",), (-2, 0)),
    ("gpt-0.1M-descriptions", "adamw", 3.842e-3, ("cosine10",), (-2, 0)),
    ("gpt-0.1M", "muon", 1.476e-2, ("cosine10",), (0,)),
)


def _runs() -> Iterator[PriorRun]:
    seeds = count(100)
    for task, optimizer, best, schedules, steps in GROUPS:
        group = trained_with(task, optimizer)
        for schedule in schedules:
            for step in steps:
                name, rate = f"prior-{group}-{schedule}{step:+d}", best * RATE_STEP**step
                workload = Workload(name, TASKS[task], schedule, rate, ITERATIONS, optimizer=optimizer)
                yield PriorRun(workload, next(seeds), f"{group}-{schedule}")


RUNS = tuple(_runs())


def main(
    failures: int = 0,
    data: Path | None = None,
    cache: Path | None = None,
    table_path: Path | None = None,
    json_path: Path | None = None,
    workers: int | None = None,
) -> None:
    """Measure, fit, print, and write the table where one is asked for.

    Raises:
        CPSRError: the trainings of a run do not show what an iteration is worth.
    """
    data, cache = data or DATA, cache or CACHE
    data.mkdir(parents=True, exist_ok=True)
    with measuring("prior", json_path, place=data, timed=False) as call:
        if failures:
            bar = call.progress.add_task("failures", total=failures * len(RUNS))
            with Workers(workers or default_workers()) as pool:
                worths = train([run.in_cache(cache) for run in RUNS], pool, call.progress)
                tick = lambda done: call.progress.update(bar, completed=done)  # noqa: E731 - one line says it
                rows = collect(RUNS, failures, SETTINGS, cache, pool, tick)
            _write(data, rows, worths)
        measured = _read(data)
        table, judged = fit(measured, _source(measured)), judge(measured)
        _show(call, table, judged)
        if table_path is not None:
            table_path.write_text(table.to_json(), encoding="utf-8")
            call.console.print(f"table: {table_path}")
        call.leave({"held_out": [asdict(one) for one in judged], "table": dict(table.source)})


def _read(data: Path) -> list[Measured]:
    """What a call has left in its directory."""
    worths = json.loads((data / "worths.json").read_text(encoding="utf-8"))
    rows = map(json.loads, (data / "recoveries.jsonl").read_text(encoding="utf-8").splitlines())
    families = {run.workload.name: run.family for run in RUNS}
    return measured_of(rows, {name: IterationWorth(**worth) for name, worth in worths.items()}, families)


def _write(data: Path, rows: Sequence[Mapping[str, Any]], worths: Mapping[str, IterationWorth]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (data / "recoveries.jsonl").write_text(lines, encoding="utf-8")
    plain = {name: asdict(worth) for name, worth in worths.items()}
    (data / "worths.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def _source(measured: Sequence[Measured]) -> dict[str, object]:
    return {
        "made_by": "cpsr bench prior",
        "score": "end cost",
        "runs": sorted({one.run for one in measured}),
        "failures": len({one.failure for one in measured}),
        "recoveries": len(measured),
    }


def _show(call: Measurement, table: Table, judged: Sequence[Judged]) -> None:
    rows = [
        (term, f"{mean:+.3f}", f"{variance**0.5:.3f}", f"{curve.lost_exponent:.2f}")
        for terms, curve in ((SKIP_TERMS, table.skip), (MOVE_TERMS, table.move))
        for term, mean, variance in zip(terms, curve.mean, curve.covariance.diagonal(), strict=True)
    ]
    headings = ("term", "coefficient", "between families", "power of the lost share")
    call.table("Skip and move, in iterations", headings, rows)
    figures = [field.name for field in fields(Judged)][2:]
    of_families = [(one.family, *(f"{getattr(one, name):.2f}" for name in figures)) for one in judged]
    names = [name.replace("_", " ") for name in figures]
    call.table("Each family by the table without it, in shares of u", ("family", *names), of_families)


@dataclass(frozen=True)
class _Asked:
    """One failure of a run to be measured, with so many settings beside going on from the checkpoint itself."""

    run: PriorRun
    index: int
    settings: int
    cache: Path


@dataclass(frozen=True)
class _Failure:
    """Where a run fails, and the checkpoints it has."""

    interval: int
    checkpoint: int
    failure: int


def collect(
    runs: Sequence[PriorRun],
    failures: int,
    settings: int,
    cache: Path,
    workers: Workers,
    tick: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Measure every failure of every run, or read what was measured before; one row a failure."""
    asked = [_Asked(run, index, settings, cache) for index in range(failures) for run in runs]
    return workers.each(_measured, asked, tick)


def _measured(asked: _Asked) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = asked.run
    trajectory = run.in_cache(asked.cache).trajectory()
    # The directory is that of this training alone: what was measured on another text or by another trainer is not read.
    path = trajectory.directory / "drawn" / f"{asked.index:03d}-{asked.settings}-v{VERSION}.json"
    kept: dict[str, Any] | None = read_json(path)
    if kept is None:
        name = run.workload.name
        kept = {"run": name, "index": asked.index} | _measure(asked, trajectory)
        write_json(path, kept)
    return kept


def _draw_failure(run: PriorRun, draw: random.Random) -> _Failure:
    while True:
        interval = draw.choice(INTERVALS)
        failure = round(run.workload.iterations * draw.uniform(*FRACTIONS))
        horizon = max(1, round(interval * draw.uniform(*HORIZON_SHARES)))
        checkpoint = (failure - horizon) // interval * interval
        if checkpoint >= MIN_CHECKPOINTS * interval:
            return _Failure(interval, checkpoint, checkpoint + horizon)


def _lost(asked: _Asked, trajectory: Trajectory, at: _Failure, draw: random.Random) -> LostPart:
    survived = trajectory.at(at.failure).state()
    if asked.index % SHARD_EVERY < SHARD_EVERY - 1:
        return lost_part("all", survived, 0)
    return lost_part(draw.choice(SHARDS), survived, draw.randrange(8))


def _measure(asked: _Asked, trajectory: Trajectory) -> dict[str, Any]:
    draw = random.Random(f"{SEED} {asked.run.workload.name} {asked.index}")  # noqa: S311 - it is no secret
    at = _draw_failure(asked.run, draw)
    workload = asked.run.workload
    checkpoint = trajectory.at(at.checkpoint).state()
    lost = _lost(asked, trajectory, at, draw)
    history = trajectory.history(at.checkpoint, at.interval)
    target = target_of(trajectory, at.failure)
    stale = lost.complete(replace(checkpoint, iteration=at.failure))
    measured = [{"setting": None} | _recover(trajectory, stale)]
    factors = _factors(history)
    windows = [window for window in WINDOWS if window >= (MIN_CHECKPOINTS - 1) * at.interval]
    for _ in range(asked.settings):
        window = min(draw.choice(windows), at.checkpoint - at.interval)
        horizon = at.failure - at.checkpoint
        shortest = SHORTEST_HORIZONS * horizon
        longest = max(LONGEST_HORIZONS * horizon, min(LONGEST_WINDOWS * window, LONGEST_ITERATIONS))
        gain = float(shortest * (longest / shortest) ** draw.random()) / horizon
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
    for name, begin, values in combine(history, rows):
        weights[name][begin : begin + values.numel()] = values
    return replace(checkpoint, iteration=target.iteration, weights=weights)


def _recover(trajectory: Trajectory, state: State) -> dict[str, Any]:
    """Train on to the end from a state that stands at the failure; the final gap, None where it diverges."""
    trainer = trajectory.trainer()
    trainer.load(state)
    trainer.train_to(trajectory.workload.iterations)
    gap = float((trainer.final_losses() - trajectory.final_losses()).mean())
    return {"final_gap_nats": round(gap, 6) if math.isfinite(gap) else None}
