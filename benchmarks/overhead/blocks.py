"""Blocks of steps with something and without it in turns, and the overhead that they show."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_sum_interval
from cpsr.benchmarks.harness.processes import wait_for
from cpsr.demo.device import CPU
from cpsr.engines.adapter import EngineAdapter
from cpsr.life.saver import Saver
from cpsr.recovery import CPSRRecovery

__all__ = [
    "BLOCK_STEPS",
    "NEVER_ITERATIONS",
    "WARM_UP_STEPS",
    "Pair",
    "VariantResult",
    "block_seconds",
    "in_turns",
    "measure_pairs",
    "summarise",
]

NEVER_ITERATIONS = 2**30  # no checkpoint falls into a measurement
BLOCK_STEPS = 5  # other programs come and go on the machine: short blocks meet the same ones on both sides
SETTLE_STEPS = 1  # the first step after a switch is not timed
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Pair:
    """Seconds of one block with the wrapper and of its neighbour without, `BLOCK_STEPS` steps each.

    Attributes:
        attached_seconds: with it.
        detached_seconds: without.
        snapshots: to host memory, in the former.
        interval_iterations: between these, as it was planned by then; None: none are taken.
    """

    attached_seconds: float
    detached_seconds: float
    snapshots: int = 0
    interval_iterations: int | None = None


def in_turns(block: Callable[[bool], float], pairs: int, saver: Saver) -> list[Pair]:
    """Blocks with, without, without, with; `block` trains one and returns its seconds."""
    measured = []
    for index in range(pairs):
        before = saver.memory.taken
        order = (True, False) if index % 2 == 0 else (False, True)
        seconds = {attached: block(attached) for attached in order}
        taken, interval_iterations = saver.memory.taken - before, saver.plan.memory_interval_iterations
        measured.append(Pair(seconds[True], seconds[False], taken, interval_iterations))
    return measured


def measure_pairs(
    adapter: EngineAdapter,
    recovery: CPSRRecovery,
    loader: Iterable[Any],
    step: Callable[[Any], None],
    pairs: int,
    device: str,
) -> list[Pair]:
    """Alternate between the loop that users write with the wrapper and the one without: with, without, without, with.

    A snapshot in the step that is not timed counts as well: it shows as one that cost less.

    Args:
        adapter: of the engine; the wrapper is attached.
        recovery: the wrapper, entered.
        loader: deals the same batches to both; it is iterated through the wrapper in one of them.
        step: trains on one batch.
        pairs: how many; every rank gives the same.
        device: that it trains on; a block ends when the device has computed it.
    """
    wrapped: Iterator[Any] = recovery.resume(loader, repeat=True)
    plain = _endless(loader)
    for _ in range(WARM_UP_STEPS):
        step(next(wrapped))
    adapter.detach()
    for _ in range(WARM_UP_STEPS):
        step(next(plain))

    def block(with_wrapper: bool) -> float:
        adapter.detach()
        if with_wrapper:
            adapter.attach(recovery.life)
        return block_seconds(wrapped if with_wrapper else plain, step, device)

    measured = in_turns(block, pairs, recovery.life.saver)
    adapter.detach()
    adapter.attach(recovery.life)
    return measured


def block_seconds(batches: Iterator[Any], step: Callable[[Any], None], device: str = CPU) -> float:
    """Seconds of the next block, after a step that is not timed."""
    for _ in range(SETTLE_STEPS):
        step(next(batches))
    wait_for(device)
    started = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        step(next(batches))
    wait_for(device)
    return time.perf_counter() - started


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


@dataclass(frozen=True)
class VariantResult:
    """One training job, measured in several runs.

    Attributes:
        variant: its name.
        aim: the overhead should be below.
        step_seconds: median step without what is measured.
        overheads: relative overhead of every `with, without, without, with`, by run.
        snapshots: to host memory in each of these.
        interval_iterations: between snapshots to host memory, as planned in the end; None: none were taken.
        steps_overhead: median of those without a snapshot.
        snapshot_seconds: by which one lengthens training; None where all, or none of them had one.
        overhead: of both, with a snapshot in each interval.
        run_medians: median of each run.
    """

    variant: str
    aim: float
    step_seconds: float
    overheads: list[list[float]]
    snapshots: list[list[int]]
    interval_iterations: int | None
    steps_overhead: Estimate
    snapshot_seconds: Estimate | None
    overhead: Estimate
    run_medians: list[float]

    @property
    def met(self) -> bool:
        """Whether the whole interval is below the aim."""
        return self.overhead.high < self.aim

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        overheads = [[round(overhead, 5) for overhead in run] for run in self.overheads]
        return (
            asdict(self)
            | {"overheads": overheads}
            | {"aims": {f"{self.variant}: below {self.aim:.0%} of a step": self.met}}
        )


def summarise(variant: str, runs: Sequence[Sequence[Pair]], aim: float) -> VariantResult:
    """The figures of one variant: a snapshot falls into few blocks, whose median would not show it.

    Two neighbouring pairs have opposite orders and are taken together: a machine that speeds up or slows down steadily
    cancels out.
    """
    overheads, snapshots = [_overheads(run) for run in runs], [_snapshots(run) for run in runs]
    every = [one for run in zip(overheads, snapshots, strict=True) for one in zip(*run, strict=True)]
    without, containing = [one for one, taken in every if not taken], [one for one in every if one[1]]
    step_seconds = statistics.median(pair.detached_seconds / BLOCK_STEPS for run in runs for pair in run)
    interval_iterations = runs[-1][-1].interval_iterations
    steps_overhead = overhead = median_interval(without or [one for one, _ in every])
    snapshot_seconds = None
    if without and containing and interval_iterations:
        # A quartet has two blocks with the wrapper.
        extra = [(one - steps_overhead.value) * 2 * BLOCK_STEPS / taken for one, taken in containing]  # in steps
        snapshot_seconds = median_interval([one * step_seconds for one in extra])
        overhead = median_sum_interval(without, [one / interval_iterations for one in extra])
    return VariantResult(
        variant=variant,
        aim=aim,
        step_seconds=step_seconds,
        overheads=overheads,
        snapshots=snapshots,
        interval_iterations=interval_iterations,
        steps_overhead=steps_overhead,
        snapshot_seconds=snapshot_seconds,
        overhead=overhead,
        run_medians=[statistics.median(run) for run in overheads],
    )


def _snapshots(run: Sequence[Pair]) -> list[int]:
    return [first.snapshots + second.snapshots for first, second in zip(run[::2], run[1::2], strict=True)]


def _overheads(run: Sequence[Pair]) -> list[float]:
    if len(run) % 2:
        raise ValueError(f"{len(run)} pairs: every order needs its opposite")
    return [
        (first.attached_seconds + second.attached_seconds) / (first.detached_seconds + second.detached_seconds) - 1
        for first, second in zip(run[::2], run[1::2], strict=True)
    ]
