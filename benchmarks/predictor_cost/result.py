"""From seconds and bytes to the three aims of prediction."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.predictor_cost.measure import MethodSamples

__all__ = ["MEGABYTE", "MEMORY_AIM_BYTES", "RATIO_AIM", "MethodResult", "summarise"]

MEGABYTE = 1e6
MEMORY_AIM_BYTES = 200 * MEGABYTE
RATIO_AIM = 0.5  # of the rate at which the same checkpoints are read once


@dataclass(frozen=True)
class MethodResult:
    """One method.

    Attributes:
        method: its name.
        peak_bytes: of its own memory above the level before; the page cache is not in it.
        mapped_bytes: of the history's files in the page cache at the same time.
        forecast_checkpoints: how many checkpoints deciding reads, before forming the weights reads all in use.
        rate: bytes of history per second of forecast and prediction together.
        rate_of_reading: the same of reading them once.
        ratio: the one over the other, medians of paired turns.
        ratio_to_copy: the same against copying them once.
        ratio_of_predict: prediction alone against reading them once.
        seconds: forecast and prediction.
        recovery_seconds: opening the history, forecast, limits and prediction, in the order of a recovery.
        training_seconds: five training iterations.
        learn_seconds: taking in one checkpoint.
        slice_seconds: the longest slice of that.
        slice_p99_seconds: of a hundred slices 99 are no longer.
        major_faults: in all turns together; more than a few and the figures are the disk's.
    """

    method: str
    peak_bytes: int
    mapped_bytes: int
    forecast_checkpoints: float
    rate: Estimate
    rate_of_reading: Estimate
    ratio: Estimate
    ratio_to_copy: Estimate
    ratio_of_predict: Estimate
    seconds: Estimate
    recovery_seconds: float
    training_seconds: float
    learn_seconds: float
    slice_seconds: float
    slice_p99_seconds: float
    major_faults: int

    def aims(self) -> dict[str, bool]:
        """Each aim and whether it is met."""
        return {
            f"{self.method}: below {MEMORY_AIM_BYTES / MEGABYTE:.0f} MB": self.peak_bytes < MEMORY_AIM_BYTES,
            f"{self.method}: at least {RATIO_AIM} of reading once": self.ratio.value >= RATIO_AIM,
            f"{self.method}: within 5 training iterations": self.seconds.value < self.training_seconds,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"aims": self.aims()}


def summarise(samples: MethodSamples, training_seconds: Sequence[float]) -> MethodResult:
    """The figures of one method.

    Args:
        samples: at least one turn.
        training_seconds: of the five iterations.
    """
    turns = samples.repeats
    both = [turn.forecast_seconds + turn.predict_seconds for turn in turns]
    read = [turn.sum_seconds for turn in turns]
    return MethodResult(
        method=samples.method,
        peak_bytes=samples.peak.anonymous_bytes,
        mapped_bytes=samples.peak.file_bytes,
        forecast_checkpoints=samples.forecast_checkpoints,
        rate=median_interval([samples.used_bytes / seconds for seconds in both]),
        rate_of_reading=median_interval([samples.used_bytes / seconds for seconds in read]),
        ratio=median_ratio_interval(read, both),
        ratio_to_copy=median_ratio_interval([turn.copy_seconds for turn in turns], both),
        ratio_of_predict=median_ratio_interval(read, [turn.predict_seconds for turn in turns]),
        seconds=median_interval(both),
        recovery_seconds=samples.open_seconds
        + samples.first_seconds
        + statistics.median(turn.limit_seconds for turn in turns),
        training_seconds=sum(training_seconds),
        learn_seconds=samples.learn_seconds,
        slice_seconds=samples.slice_seconds,
        slice_p99_seconds=samples.slice_p99_seconds,
        major_faults=sum(turn.major_faults for turn in turns),
    )
