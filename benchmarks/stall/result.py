"""From step times to stalls and their ratios to a memcpy."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.stall.measure import PAIR_STEPS, SizeSamples
from cpsr.benchmarks.stall.trial import Trial

__all__ = ["RATIO_AIM", "MethodResult", "SizeResult", "summarise"]

RATIO_AIM = 2.5  # a stall of at most this many memcpys of the same bytes, where training fills all cores


@dataclass(frozen=True)
class MethodResult:
    """One method at one size.

    Attributes:
        name: the method.
        stalls: extra seconds over the checkpoint's step and the next one, one a round.
        stall: their median, in seconds.
        ratio: the median stall over the median memcpy.
        until_durable: extra seconds over all steps that began before the checkpoint was durable.
        processor: extra processor seconds of this process over the same steps.
        durable_seconds: median time from the update until the checkpoint is durable.
        host_memory_bytes: what it holds at its peak.
        forced: whether its files are forced to the disk before it calls them complete.
        verifies: whether it notices damage to its files.
    """

    name: str
    stalls: list[float]
    stall: Estimate
    ratio: Estimate
    until_durable: Estimate
    processor: Estimate
    durable_seconds: Estimate
    host_memory_bytes: int
    forced: bool
    verifies: bool


@dataclass(frozen=True)
class SizeResult:
    """All methods at one size; the median step without a checkpoint in seconds, and in those of the processor."""

    size: str
    state_bytes: int
    step_seconds: float
    step_processor_seconds: float
    memcpy: Estimate
    methods: list[MethodResult]

    def aims(self) -> dict[str, bool]:
        """Each aim that was measured, and whether its median meets it."""
        ours, *others = self.methods
        dcp = min(method.stall.value for method in others if method.name.startswith("dcp"))
        verifying = [method.stall.value for method in others if method.verifies]
        aims = {
            f"{self.size}: at most {RATIO_AIM} x memcpy": ours.ratio.value <= RATIO_AIM,
            f"{self.size}: below DCP": ours.stall.value < dcp,
        }
        if verifying:
            aims[f"{self.size}: the shortest of all that verify"] = ours.stall.value < min(verifying)
        return aims

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"aims": self.aims()}


def summarise(size: str, samples: SizeSamples, trials: Mapping[str, Trial]) -> SizeResult:
    """The figures of one size; the methods in alphabetical order, CPSR first."""
    baselines = list(_baselines(samples))
    names = sorted({block.method for block in samples.blocks}, key=lambda name: (name != "cpsr", name))
    return SizeResult(
        size=size,
        state_bytes=samples.state_bytes,
        step_seconds=statistics.median(seconds for seconds, _ in baselines),
        step_processor_seconds=statistics.median(processor for _, processor in baselines),
        memcpy=median_interval(samples.memcpy_seconds),
        methods=[_method(trials[name], size, samples, baselines) for name in names],
    )


def _method(trial: Trial, size: str, samples: SizeSamples, baselines: list[tuple[float, float]]) -> MethodResult:
    entry, stalls, until_durable = trial.entry, list[float](), list[float]()
    processor, durable = list[float](), list[float]()
    for block, (step_seconds, step_processor_seconds) in zip(samples.blocks, baselines, strict=True):
        if block.method == entry.name:
            seconds, steps = block.during.seconds, len(block.during.seconds)
            stalls.append(sum(seconds[:PAIR_STEPS]) - PAIR_STEPS * step_seconds)
            until_durable.append(sum(seconds) - steps * step_seconds)
            processor.append(block.during.processor_seconds - steps * step_processor_seconds)
            durable.append(block.durable_seconds)
    return MethodResult(
        name=entry.name,
        stalls=stalls,
        stall=median_interval(stalls),
        ratio=median_ratio_interval(stalls, samples.memcpy_seconds),
        until_durable=median_interval(until_durable),
        processor=median_interval(processor),
        durable_seconds=median_interval(durable),
        host_memory_bytes=trial.host_memory_bytes[size],
        forced=entry.forced,
        verifies=entry.verifies,
    )


def _baselines(samples: SizeSamples) -> Iterator[tuple[float, float]]:
    """Of each block, the mean of the four steps without a checkpoint around it: seconds, and processor seconds."""
    for before, after in pairwise([*(block.before for block in samples.blocks), samples.after]):
        steps = [*before.seconds, *after.seconds]
        yield statistics.fmean(steps), (before.processor_seconds + after.processor_seconds) / len(steps)
