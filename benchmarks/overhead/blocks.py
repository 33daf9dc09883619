"""Blocks of steps with something and without it in turns, and the overhead that they show."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval
from cpsr.benchmarks.harness.processes import wait_for
from cpsr.demo.device import CPU
from cpsr.engines.adapter import EngineAdapter
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
    """Seconds of one block with the wrapper and of its neighbour without, `BLOCK_STEPS` steps each."""

    attached_seconds: float
    detached_seconds: float


def in_turns(block: Callable[[bool], float], pairs: int) -> list[Pair]:
    """Blocks with, without, without, with; `block` trains one and returns its seconds."""
    measured = []
    for index in range(pairs):
        order = (True, False) if index % 2 == 0 else (False, True)
        seconds = {attached: block(attached) for attached in order}
        measured.append(Pair(seconds[True], seconds[False]))
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

    measured = in_turns(block, pairs)
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
        overhead: median of all of them.
        run_medians: median of each run.
    """

    variant: str
    aim: float
    step_seconds: float
    overheads: list[list[float]]
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
    """The figures of one variant.

    Two neighbouring pairs have opposite orders and are taken together: a machine that speeds up or slows down steadily
    cancels out.
    """
    overheads = [_overheads(run) for run in runs]
    return VariantResult(
        variant=variant,
        aim=aim,
        step_seconds=statistics.median(pair.detached_seconds / BLOCK_STEPS for run in runs for pair in run),
        overheads=overheads,
        overhead=median_interval([overhead for run in overheads for overhead in run]),
        run_medians=[statistics.median(run) for run in overheads],
    )


def _overheads(run: Sequence[Pair]) -> list[float]:
    if len(run) % 2:
        raise ValueError(f"{len(run)} pairs: every order needs its opposite")
    return [
        (first.attached_seconds + second.attached_seconds) / (first.detached_seconds + second.detached_seconds) - 1
        for first, second in zip(run[::2], run[1::2], strict=True)
    ]
