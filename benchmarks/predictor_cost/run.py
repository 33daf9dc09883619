"""`cpsr bench predictor`: memory and speed of prediction at the size of a real model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy

from cpsr.benchmarks.harness.intervals import median_interval, median_ratio_interval
from cpsr.benchmarks.harness.measurement import interval_text, measuring
from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.predictor_cost.history import GPT2_350M, SyntheticHistory
from cpsr.benchmarks.predictor_cost.measure import METHODS, MethodSamples, measure_method, training_seconds
from cpsr.demo.device import CPU
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

__all__ = ["main", "result_of"]

CHECKPOINTS = 8
GIGABYTE, MEGABYTE = 1e9, 1e6
MEMORY_AIM_BYTES = 200 * MEGABYTE
RATIO_AIM = 0.5  # of the rate at which the same checkpoints are read once


def main(
    methods: str = "default",
    repeats: int = 7,
    workdir: Path | None = None,
    json_path: Path | None = None,
    device: str = CPU,
    config: GPTConfig = GPT2_350M,
) -> None:
    """Train a few iterations, write the history, predict from it, print the table, and write the figures.

    Raises:
        ConfigError: there is no method of a name.
        CPSRError: the disk or the memory does not suffice.
    """
    names = [name.strip() for name in methods.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        raise ConfigError(f"--methods: {', '.join(unknown)} not known; there are {', '.join(METHODS)}")
    with measuring("predictor", json_path, workdir, device=device) as call:
        history = SyntheticHistory(call.directory / "run", config, CHECKPOINTS)
        step = call.bar("training, history, prediction", 1 + CHECKPOINTS + len(names))
        training = in_own_process(training_seconds, config, device)  # ends before the page cache is filled
        step()
        history.write(step)
        results = []
        for name in names:
            results.append(result_of(in_own_process(measure_method, name, history, repeats), training))
            step()
        call.table(
            f"{history.parameters / MEGABYTE:.0f}M parameters, {CHECKPOINTS} checkpoints",
            ("", *names),
            [(row, *(result["shown"][row] for result in results)) for row in results[0]["shown"]],
        )
        call.console.print(
            f"Memory: RssAnon of the predicting process above its level before; the mapped history is page cache. "
            f"Rates: forecast and prediction against summing every value of the same checkpoints once, both with the "
            f"files in memory; {repeats} paired turns, medians with 95% bootstrap intervals. A recovery opens the "
            f"history (hashing its files), forecasts, limits and predicts. Training: forward, backward and AdamW on "
            f"one short sequence, on the {device}; all else is the CPU's."
        )
        for result in results:
            call.judge({f"{result['method']}: {aim}": met for aim, met in result["aims"].items()})
        figures = {
            "model": asdict(config),
            "parameters": history.parameters,
            "checkpoints": CHECKPOINTS,
            "training_seconds": training,
            "results": results,
        }
        call.leave(figures)


def result_of(samples: MethodSamples, training: float) -> dict[str, Any]:
    """The figures of one method as plain data, what is shown of them, and whether each aim is met."""
    both, read = samples.both_seconds, samples.read_seconds
    rate = median_interval([samples.used_bytes / seconds for seconds in both])
    reading = median_interval([samples.used_bytes / seconds for seconds in read])
    ratio = median_ratio_interval(read, both)
    alone = median_ratio_interval(read, samples.predict_seconds)
    seconds, slices = median_interval(both), samples.slice_seconds or [0.0]
    estimates = {
        "rate": rate,
        "rate_of_reading": reading,
        "ratio": ratio,
        "ratio_of_predict": alone,
        "seconds": seconds,
    }
    learned = f"{1000 * numpy.quantile(slices, 0.99):.1f}, {1000 * max(slices):.1f}"
    return {
        "method": samples.method,
        "peak_bytes": samples.peak_bytes,
        "recovery_seconds": samples.recovery_seconds,
        "learn_seconds": sum(slices),
        **{name: asdict(one) for name, one in estimates.items()},
        "aims": {
            f"below {MEMORY_AIM_BYTES / MEGABYTE:.0f} MB": samples.peak_bytes < MEMORY_AIM_BYTES,
            f"at least {RATIO_AIM} of reading once": ratio.value >= RATIO_AIM,
            "within 5 training iterations": seconds.value < training,
        },
        "shown": {
            "peak of own memory, MB": f"{samples.peak_bytes / MEGABYTE:.1f}",
            "forecast and prediction, GB/s": interval_text(rate, 1 / GIGABYTE),
            "reading once, GB/s": interval_text(reading, 1 / GIGABYTE),
            "rate over reading once": interval_text(ratio),
            "prediction alone over reading once": interval_text(alone),
            "forecast and prediction, s": interval_text(seconds),
            "opening, forecast, limits, prediction, s": f"{samples.recovery_seconds:.2f}",
            "5 training iterations, s": f"{training:.2f}",
            "learning one checkpoint, s": f"{sum(slices):.2f}",
            "its slices, 99% below, and the longest, ms": learned,
        },
    }
