"""Blocks of steps of several kinds in turn, in one process: what one kind costs, whatever the machine's pace is."""

import time
from collections.abc import Callable, Mapping, Sequence

from cpsr.benchmarks.harness.intervals import Estimate, median_interval

__all__ = ["ALONE", "LIVE", "in_turn", "paired_interval"]

ALONE, LIVE = "without CPSR", "with CPSR"


def paired_interval(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """The median of the ratios of two kinds, each of two blocks of one round."""
    return median_interval([above / below for above, below in zip(one, other, strict=True)])


def in_turn(
    kinds: Mapping[str, Callable[[], object]], rounds: int, steps: int, settling: int
) -> dict[str, list[float]]:
    """Seconds of a step of each kind, by round: means of a block, after its first steps.

    The order turns round from round to round, so that a machine that slows down favours no kind.

    Args:
        kinds: name of each -> one step.
        rounds: each has a block of each kind.
        steps: of a block.
        settling: further ones at its begin that are not counted: what the block before has left to do ends beside them.
    """
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            for _ in range(settling):
                kinds[name]()
            begun = time.perf_counter()
            for _ in range(steps):
                kinds[name]()
            found[name].append((time.perf_counter() - begun) / steps)
    return found
