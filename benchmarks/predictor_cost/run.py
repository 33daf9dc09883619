"""`cpsr bench predictor`: memory and speed of prediction at the size of a real model."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.measurement import interval_text, measuring
from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.predictor_cost.history import SIZES, SyntheticHistory
from cpsr.benchmarks.predictor_cost.measure import MethodSamples, find_methods, measure_method, training_seconds
from cpsr.demo.device import CPU
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

__all__ = ["MethodResult", "main", "summarise"]

CHECKPOINTS = 8
GIGABYTE = 1e9
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
        rate: bytes of history per second of forecast and prediction together.
        rate_of_reading: the same of reading them once.
        ratio: the one over the other, medians of paired turns.
        ratio_of_predict: prediction alone against reading them once.
        seconds: forecast and prediction.
        recovery_seconds: opening the history, forecast, limits and prediction, in the order of a recovery.
        training_seconds: five training iterations.
        learn_seconds: taking in one checkpoint.
        slice_seconds: the longest slice of that.
        slice_p99_seconds: of a hundred slices 99 are no longer.
    """

    method: str
    peak_bytes: int
    mapped_bytes: int
    rate: Estimate
    rate_of_reading: Estimate
    ratio: Estimate
    ratio_of_predict: Estimate
    seconds: Estimate
    recovery_seconds: float
    training_seconds: float
    learn_seconds: float
    slice_seconds: float
    slice_p99_seconds: float

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
        rate=median_interval([samples.used_bytes / seconds for seconds in both]),
        rate_of_reading=median_interval([samples.used_bytes / seconds for seconds in read]),
        ratio=median_ratio_interval(read, both),
        ratio_of_predict=median_ratio_interval(read, [turn.predict_seconds for turn in turns]),
        seconds=median_interval(both),
        recovery_seconds=samples.open_seconds
        + samples.first_seconds
        + statistics.median(turn.limit_seconds for turn in turns),
        training_seconds=sum(training_seconds),
        learn_seconds=samples.learn_seconds,
        slice_seconds=samples.slice_seconds,
        slice_p99_seconds=samples.slice_p99_seconds,
    )


def main(
    parameters: str = "350M",
    methods: str = "default",
    repeats: int = 7,
    workdir: Path | None = None,
    json_path: Path | None = None,
    device: str = CPU,
    *,
    sizes: Mapping[str, GPTConfig] = SIZES,
) -> None:
    """Train a few iterations, write the history, predict from it, print the table, and write the figures.

    Args:
        parameters: one of `sizes`.
        methods: names of `METHODS`, comma-separated.
        repeats: paired turns of reading and predicting, for each method.
        workdir: holds the history, of 4 bytes a parameter and checkpoint.
        json_path: where the figures go.
        device: `cpu` or `cuda`, which the iterations train on; predictions are the CPU's.
        sizes: name -> shape of the model.

    Raises:
        ConfigError: an argument names nothing that there is.
        CPSRError: the disk or the memory does not suffice.
    """
    names = find_methods(methods)
    if parameters not in sizes:
        raise ConfigError(f"--parameters {parameters} is not known; there are {', '.join(sizes)}")
    config = sizes[parameters]
    with measuring("predictor", json_path, workdir, device=device) as call:
        history = SyntheticHistory(call.directory / "run", config, CHECKPOINTS)
        step = call.bar("training, history, prediction", 1 + CHECKPOINTS + len(names))
        iterations = in_own_process(training_seconds, config, device)  # ends before the page cache is filled
        step()
        history.write(step)
        results = []
        for name in names:
            results.append(summarise(in_own_process(measure_method, name, history, repeats), iterations))
            step()
        call.table(
            f"{history.parameters / MEGABYTE:.0f}M parameters, {CHECKPOINTS} checkpoints",
            ("", *(result.method for result in results)),
            [(name, *(text(result) for result in results)) for name, text in _ROWS.items()],
        )
        call.console.print(
            f"Memory: RssAnon of the predicting process above its level before; the mapped history is page cache. "
            f"Rates: forecast and prediction against summing every value of the same checkpoints once, both with the "
            f"files in memory; {repeats} paired turns, medians with 95% bootstrap intervals. A recovery opens the "
            f"history (hashing its files), forecasts, limits and predicts. Training: forward, backward and AdamW on "
            f"one short sequence, on the {device}; all else is the CPU's."
        )
        for result in results:
            for aim, met in result.aims().items():
                call.judge(aim, met)
        figures = {
            "model": asdict(config),
            "parameters": history.parameters,
            "checkpoints": CHECKPOINTS,
            "training": {"iteration_seconds": list(iterations)},
            "results": [result.to_json() for result in results],
        }
        call.leave(figures)


_ROWS: dict[str, Callable[[MethodResult], str]] = {
    "peak of own memory, MB": lambda result: f"{result.peak_bytes / MEGABYTE:.1f}",
    "history mapped meanwhile, MB": lambda result: f"{result.mapped_bytes / MEGABYTE:.0f}",
    "forecast and prediction, GB/s": lambda result: interval_text(result.rate, 1 / GIGABYTE),
    "reading once, GB/s": lambda result: interval_text(result.rate_of_reading, 1 / GIGABYTE),
    "rate over reading once": lambda result: interval_text(result.ratio),
    "prediction alone over reading once": lambda result: interval_text(result.ratio_of_predict),
    "forecast and prediction, s": lambda result: interval_text(result.seconds),
    "opening, forecast, limits, prediction, s": lambda result: f"{result.recovery_seconds:.2f}",
    "5 training iterations, s": lambda result: f"{result.training_seconds:.2f}",
    "learning one checkpoint, s": lambda result: f"{result.learn_seconds:.2f}",
    "its slices, 99% below, and the longest, ms": lambda result: (
        f"{result.slice_p99_seconds * 1000:.1f}, {result.slice_seconds * 1000:.1f}"
    ),
}
