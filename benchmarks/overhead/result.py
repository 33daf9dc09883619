"""From blocks of steps with something and without it to its overhead."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval
from cpsr.benchmarks.overhead.blocks import BLOCK_STEPS, Pair

__all__ = ["COORDINATOR_AIM", "OVERHEAD_AIM", "VariantResult", "summarise"]

OVERHEAD_AIM = 0.01  # of a step
COORDINATOR_AIM = 0.03  # of a step, where stages and the predictor share the processors


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


def summarise(
    variant: str, runs: Sequence[Sequence[Pair]], block_steps: int = BLOCK_STEPS, aim: float = OVERHEAD_AIM
) -> VariantResult:
    """The figures of one variant.

    Two neighbouring pairs have opposite orders and are taken together: a machine that speeds up or slows down steadily
    cancels out.

    Args:
        variant: its name.
        runs: an even number of pairs each, in the order they ran.
        block_steps: of each block.
        aim: what the overhead should be below.
    """
    overheads = [_overheads(run) for run in runs]
    return VariantResult(
        variant=variant,
        aim=aim,
        step_seconds=statistics.median(pair.detached_seconds / block_steps for run in runs for pair in run),
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
