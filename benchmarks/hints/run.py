"""`cpsr bench hints`: what checkpoints of a resumable function cost, and what a failure repeats; then real kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
from rich.table import Table

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import interval_text, measuring, verdict
from cpsr.benchmarks.hints.checks import checks_table, seconds_of_checks
from cpsr.errors import CPSRError
from cpsr.tables import print_table

__all__ = ["main"]

ALLOWANCES = (0.05, 0.10, 0.15)
LENGTHS = {"loop": 5, "digits": 30, "long loop": 80}  # rounds and epochs
LONG, LONG_ALLOWANCES = "long loop", (0.10,)  # takes minutes: runs once, and is not killed
ROUNDS = 5
KILLS = 4
SEED = 0
_WAIT_SECONDS = 600.0
_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Run:
    """What a run has printed; all times in seconds.

    Attributes:
        seconds: of the whole call.
        digest: of every bit of its result.
        hints: when each was reached, from the begin.
        resumed_from: number of the checkpoint that it went on from.
        own_seconds: of the function alone.
        checkpoint_seconds: for checkpoints.
        checkpoints: the function's own time at each.
    """

    seconds: float
    digest: str
    hints: Sequence[float]
    resumed_from: int | None
    own_seconds: float
    checkpoint_seconds: float
    checkpoints: Sequence[float]


@dataclass(frozen=True)
class Cost:
    """Of one function at one allowance: medians over rounds, with intervals.

    Attributes:
        overhead: time for checkpoints over the function's own.
        largest_overhead: of all rounds.
        whole: time of the call over that of the plain function in the same round; from run to run that varies more.
        count: checkpoints.
        repeated: over that of checkpoints at even distances, the expected time that a failure repeats.
        repeated_seconds: that time.
    """

    overhead: Estimate
    largest_overhead: float
    whole: Estimate
    count: Estimate
    repeated: Estimate
    repeated_seconds: Estimate


@dataclass(frozen=True)
class Killed:
    """A function that was killed again and again, and its control without the saved random states.

    Attributes:
        after_seconds: of each kill, from the begin of its process's call.
        resumed_from: checkpoint of each later process.
        same: whether the result is that of the undisturbed run, bit for bit.
        control_same: the same of the control.
    """

    after_seconds: list[float]
    resumed_from: list[int | None]
    same: bool
    control_same: bool


def main(
    json_path: Path | None = None,
    rounds: int = ROUNDS,
    kills: int = KILLS,
    workdir: Path | None = None,
    lengths: dict[str, int] | None = None,
    allowances: Sequence[float] = ALLOWANCES,
) -> None:
    """Measure, print the tables, and write the JSON file.

    Args:
        json_path: where the figures go.
        rounds: in each, every function runs plainly and at each allowance.
        kills: of each function and allowance.
        workdir: on the disk that is measured; by default the one for temporary files.
        lengths: rounds of the loops, and epochs of the training, of those that are measured.
        allowances: fractions of the functions' own time.

    Raises:
        CPSRError: a run has failed.
    """
    sizes = lengths or LENGTHS
    with measuring("hints", json_path, workdir) as call:
        costs: dict[str, dict[str, Cost]] = {}
        killed: dict[str, dict[str, Killed]] = {}
        for name, length in sizes.items():
            is_long = name == LONG
            chosen, times = (LONG_ALLOWANCES, 1) if is_long else (allowances, rounds)
            advance = call.bar(name, times if is_long else times + len(chosen))
            runs = [_round(name, length, call.directory, chosen, advance) for _ in range(times)]
            costs[name] = {f"{one:g}": _cost(runs, one) for one in chosen}
            if is_long:
                continue
            drawn = numpy.random.default_rng(SEED)
            killed[name] = {}
            for allowance in allowances:
                killed[name][f"{allowance:g}"] = _killed(
                    name, length, call.directory, allowance, kills, drawn, runs[0][0]
                )
                advance()
        checks = seconds_of_checks()
        print_table(call.console, _costs_table(costs), _kills_table(killed), checks_table(checks))
        kept = all(one.largest_overhead <= float(name) for each in costs.values() for name, one in each.items())
        exact = all(one.same and not one.control_same for each in killed.values() for one in each.values())
        call.console.print(f"{verdict(kept)}  the time for checkpoints is within the allowance, in every round")
        call.console.print(
            f"{verdict(exact)}  after kills every bit is that of the undisturbed run, and not the control's"
        )
        call.console.print(machine_text(call.machine))
        figures = {"costs": _plain(costs), "kills": _plain(killed), "allowance_kept": kept, "exact": exact}
        figures["checks_seconds"] = checks
        call.leave(figures)


def _plain(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: asdict(one) for key, one in each.items()} for name, each in found.items()}


def _round(
    name: str, length: int, directory: Path, allowances: Sequence[float], advance: Callable[[], None]
) -> dict[float, Run]:
    """A plain run, under the allowance 0, and one at each allowance."""
    found = {one: _whole(name, length, directory / f"{name}-{one:g}", one) for one in (0.0, *allowances)}
    if len({one.digest for one in found.values()}) > 1:
        raise CPSRError(f"the runs of {name} that nothing disturbed have different results: none can be compared")
    advance()
    return found


def _begun(name: str, length: int, run_dir: Path, allowance: float, *more: str) -> "subprocess.Popen[str]":
    module = "cpsr.benchmarks.hints.child"
    command = [sys.executable, "-m", module, name, str(length), str(run_dir), str(allowance), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _ended(process: "subprocess.Popen[str]", name: str) -> Run:
    output, _ = process.communicate(timeout=_WAIT_SECONDS)
    if process.returncode:
        raise CPSRError(f"the run of {name} has failed with status {process.returncode}: its error is above")
    return Run(**json.loads(output))


def _whole(name: str, length: int, run_dir: Path, allowance: float, *more: str) -> Run:
    return _ended(_begun(name, length, run_dir, allowance, *more), name)


def _killed(
    name: str, length: int, directory: Path, allowance: float, kills: int, drawn: numpy.random.Generator, plain: Run
) -> Killed:
    results: list[Run] = []
    after: list[float] = []
    resumed: list[int | None] = []
    for way, more in (("killed", []), ("control", ["--forget"])):
        run_dir = directory / f"{name}-{allowance:g}-{way}"
        for _ in range(kills if way == "killed" else 1):
            process = _begun(name, length, run_dir, allowance, *more)
            seconds = plain.seconds * float(drawn.uniform(0.2, 0.8))
            time.sleep(seconds)
            # Without a checkpoint there would be nothing to compare: the control always waits for one.
            while way == "control" and process.poll() is None and not list(run_dir.glob("checkpoints/step-*/COMMIT")):
                time.sleep(_LOOK_SECONDS)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=_WAIT_SECONDS)
            after += [seconds] if way == "killed" else []
        results.append(_whole(name, length, run_dir, allowance, *more))
        resumed.append(results[-1].resumed_from)
    same, control = (one.digest == plain.digest for one in results)
    return Killed(after, resumed, same, control)


def _cost(runs: Sequence[dict[float, Run]], allowance: float) -> Cost:
    mine = [one[allowance] for one in runs]
    overheads = [one.checkpoint_seconds / one.own_seconds for one in mine]
    repeated = [_repeated(one.checkpoints, one.own_seconds) for one in mine]
    even = [_repeated(_even(one[0.0], one[allowance], allowance), one[0.0].seconds) for one in runs]
    return Cost(
        median_interval(overheads),
        max(overheads),
        median_ratio_interval([one.seconds for one in mine], [one[0.0].seconds for one in runs]),
        median_interval([float(len(one.checkpoints)) for one in mine]),
        median_ratio_interval(repeated, even),
        median_interval(repeated),
    )


def _repeated(checkpoints: Sequence[float], seconds: float) -> float:
    """Expected time that one failure repeats, which comes at any time of the run."""
    return sum((after - before) ** 2 for before, after in pairwise([0.0, *checkpoints, seconds])) / (2 * seconds)


def _even(plain: Run, run: Run, allowance: float) -> list[float]:
    """Hints of the plain run at even distances, as many as the allowance has by the costs of the other run."""
    if not run.checkpoints:
        return []
    cost = run.checkpoint_seconds / len(run.checkpoints)
    count = int(allowance * plain.seconds / cost)
    ideal = [plain.seconds * number / (count + 1) for number in range(1, count + 1)]
    return sorted({min(plain.hints, key=lambda at: abs(at - one)) for one in ideal})


def _costs_table(costs: dict[str, dict[str, Cost]]) -> Table:
    table = Table(title="Resumable functions; medians with 95% bootstrap intervals", title_justify="left")
    for heading in ("function", "allowance", "checkpoints", "their time", "largest", "call over plain", "repeated, s"):
        table.add_column(heading)
    table.add_column("over even distances")
    for name, each in costs.items():
        for allowance, one in each.items():
            table.add_row(
                name,
                f"{float(allowance):.0%}",
                f"{one.count.value:g}",
                f"{one.overhead.value:.1%}",
                f"{one.largest_overhead:.1%}",
                interval_text(one.whole, separator="\n"),
                interval_text(one.repeated_seconds, separator="\n"),
                interval_text(one.repeated, separator="\n"),
            )
    return table


def _kills_table(killed: dict[str, dict[str, Killed]]) -> Table:
    table = Table("function", "allowance", "kills", "went on from", "same bits", "control", title="SIGKILL")
    for name, each in killed.items():
        for allowance, one in each.items():
            went = ", ".join(map(str, one.resumed_from[:1]))
            same, control = ("yes" if found else "no" for found in (one.same, one.control_same))
            table.add_row(name, f"{float(allowance):.0%}", str(len(one.after_seconds)), went, same, control)
    return table
