"""`cpsr bench durable`: processor time and time until a checkpoint is durable and verified, beside the disk's own."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.durable.ways import CPSR, RAW, Cost, Ways
from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.measurement import Measurement, interval_text, measuring

__all__ = ["main"]

MEGABYTES = (64, 256, 512)
ROUNDS = 9
PROCESSOR_AIM, RATIO_AIM = 0.4, 1.3  # seconds per GB; time over the raw way's
GIGABYTE = 1e9


@dataclass(frozen=True)
class SizeResult:
    """One size.

    Attributes:
        megabytes: of the state.
        seconds: until durable and verified, by way.
        processor_seconds_per_gigabyte: of the thread that writes, by way.
        ratio: the product's seconds over the raw way's.
        samples: every cost, by way, in the order of the rounds.
    """

    megabytes: int
    seconds: Mapping[str, Estimate]
    processor_seconds_per_gigabyte: Mapping[str, Estimate]
    ratio: Estimate
    samples: Mapping[str, Sequence[Cost]]

    def aims(self) -> dict[str, bool]:
        """What the product should reach, and whether it does."""
        return {
            f"{self.megabytes} MB: at most {PROCESSOR_AIM} s of processor time per GB": (
                self.processor_seconds_per_gigabyte[CPSR].value <= PROCESSOR_AIM
            ),
            f"{self.megabytes} MB: at most {RATIO_AIM} times a raw write and read": self.ratio.value <= RATIO_AIM,
        }


def main(
    json_path: Path | None = None,
    rounds: int = ROUNDS,
    workdir: Path | None = None,
    megabytes: Sequence[int] = MEGABYTES,
) -> None:
    """Measure, print the table, and write the JSON file.

    Args:
        json_path: where the figures go.
        rounds: of every way, in random order.
        workdir: on the disk that is measured; by default the one for temporary files.
        megabytes: sizes of the state.

    Raises:
        CPSRError: there is too little shared memory, or a checkpoint was not committed.
    """
    with measuring("durable", json_path, workdir) as call:
        step = call.bar("checkpoints", len(megabytes) * (rounds + 1))
        results = []
        for size in megabytes:
            directory = call.directory / str(size)
            directory.mkdir()
            results.append(_measured(directory, size, rounds, step))
        _show(call, results, rounds)
        figures = {
            "rounds": rounds,
            "sizes": [asdict(result) for result in results],
            "aims": {aim: met for result in results for aim, met in result.aims().items()},
        }
        call.leave(figures)


def _measured(directory: Path, megabytes: int, rounds: int, step: Any) -> SizeResult:
    ways = Ways(directory, megabytes)
    order = random.Random(megabytes)  # noqa: S311 - an order, not a secret
    samples: dict[str, list[Cost]] = {name: [] for name in ways.all}
    try:
        for number in range(-1, rounds):  # the first one warms up
            for name in order.sample(list(ways.all), len(ways.all)):
                cost = ways.all[name]()
                if number >= 0:
                    samples[name].append(cost)
            step()
    finally:
        ways.close()
    gigabytes = ways.bytes / GIGABYTE
    return SizeResult(
        megabytes,
        {name: median_interval([cost.seconds for cost in own]) for name, own in samples.items()},
        {name: median_interval([cost.processor_seconds / gigabytes for cost in own]) for name, own in samples.items()},
        median_ratio_interval([one.seconds for one in samples[CPSR]], [one.seconds for one in samples[RAW]]),
        samples,
    )


def _show(call: Measurement, results: Sequence[SizeResult], rounds: int) -> None:
    rows = [
        (
            f"{result.megabytes} MB",
            name,
            interval_text(result.seconds[name], digits=3),
            interval_text(result.ratio) if name == CPSR else "",
            interval_text(result.processor_seconds_per_gigabyte[name]),
        )
        for result in results
        for name in result.samples
    ]
    headings = ("state", "way", "seconds", "over the raw way", "processor seconds per GB")
    call.table("Until a checkpoint is durable and verified", headings, rows)
    call.console.print(
        f"Medians of {rounds} with 95% bootstrap intervals; the raw way hashes nothing and keeps no file."
    )
    for result in results:
        for aim, met in result.aims().items():
            call.judge(aim, met)
