"""Dense checkpoints, stale experts and windows under the same kills, beside a job that nothing happens to."""

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy

from cpsr.benchmarks.harness.intervals import Estimate, median_ratio_interval
from cpsr.benchmarks.harness.measurement import Measurement, interval_text
from cpsr.benchmarks.harness.ranks import start_ranks
from cpsr.benchmarks.replay.mixture import Mixture, Part, found_path, rank_main
from cpsr.benchmarks.simulate.rivals import checkfreq
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import CPSRError
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.live.measurements import costs_of_ranks

__all__ = ["RARELY", "WAYS", "Plan", "Run", "compare", "lag_iterations", "lost_tokens"]

RANKS = 2
WINDOW = 4
CALIBRATION_ITERATIONS, CALIBRATION_INTERVAL = 60, 10
OVERHEAD_FRACTION = 0.035  # CheckFreq's own limit
TAIL_ITERATIONS = 20  # of the end, over which losses are compared
DENSE, STALE, WINDOWS, CONTROL = "dense, CheckFreq's interval", "stale experts", f"windows of {WINDOW}", "no failure"
WAYS = (DENSE, STALE, WINDOWS)

RARELY = {"interval_iterations": 100_000}
_DISK = {"shared_memory": False}
_PLAIN = {"learning": {"budget_fraction": 0.0}, "ranks": {"heartbeat_timeout_seconds": 30.0}}


@dataclass(frozen=True)
class Plan:
    """Size of the comparison.

    Attributes:
        iterations: of each run.
        rounds: in each, every way meets the same kills.
        kills: of both ranks, in each run.
        mixture: shape of the model.
        interval_iterations: between checkpoints, in place of CheckFreq's.
    """

    iterations: int = 120
    rounds: int = 3
    kills: int = 2
    mixture: Mixture = field(default_factory=Mixture)
    interval_iterations: int | None = None

    def killed_at(self, round_: int) -> list[int]:
        """Iterations of the kills, drawn in equal parts of the run between its first third and its last sixth."""
        chance = random.Random(round_)  # noqa: S311 - nothing secret is drawn
        first, last = self.iterations // 3, self.iterations * 5 // 6
        length = (last - first) // self.kills
        return [first + place * length + chance.randrange(length) for place in range(self.kills)]


@dataclass(frozen=True)
class Run:
    """What one run came to, all its lives together.

    Attributes:
        losses: by iteration, of the life that trained it last; mean over the ranks.
        repeated: iterations that each failure had repeated.
        lost_tokens: that failures took from experts, over all layers, as far as no later failure undid it.
        down_seconds: of each failure, from the last step before it to the first one's begin after it.
        step_seconds: median over all lives.
        wall_seconds: from the first start of the processes to their last end.
        digests: of each rank's state at the end.
        methods: how each life began.
        state_bytes: of rank 0.
    """

    losses: dict[int, float]
    repeated: list[int]
    lost_tokens: float
    down_seconds: list[float]
    step_seconds: float
    wall_seconds: float
    digests: list[str]
    methods: list[str]
    state_bytes: int


def compare(call: Measurement, plan: Plan) -> dict[str, Any]:
    """Run everything, print the table, and return plain data.

    Raises:
        CPSRError: a job failed; or what has to be exact is not.
    """
    every = {name: _interval(call.directory / f"costs-{name[:5]}", way, plan) for name, way in _SAVED.items()}
    configs = {
        CONTROL: {"mode": "exact", "checkpoint": {**RARELY, "shared_memory": False}},
        **{name: way(every[name]["interval_iterations"]) for name, way in _SAVED.items()},
        WINDOWS: {"mode": "exact", "checkpoint": RARELY, "replay": {"enabled": True, "window_iterations": WINDOW}},
    }
    runs: dict[str, list[Run]] = {name: [] for name in configs}
    advance = call.bar("compared runs", plan.rounds * len(configs))
    for number in range(plan.rounds):
        for place, (name, config) in enumerate(configs.items()):
            kills = [] if name == CONTROL else plan.killed_at(number)
            runs[name].append(_run(call.directory / f"compared-{number}-{place}", config, plan, kills))
            advance()
    for name in (DENSE, WINDOWS):
        if any(one.digests != runs[CONTROL][0].digests for one in runs[name]):
            raise CPSRError(f"{name}: a run ended with another state than the one that nothing happened to")
    found = {name: _figures(own, runs[CONTROL], plan) for name, own in runs.items()}
    _show(call, found, every)
    state_bytes = runs[CONTROL][0].state_bytes
    return {"plan": asdict(plan), "checkfreq": every, "ways": found, "state_bytes_of_a_rank": state_bytes}


def _dense(interval: int) -> dict[str, Any]:
    return {"mode": "exact", "checkpoint": {**_DISK, "interval_iterations": interval}}


def _stale(interval: int) -> dict[str, Any]:
    """One expert of each layer in a checkpoint, in turn; too few checkpoints are kept to predict from."""
    experts = {"policy": "sequential", "experts_per_layer": 1}
    return {"mode": "auto", "checkpoint": {**_DISK, "interval_iterations": interval}, "experts": experts}


_SAVED: dict[str, Callable[[int], dict[str, Any]]] = {DENSE: _dense, STALE: _stale}


def _interval(directory: Path, way: Callable[[int], dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """What checkpoints cost this job, and the interval by CheckFreq's rule."""
    run = _run(directory, way(CALIBRATION_INTERVAL), replace(plan, iterations=CALIBRATION_ITERATIONS), [])
    costs = costs_of_ranks(directory / "run" / "checkpoints", RANKS)
    if not costs:
        raise CPSRError(
            f"{directory}: no checkpoint of {CALIBRATION_ITERATIONS} iterations has measured what one costs"
        )
    stall, persist = max(one.stall_seconds for one in costs), max(one.persist_seconds for one in costs)
    inputs = PlannerInputs(run.step_seconds, stall, persist, 0.0)
    interval = plan.interval_iterations or checkfreq(inputs, OVERHEAD_FRACTION).interval_iterations
    return {
        "interval_iterations": interval,
        "iteration_seconds": run.step_seconds,
        "stall_seconds": stall,
        "persist_seconds": persist,
    }


def _run(directory: Path, config: Mapping[str, Any], plan: Plan, kills: Sequence[int]) -> Run:
    """One run with real kills of both ranks, each followed by a restart."""
    directory.mkdir(parents=True)
    run_dir = directory / "run"
    whole = {**_PLAIN, **config, "run_dir": str(run_dir)}
    lives: list[list[list[dict[str, Any]]]] = []
    begun = ended = 0.0
    for life, killed_at in enumerate([*kills, None]):
        part = Part(whole, directory / f"life-{life}", plan.iterations, killed_at, plan.mixture)
        begin, ended = _live(part)
        begun = begun or begin
        lives.append([_read(part.result, rank) for rank in range(RANKS)])
    remove_memory_states(run_id(run_dir))
    return _seen(lives, kills, ended - begun)


def _live(part: Part) -> tuple[float, float]:
    """Start the ranks and wait for their end; returns when they were started and when they had ended."""
    begun = time.time()
    processes = start_ranks(rank_main, part, RANKS)
    for process in processes:
        process.join(300)
        process.kill()
        process.join()
    killed = all(process.exitcode == -9 for process in processes)
    if not (killed if part.killed_at is not None else all(process.exitcode == 0 for process in processes)):
        statuses = [process.exitcode for process in processes]
        said = "".join(part.result.with_suffix(f".{rank}.log").read_text()[-1000:] for rank in range(RANKS))
        raise CPSRError(f"a life ended with {statuses}, and not as it should:\n{said}")
    return begun, time.time()


def _read(result: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found_path(result, rank).read_text().splitlines()]


def _seen(lives: Sequence[Sequence[list[dict[str, Any]]]], kills: Sequence[int], wall_seconds: float) -> Run:
    """Figures of the ranks' notes, by life and rank."""
    losses: dict[int, float] = {}
    seconds, down, tokens, methods = list[float](), list[float](), list[tuple[int, float]](), list[str]()
    for place, ranks in enumerate(lives):
        start, *steps = zip(*ranks, strict=False)
        methods.append(start[0]["method"])
        steps = [notes for notes in steps if "loss" in notes[0]]
        times = [max(note["unix_seconds"] for note in notes) for notes in steps]
        losses |= {notes[0]["iteration"]: statistics.fmean(note["loss"] for note in notes) for notes in steps}
        took = [after - before for before, after in pairwise(times)]
        seconds += took
        layers = (start[0]["lost_tokens"] or {}).get("layers", [])
        tokens.append((start[0]["iteration"], sum(layer["lost_tokens"] for layer in layers)))
        if place:
            before = max(note["unix_seconds"] for notes in lives[place - 1] for note in notes[-1:])
            down.append(times[0] - before - statistics.median(took))
    ends = [notes[-1] for notes in lives[-1]]
    began = [ranks[0][0]["iteration"] for ranks in lives[1:]]
    return Run(
        losses,
        [killed - start for killed, start in zip(kills, began, strict=True)],
        lost_tokens(tokens),
        down,
        statistics.median(seconds),
        wall_seconds,
        [end["digest"] for end in ends],
        methods,
        ends[0]["state_bytes"],
    )


def lost_tokens(lives: Sequence[tuple[int, float]]) -> float:
    """Tokens that the run has lost at its end.

    A life that a later one undoes, since that begins where it began or before, adds none: what it lost is lost again in
    the account of the later one.

    Args:
        lives: of each, the iteration where it began, and the tokens that experts had lost then.
    """
    lasting = [
        tokens for place, (began, tokens) in enumerate(lives) if all(later > began for later, _ in lives[place + 1 :])
    ]
    return math.fsum(lasting)


def lag_iterations(losses: Mapping[int, float], control: Mapping[int, float], tail: int) -> tuple[float, float]:
    """How far a run is behind at its end: in iterations, and in nats.

    Both trained the same batches. The gap of the last iterations is over what one of them is worth, by a straight line
    through the second half of the control.

    Args:
        losses: by iteration.
        control: of the run that nothing happened to.
        tail: iterations of the gap.
    """
    last = sorted(control)[-tail:]
    gap = statistics.fmean(losses[at] - control[at] for at in last)
    half = sorted(control)[len(control) // 2 :]
    slope, _ = numpy.polyfit(half, [control[at] for at in half], 1)
    return gap / max(-float(slope), 1e-9), gap


def _figures(runs: Sequence[Run], control: Sequence[Run], plan: Plan) -> dict[str, Any]:
    lags = [lag_iterations(one.losses, quiet.losses, TAIL_ITERATIONS) for one, quiet in zip(runs, control, strict=True)]
    wall = median_ratio_interval([one.wall_seconds for one in runs], [one.wall_seconds for one in control])
    routed = plan.iterations * plan.mixture.tokens_per_iteration
    return {
        "repeated_iterations": [one.repeated for one in runs],
        "lost_tokens": [one.lost_tokens for one in runs],
        "lost_token_share": [one.lost_tokens / routed for one in runs],
        "lag_iterations": [lag for lag, _ in lags],
        "gap_nats": [gap for _, gap in lags],
        "down_seconds": [one.down_seconds for one in runs],
        "step_seconds": [one.step_seconds for one in runs],
        "wall_seconds": [one.wall_seconds for one in runs],
        "wall_ratio": asdict(wall),
        "methods": sorted({method for one in runs for method in one.methods[1:]}),
        "same_bits": [one.digests == control[0].digests for one in runs],
    }


def _show(call: Measurement, found: Mapping[str, Mapping[str, Any]], every: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for name, own in found.items():
        repeated = [one for run in own["repeated_iterations"] for one in run]
        down = [one for run in own["down_seconds"] for one in run]
        rows.append(
            (
                name,
                str(every[name]["interval_iterations"]) if name in every else "-",
                f"{statistics.fmean(repeated):.1f} ({min(repeated)} to {max(repeated)})" if repeated else "-",
                f"{statistics.fmean(own['lost_token_share']):.2%}",
                f"{statistics.fmean(own['lag_iterations']):.1f} ({_range(own['lag_iterations'])})",
                _range(down) if down else "-",
                interval_text(Estimate(**own["wall_ratio"])),
                "same" if all(own["same_bits"]) else "others",
            )
        )
    rounds = len(found[CONTROL]["lag_iterations"])
    headings = ("way", "every", "repeated", "lost tokens", "lag", "down s", "wall", "bits")
    call.table(f"killed jobs beside one that nothing happens to ({rounds} rounds)", headings, rows)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"
