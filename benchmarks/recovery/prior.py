"""`cpsr bench prior`: recoveries with settings drawn at random, on runs of their own, and the prior table of them."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import torch

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.harness.measurement import Measurement, measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.lost import PartName, lost_part
from cpsr.benchmarks.recovery.methods import target_of
from cpsr.benchmarks.recovery.prior_fit import Judged, Measured, fit, judge, measured_of
from cpsr.benchmarks.recovery.run import train
from cpsr.benchmarks.recovery.tasks import TASKS
from cpsr.benchmarks.recovery.trainer import State, Tensors
from cpsr.benchmarks.recovery.trajectory import CachedHistory, Run, Trajectory
from cpsr.benchmarks.recovery.workload import (
    ITERATIONS,
    RATE_STEP,
    OptimizerName,
    Schedule,
    Workload,
    trained_with,
)
from cpsr.predictor.calibration import (
    MIN_CHECKPOINTS,
    MOVE_TERMS,
    SKIP_TERMS,
    WINDOW_SHARE_OF_AGE,
    Table,
    reaches,
)
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Target
from cpsr.predictor.weight_pieces import gram

__all__ = ["CACHE", "RUNS", "PriorRun", "collect", "main"]

CACHE = Path("runs/bench-prior")
DATA = Path("benchmarks/results/2026-11-29-prior")  # recoveries.jsonl, one failure a line, and worths.json
SEED = 0  # of what is drawn
# Of how failures are drawn and measured: raise it where that changes, and everything is measured anew.
VERSION = 4
INTERVALS = (10, 20, 30, 50, 70, 100)
FRACTIONS = (0.15, 0.95)
HORIZON_SHARES = (0.4, 1.0)
WINDOWS = (60, 100, 150, 200, 300)
SETTINGS = 2  # of the line, drawn at each failure
PREDICTED_EVERY = 4  # failures of a run at which a move is also made from the checkpoint: do the two add up?
# Every so many failures of a run take one shard of the state; the rest take all of it.
SHARD_EVERY = 4
SHARDS: tuple[PartName, ...] = ("1/2", "1/4", "1/8", "1/16")
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


# Task, optimizer, peak rate at which trainings with `cosine10` end best, schedules of the runs, how far their
# rates go from the best, in steps of 1.4, and the seed of the first run. Most jobs are tuned roughly, and rather below
# the best rate than above.
GROUPS: tuple[tuple[str, OptimizerName, float, tuple[Schedule, ...], tuple[int, ...], int], ...] = (
    ("gpt-0.1M", "adamw", 2.7e-3, ("cosine", "cosine10", "wsd"), (-4, -2, 0, 1), 100),
    ("gpt-0.1M", "sgd", 2.744e-1, ("cosine10",), (-2, 0), 112),
    ("gpt-0.1M-descriptions", "adamw", 3.842e-3, ("cosine10",), (-2, 0), 114),
    ("gpt-0.1M", "muon", 1.476e-2, ("cosine10",), (0,), 116),
    ("conv-0.1M", "adamw", 7.530e-3, ("cosine10", "wsd"), (-2, 0), 120),
    ("conv-0.1M", "sgd", 2.744e-1, ("cosine10",), (-2, 0), 124),
    ("lstm-0.2M", "adamw", 2.893e-2, ("cosine10", "wsd"), (-2, 0), 128),
    ("lstm-0.2M", "sgd", 2.066, ("cosine10",), (-2, 0), 132),
)


def _runs() -> Iterator[PriorRun]:
    for task, optimizer, best, schedules, steps, first_seed in GROUPS:
        group, seeds = trained_with(task, optimizer), count(first_seed)
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
            kept, known = _kept(data)
            there = {(row["run"], row["index"]) for row in kept}
            lacking = [
                (run, index) for index in range(failures) for run in RUNS if (run.workload.name, index) not in there
            ]
            bar = call.progress.add_task("failures", total=len(lacking))
            with Workers(workers or default_workers()) as pool:
                new = [run.in_cache(cache) for run in RUNS if run.workload.name not in known]
                known |= train(new, pool, call.progress) if new else {}
                rows = collect(lacking, cache, pool, lambda done: call.progress.update(bar, completed=done))
            _write(data, [*kept, *rows], known)
        rows, worth = _kept(data)
        measured = measured_of(rows, worth, {run.workload.name: run.family for run in RUNS})
        table, judged = fit(measured, _source(measured)), judge(measured)
        _show(call, table, judged)
        if table_path is not None:
            table_path.write_text(table.to_json(), encoding="utf-8")
            call.console.print(f"table: {table_path}")
        call.leave({"held_out": [asdict(one) for one in judged], "table": dict(table.source)})


def _kept(data: Path) -> tuple[list[dict[str, Any]], dict[str, IterationWorth]]:
    """What calls have left in the directory: a row a failure, and what an iteration of each run is worth."""
    path = data / "recoveries.jsonl"
    if not path.exists():
        return [], {}
    worths = json.loads((data / "worths.json").read_text(encoding="utf-8"))
    rows = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    return rows, {name: IterationWorth(**worth) for name, worth in worths.items()}


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
    figures = ["skip_deviation", "move_deviation", "stale", "expected", "chosen", "dearer", "regret", "own_regret"]
    lines = [(one.family, str(one.failures), *(f"{getattr(one, name):.2f}" for name in figures)) for one in judged]
    weights = numpy.array([one.horizon_iterations for one in judged])
    pooled = numpy.array([[getattr(one, name) for one in judged] for name in figures]) @ weights / weights.sum()
    lines.append(("all, by horizon", str(sum(one.failures for one in judged)), *(f"{value:.2f}" for value in pooled)))
    columns = [name.replace("_", " ") for name in figures]
    call.table("Each family by the table without it, in shares of u", ("family", "failures", *columns), lines)


@dataclass(frozen=True)
class _Failure:
    """Where a run fails, and the checkpoints it has."""

    interval: int
    checkpoint: int
    failure: int


def collect(
    lacking: Sequence[tuple[PriorRun, int]],
    cache: Path,
    workers: Workers,
    tick: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Measure failures, each a run and its number, or read what was measured before; one row a failure."""
    return workers.each(_measured, [(run, index, cache) for run, index in lacking], tick)


def _measured(asked: tuple[PriorRun, int, Path]) -> dict[str, Any]:
    torch.set_num_threads(1)
    run, index, cache = asked
    trajectory = run.in_cache(cache).trajectory()
    # The directory is that of this training alone: what was measured on another text or by another trainer is not read.
    path = trajectory.directory / "drawn" / f"{index:03d}-v{VERSION}.json"
    kept: dict[str, Any] | None = read_json(path)
    if kept is None:
        kept = {"run": run.workload.name, "index": index} | _measure(run, index, trajectory)
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


def _measure(run: PriorRun, index: int, trajectory: Trajectory) -> dict[str, Any]:
    draw = random.Random(f"{SEED} {run.workload.name} {index}")  # noqa: S311 - it is no secret
    at, part = _draw_failure(run, draw), draw.choice(SHARDS)
    checkpoint, exact = trajectory.at(at.checkpoint).state(), trajectory.at(at.failure).state()
    whole = index % SHARD_EVERY < SHARD_EVERY - 1
    lost = lost_part("all" if whole else part, exact, draw.randrange(16))
    stale = lost.complete(replace(checkpoint, iteration=at.failure))
    measured = [{"setting": None} | _recover(trajectory, stale)]
    history, target = trajectory.history(at.checkpoint, at.interval), target_of(trajectory, at.failure)
    for number in range(SETTINGS):
        setting = _draw_setting(at, draw)
        moved = _moved(history, target, setting)
        if moved is None:
            continue
        if whole:
            alone = _recover(trajectory, _added(exact, moved))
            measured.append({"setting": setting, "alone": True} | alone)
        if number == 0 and index % PREDICTED_EVERY in (0, SHARD_EVERY - 1):
            measured.append({"setting": setting} | _recover(trajectory, lost.complete(_added(stale, moved))))
    return {
        **asdict(at),
        "lost_share": round(lost.share, 6),
        "iterations": run.workload.iterations,
        "learning_rate": run.workload.learning_rate(at.checkpoint),
        "peak_learning_rate": target.peak_learning_rate,
        **_motion(history),
        "recoveries": measured,
    }


def _draw_setting(at: _Failure, draw: random.Random) -> dict[str, Any]:
    """A window and a reach that the product may take, the reach as a gain: over the horizon."""
    widest = min(WINDOW_SHARE_OF_AGE * at.checkpoint, at.checkpoint - at.interval)
    three = (MIN_CHECKPOINTS - 1) * at.interval
    window = draw.choice([window for window in WINDOWS if three <= window <= widest] or [three])
    shortest, *_, furthest = reaches(window)
    reach = shortest * (furthest / shortest) ** draw.random()
    return {"window_iterations": window, "gain": reach / (at.failure - at.checkpoint)}


def _moved(history: CachedHistory, target: Target, setting: Mapping[str, Any]) -> Tensors | None:
    """How far the product would move the checkpoint's weights with this setting; None where it could not."""
    predictor = LinePredictor(setting["window_iterations"], setting["gain"])
    forecast = predictor.forecast(history, target)
    if not forecast.feasible:
        return None
    newest = len(history.entries) - 1
    moved = {name: torch.empty(history.numel(name)) for name in history.operators}
    for name, begin, values in predictor.predict(history, forecast):
        end = begin + values.numel()
        moved[name][begin:end] = values - history.read(name, newest, begin, end)
    return moved


def _added(state: State, moved: Tensors) -> State:
    return replace(state, weights={name: values + moved[name] for name, values in state.weights.items()})


def _motion(history: CachedHistory) -> dict[str, Any]:
    """Products of the whole model's differences between the newest checkpoints, relative to their mean square."""
    places = range(max(0, len(history.entries) - PRODUCTS_CHECKPOINTS), len(history.entries))
    products = torch.stack([gram(history, name, list(places)) for name in history.operators]).sum(0)
    return {
        "times": [history.entries[place].time for place in places],
        "products": [[round(value, 4) for value in row] for row in (products / products.diagonal().mean()).tolist()],
    }


def _recover(trajectory: Trajectory, state: State) -> dict[str, Any]:
    """Train on to the end from a state that stands at the failure; the final gap, None where it diverges."""
    trainer = trajectory.trainer()
    trainer.load(state)
    trainer.train_to(trajectory.workload.iterations)
    gap = float((trainer.final_losses() - trajectory.final_losses()).mean())
    return {"final_gap_nats": round(gap, 6) if math.isfinite(gap) else None}
