"""`cpsr bench hints`: what a failure repeats, where the optimum places checkpoints and at even distances.

Every loop runs undisturbed in each round, with the allowances of the paper (Wong and Zhang, CheckHint: User-assisted
Static Checkpointing for ML, section 4.1). Then it is killed at a time that the seed gives, and goes on; and once more
with as many checkpoints at even distances, every so manieth hint. What a failure repeats is the mean over all times at
which it could come: the time since the newest checkpoint that was written by then. Beside it is the same of as many
checkpoints at even distances of the same run's time, which nobody knows in advance, and written as fast. How much is
chance shows a control: the same of every so manieth hint, over that of even distances of time.

Time for checkpoints is that in hints, and the processor time of the thread that writes.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.harness.intervals import Estimate, median_interval
from cpsr.benchmarks.harness.measurement import interval_text, measuring
from cpsr.benchmarks.hints.work import LOOPS, Life, is_even, run
from cpsr.errors import CPSRError
from cpsr.hints.placement import place

__all__ = ["ALLOWANCES", "Size", "main"]

ALLOWANCES = (0.05, 0.10, 0.15)
RATIO_MAX = 1.05
_LOOK_SECONDS = 0.001
_PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int = 3
    loops: Sequence[str] = tuple(LOOPS)
    allowances: Sequence[float] = ALLOWANCES
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """One loop at one allowance, in one round.

    Attributes:
        checkpoints: how many.
        waited: time in hints over the function's own.
        overhead: the same with the processor time of the thread that wrote.
        own_seconds: of the function.
        written_seconds: from a checkpoint until it was written; median.
        repeated: expected part of the function that one failure repeats.
        even: the same of as many checkpoints at even distances of time.
        every: the same of every so manieth hint.
        optimum: the same of the best places of as many, for one who knew all times.
        killed_after: number of the hint that was passed before the kill.
        killed_seconds: what the call after the kill has repeated.
        killed_even_seconds: the same where every so manieth hint was a checkpoint.
        same: whether all results have the same bits.
    """

    checkpoints: int
    waited: float
    overhead: float
    own_seconds: float
    written_seconds: float
    repeated: float
    even: float
    every: float
    optimum: float
    killed_after: int
    killed_seconds: float
    killed_even_seconds: float
    same: bool


@dataclass(frozen=True)
class _Runs:
    """Where the runs of one turn keep their checkpoints, and what they note."""

    directory: Path
    lives: Path


def main(json_path: Path | None = None, size: Size | None = None, workdir: Path | None = None) -> None:
    """Measure, print a table, and write the JSON file.

    Args:
        json_path: where the figures go.
        size: how much is measured.
        workdir: on the disk that is measured; by default the one for temporary files.

    Raises:
        CPSRError: a run has failed.
    """
    size = size or Size()
    os.environ["OMP_NUM_THREADS"] = "1"
    _PROCESSES.set_forkserver_preload(["cpsr.benchmarks.hints.work"])
    cells = list(product(size.loops, size.allowances))
    when = numpy.random.default_rng(size.seed).uniform(0.1, 0.95, (size.rounds, len(cells)))
    with (
        measuring("hints", json_path, workdir) as call,
        tempfile.TemporaryDirectory(dir="/dev/shm") as lives,  # a store into a disk file may wait
    ):
        advance = call.bar("loops", size.rounds * len(cells))

        results: dict[tuple[str, float], list[Turn]] = {cell: [] for cell in cells}
        for number, (place, cell) in product(range(size.rounds), enumerate(cells)):  # one at a time: its times count
            name = f"{number}-{place}"
            runs = _Runs(call.directory / name, Path(lives) / name)
            results[cell].append(_turn(runs, *cell, float(when[number, place])))
            advance()
        ratios = {cell: median_interval([one.repeated / one.even for one in turns]) for cell, turns in results.items()}
        call.table(
            f"{size.rounds} rounds; medians, and bounds of 95%",
            [
                "loop",
                "allowed",
                "number",
                "most time",
                "repeats",
                "over even",
                "control",
                "over best",
                "kills",
                "if even",
            ],
            [_row(name, allowance, ratios[name, allowance], turns) for (name, allowance), turns in results.items()],
        )
        turns = [(allowance, one) for (_, allowance), each in results.items() for one in each]
        call.judge(
            {
                f"a failure repeats at most {RATIO_MAX} times what it does at even distances": all(
                    one.value <= RATIO_MAX for one in ratios.values()
                ),
                "the time for checkpoints is within the allowance, in every round": all(
                    one.overhead <= allowance for allowance, one in turns
                ),
                "after each kill every bit is that of the undisturbed call": all(one.same for _, one in turns),
            }
        )
        figures = [
            {
                "loop": cell[0],
                "allowance": cell[1],
                "over_even": asdict(ratios[cell]),
                "rounds": list(map(asdict, each)),
            }
            for cell, each in results.items()
        ]
        call.leave({"loops": figures})


def _row(name: str, allowance: float, ratio: Estimate, turns: Sequence[Turn]) -> list[str]:
    def median(of: Callable[[Turn], float]) -> float:
        return float(numpy.median([of(one) for one in turns]))

    return [
        name,
        f"{allowance:.0%}",
        f"{median(lambda one: one.checkpoints):g}",
        f"{max(one.overhead for one in turns):.1%}",
        f"{median(lambda one: one.repeated):.1%}",
        interval_text(ratio, separator="\n"),
        f"{median(lambda one: one.every / one.even):.2f}",
        f"{median(lambda one: one.repeated / one.optimum):.2f}",
        f"{numpy.mean([one.killed_seconds for one in turns]):.2f} s",
        f"{numpy.mean([one.killed_even_seconds for one in turns]):.2f} s",
    ]


def _turn(runs: _Runs, name: str, allowance: float, when: float) -> Turn:
    """Run a loop undisturbed, and kill it at a part of that time, both ways."""
    runs.directory.mkdir()
    runs.lives.mkdir()
    whole = _ended(runs, "whole", "whole", name, allowance, 0)
    saved, times = whole.saved[1:] > 0, numpy.cumsum(whole.own_seconds)
    processor = float(whole.processor.sum())
    own, count = float(times[-1]) - processor, max(1, int(saved.sum()))
    until_written = (whole.written - whole.after)[1:][saved]
    usual = float(numpy.median(until_written)) if saved.any() else 0.0
    even = times[numpy.searchsorted(times, times[-1] * numpy.arange(1, count + 1) / (count + 1))]
    every = times[[is_even(number, len(times), count) for number in range(1, len(times) + 1)]]
    candidates = times[:: -(-len(times) // 1000)]
    best = candidates[place(candidates.tolist(), float(times[-1]) - usual, count, 1e3 * own)]
    hint = int(numpy.searchsorted(times, when * times[-1]))
    killed, repeated = _killed(runs, "killed", name, allowance, 0, hint)
    other, repeated_even = _killed(runs, "even", name, allowance, count, hint)
    waited = float((whole.after - whole.before)[1:].sum())
    return Turn(
        int(saved.sum()),
        waited / own,
        (waited + processor) / own,
        own,
        usual,
        _repeated(times[saved], until_written, float(times[-1])),
        _repeated(even, usual, float(times[-1])),
        _repeated(every, usual, float(times[-1])),
        _repeated(best, usual, float(times[-1])),
        hint,
        repeated,
        repeated_even,
        whole.digest() == killed.digest() == other.digest(),
    )


def _repeated(
    checkpoints: NDArray[numpy.float64], until_written: NDArray[numpy.float64] | float, seconds: float
) -> float:
    """Expected part of a function that a failure at any time repeats, since the newest checkpoint that is written."""
    ends = numpy.minimum([*(checkpoints + until_written), seconds], seconds)
    begins = numpy.array([0.0, *checkpoints])
    from_there = numpy.array([0.0, *ends[:-1]])
    return float((((ends - begins) ** 2 - (from_there - begins) ** 2) / 2).sum() / seconds**2)


def _killed(runs: _Runs, run_dir: str, name: str, allowance: float, evenly: int, hint: int) -> tuple[Life, float]:
    """Kill a run as soon as it has passed a hint; what the one that goes on has noted, and what it has repeated."""
    process, noted = _begun(runs, run_dir, f"{run_dir} first", name, allowance, evenly)
    while not noted.after[hint] and process.is_alive():
        time.sleep(_LOOK_SECONDS)
    at = time.perf_counter()
    process.kill()
    process.join()
    later = _ended(runs, run_dir, f"{run_dir} second", name, allowance, evenly)
    return later, noted.seconds_since(later.resumed_at, at)


def _ended(runs: _Runs, run_dir: str, life: str, name: str, allowance: float, evenly: int) -> Life:
    process, noted = _begun(runs, run_dir, life, name, allowance, evenly)
    process.join()
    if process.exitcode:
        raise CPSRError(f"a run of {name} has failed with status {process.exitcode}: its error is above")
    return noted


def _begun(runs: _Runs, run_dir: str, life: str, name: str, allowance: float, evenly: int) -> tuple[Any, Life]:
    noted = Life.new(runs.lives / life, LOOPS[name].hints)
    process = _PROCESSES.Process(
        target=run, args=(str(noted.path), name, str(runs.directory / run_dir), allowance, evenly)
    )
    process.start()
    return process, noted
