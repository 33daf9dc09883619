"""Blocks of steps with the wrapper and without, in turns."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cpsr.benchmarks.harness.device import wait_for
from cpsr.engines.adapter import EngineAdapter
from cpsr.recovery import CPSRRecovery

__all__ = ["BLOCK_STEPS", "NEVER_ITERATIONS", "SETTLE_STEPS", "WARM_UP_STEPS", "Pair", "configuration", "measure_pairs"]

NEVER_ITERATIONS = 2**30  # no checkpoint falls into a measurement
BLOCK_STEPS = 5  # other programs come and go on the machine: short blocks meet the same ones on both sides
SETTLE_STEPS = 1  # the first step after a switch is not timed
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Pair:
    """Seconds of one block with the wrapper and of its neighbour without, `BLOCK_STEPS` steps each."""

    attached_seconds: float
    detached_seconds: float


def configuration(run_dir: Any) -> dict[str, Any]:
    """CPSR's defaults, without any checkpoint."""
    return {"run_dir": run_dir, "checkpoint": {"interval_iterations": NEVER_ITERATIONS, "final": False}}


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
        return _block_seconds(wrapped if with_wrapper else plain, step, device)

    measured = []
    for index in range(pairs):
        order = (True, False) if index % 2 == 0 else (False, True)
        seconds = {with_wrapper: block(with_wrapper) for with_wrapper in order}
        measured.append(Pair(seconds[True], seconds[False]))
    adapter.detach()
    adapter.attach(recovery.life)
    return measured


def _block_seconds(batches: Iterator[Any], step: Callable[[Any], None], device: str) -> float:
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
