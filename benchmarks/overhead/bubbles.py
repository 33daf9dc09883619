"""From the intervals of a pipeline's stages to the predictor's work against the bubbles, measured and simulated."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval
from cpsr.benchmarks.overhead.interval import IntervalSample
from cpsr.learning.pipeline_schedule import stage_waits

__all__ = ["DATA_PARALLEL", "STAGES", "BubbleResult", "Simulated", "StageResult", "simulate", "summarise_bubbles"]

STAGES = (2, 4, 8, 16, 32, 64)
DATA_PARALLEL = (1, 2, 4, 8)
BACKWARD_SHARE = 2.0 / 3.0  # of a micro-batch's computation: the backward takes twice as long as the forward


@dataclass(frozen=True)
class StageResult:
    """One stage over all intervals of all runs; medians with their 95% intervals, in seconds of an interval.

    Attributes:
        stage: its number.
        parameters: that it holds.
        seconds: from checkpoint to checkpoint.
        bubbles: waits.
        work: the predictor's.
        inside_share: of all its work, what lay inside bubbles.
        late_slices_share: of all slices, those that ran past the end of their bubble.
        outside_seconds: of all intervals together, work that began outside bubbles.
        taken_in_share: of the checkpoints, those that were learned from before the next one.
    """

    stage: int
    parameters: int
    seconds: Estimate
    bubbles: Estimate
    work: Estimate
    inside_share: float
    late_slices_share: float
    outside_seconds: float
    taken_in_share: float


@dataclass(frozen=True)
class Simulated:
    """One interval of a larger job, by the schedule of 1F1B: not measured.

    Attributes:
        stages: each as large as a measured one, with as many micro-batches.
        data_parallel: members that share the predictor's work evenly.
        bubble_seconds: of the stage that waits least.
        work_seconds: of the measured stage that works most, shared.
    """

    stages: int
    data_parallel: int
    bubble_seconds: float
    work_seconds: float


@dataclass(frozen=True)
class BubbleResult:
    """Measured stages, and the jobs simulated from them."""

    interval_iterations: int
    stages: list[StageResult]
    simulated: list[Simulated]

    def aims(self) -> dict[str, bool]:
        """Each aim and whether it is met."""
        return {
            "every checkpoint is learned from before the next": all(one.taken_in_share == 1.0 for one in self.stages),
            "the work fits into the bubbles": all(one.work.value < one.bubbles.value for one in self.stages),
            "all of the work lies inside bubbles": all(one.inside_share == 1.0 for one in self.stages),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"aims": self.aims(), "untested": "simulated jobs need NCCL; none of them has been run"}


def summarise_bubbles(
    runs: Sequence[Sequence[Sequence[IntervalSample]]],
    parameters: Sequence[int],
    interval_iterations: int,
    micro_batches: int,
) -> BubbleResult:
    """The figures of all runs.

    Args:
        runs: of each run, of each stage: its intervals.
        parameters: of each stage.
        interval_iterations: between checkpoints.
        micro_batches: of an iteration.
    """
    stages = [
        _stage(stage, parameters[stage], [sample for run in runs for sample in run[stage]])
        for stage in range(len(parameters))
    ]
    return BubbleResult(interval_iterations, stages, simulate(stages, interval_iterations, micro_batches))


def simulate(measured: Sequence[StageResult], interval_iterations: int, micro_batches: int) -> list[Simulated]:
    """Larger jobs of stages like the measured ones: what grows is the number of stages, not the model on each.

    A micro-batch takes as long on every stage as on the measured one that computes longest. Of a stage's idle time what
    follows its last backward is left out: no receive waits there.
    """
    computing = max(one.seconds.value - one.bubbles.value for one in measured)
    micro_batch_seconds = computing / interval_iterations / micro_batches
    work_seconds = max(one.work.value for one in measured)
    forward, backward = (1.0 - BACKWARD_SHARE) * micro_batch_seconds, BACKWARD_SHARE * micro_batch_seconds
    points = []
    for stages in STAGES:
        waits = min(one.receive_seconds for one in stage_waits(stages, stages, forward, backward))
        points += [
            Simulated(stages, share, waits * interval_iterations, work_seconds / share) for share in DATA_PARALLEL
        ]
    return points


def _stage(stage: int, parameters: int, samples: Sequence[IntervalSample]) -> StageResult:
    work = sum(sample.work_seconds for sample in samples)
    slices = sum(sample.slices for sample in samples)
    return StageResult(
        stage,
        parameters,
        median_interval([sample.seconds for sample in samples]),
        median_interval([sample.bubble_seconds for sample in samples]),
        median_interval([sample.work_seconds for sample in samples]),
        inside_share=sum(sample.used_seconds for sample in samples) / work if work else 0.0,
        late_slices_share=sum(sample.late_slices for sample in samples) / slices if slices else 0.0,
        outside_seconds=sum(sample.outside_seconds for sample in samples),
        taken_in_share=statistics.fmean(sample.taken_in for sample in samples),
    )
