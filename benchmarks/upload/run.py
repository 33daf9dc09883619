"""`cpsr bench upload`: a committed checkpoint to an object store and back, beside s3fs's own upload."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import interval_text, measuring, verdict
from cpsr.benchmarks.upload.server import Server, serving
from cpsr.benchmarks.upload.ways import CPSR, DEFAULTS, SETTINGS, TUNED, Cost, Setting, Ways, committed
from cpsr.tables import print_table

__all__ = ["STORES", "main"]

MEGABYTES = (64, 256)
ROUNDS = 9
RATIO_AIM = 0.9  # time over the tuned upload's, both read back and compared
# Bytes per second of one connection. Object stores give a connection some 80 MB/s, and more to many.
STORES: Mapping[str, int] = {"loopback": 0, "80 MB/s a connection": 80 * 10**6}
VERIFIED, SENT = "verified", "sent alone"
GIGABYTE = 1e9
COLOURS = {CPSR: "#1f6f8b", TUNED: "#d08c2f", DEFAULTS: "#8a8a8a"}


@dataclass(frozen=True)
class Kind:
    """Every way, with or without reading back.

    Attributes:
        seconds: of one copy, by way.
        ratios: the product's seconds over those of the other ways.
        processor_seconds_per_gigabyte: of the process that copies, by way.
        server_seconds_per_gigabyte: of the server's process, by way.
    """

    seconds: Mapping[str, Estimate]
    ratios: Mapping[str, Estimate]
    processor_seconds_per_gigabyte: Mapping[str, Estimate]
    server_seconds_per_gigabyte: Mapping[str, Estimate]


@dataclass(frozen=True)
class Result:
    """One size at one store.

    Attributes:
        store: its name.
        megabytes: of the state.
        setting: with which s3fs was fastest.
        kinds: `verified` and `sent alone`.
        peak_bytes: most memory of a verified copy, by way.
    """

    store: str
    megabytes: int
    setting: Setting
    kinds: Mapping[str, Kind]
    peak_bytes: Mapping[str, int]

    def aim(self) -> tuple[str, bool]:
        """What the product should reach, and whether all of the interval does."""
        text = f"{self.store}, {self.megabytes} MB: verified, at most {RATIO_AIM} of the tuned upload"
        return text, self.kinds[VERIFIED].ratios[TUNED].high <= RATIO_AIM


def main(
    json_path: Path | None = None,
    rounds: int = ROUNDS,
    workdir: Path | None = None,
    megabytes: Sequence[int] = MEGABYTES,
    settings: Sequence[Setting] = SETTINGS,
) -> None:
    """Measure, print the table, and write the JSON file with its plot.

    Args:
        json_path: where the figures go.
        rounds: of every way, in random order.
        workdir: on the disk that the checkpoint is read from; by default the one for temporary files.
        megabytes: sizes of the state.
        settings: of s3fs, of which the fastest is taken.

    Raises:
        CPSRError: moto or s3fs is not installed, the server does not start, or a copy is damaged.
    """
    with measuring("upload", json_path, workdir) as call:
        step = call.bar("copies", len(STORES) * len(megabytes) * (rounds + 1))
        checkpoints = {size: committed(call.directory / str(size), size) for size in megabytes}
        results = []
        for store, bytes_per_second in STORES.items():
            for size, checkpoint in checkpoints.items():
                with serving(bytes_per_second) as server:
                    results.append(_measured(store, size, checkpoint, server, rounds, settings, step))
        _show(call.console, results, rounds)
        call.console.print(machine_text(call.machine))
        figures = {
            "rounds": rounds,
            "results": [asdict(result) for result in results],
            "aims": dict(result.aim() for result in results),
        }
        call.leave(figures, _draw(results, call.machine))


def _measured(
    store: str,
    megabytes: int,
    checkpoint: Path,
    server: Server,
    rounds: int,
    settings: Sequence[Setting],
    step: Callable[[], None],
) -> Result:
    ways = Ways(checkpoint, server.processor_seconds)
    setting = ways.tune(settings)
    order = random.Random(megabytes)  # noqa: S311 - an order, not a secret
    samples: dict[str, dict[str, list[Cost]]] = {kind: {name: [] for name in COLOURS} for kind in (VERIFIED, SENT)}
    calls = [(VERIFIED, name, call) for name, call in ways.verified.items()]
    calls += [(SENT, name, call) for name, call in ways.sent.items()]
    for number in range(-1, rounds):  # the first one warms up
        for kind, name, call in order.sample(calls, len(calls)):
            cost = call()
            if number >= 0:
                samples[kind][name].append(cost)
        step()
    ways.check()
    kinds = {kind: _kind(own, ways.bytes / GIGABYTE) for kind, own in samples.items()}
    return Result(store, megabytes, setting, kinds, {name: ways.peak_bytes(name) for name in COLOURS})


def _kind(samples: Mapping[str, Sequence[Cost]], gigabytes: float) -> Kind:
    seconds = {name: [cost.seconds for cost in own] for name, own in samples.items()}
    return Kind(
        {name: median_interval(own) for name, own in seconds.items()},
        {name: median_ratio_interval(seconds[CPSR], own) for name, own in seconds.items() if name != CPSR},
        {name: median_interval([one.processor_seconds / gigabytes for one in own]) for name, own in samples.items()},
        {name: median_interval([one.server_seconds / gigabytes for one in own]) for name, own in samples.items()},
    )


def _show(console: Console, results: Sequence[Result], rounds: int) -> None:
    table = Table(title="A checkpoint to an S3 server on this machine", title_justify="left")
    for heading in ("store", "state", "way", "verified, s", "cpsr over it", "sent alone, s", "cpsr over it"):
        table.add_column(heading)
    for heading in ("processor s per GB", "server s per GB", "peak memory"):
        table.add_column(heading)
    for result in results:
        for name in COLOURS:
            row = [result.store, f"{result.megabytes} MB", name]
            for kind in (result.kinds[VERIFIED], result.kinds[SENT]):
                row.append(interval_text(kind.seconds[name]))
                row.append(interval_text(kind.ratios[name]) if name in kind.ratios else "")
            verified = result.kinds[VERIFIED]
            row.append(f"{verified.processor_seconds_per_gigabyte[name].value:.1f}")
            row.append(f"{verified.server_seconds_per_gigabyte[name].value:.1f}")
            table.add_row(*row, f"{result.peak_bytes[name] / 1e6:.0f} MB")
    print_table(console, table)
    console.print(f"Medians of {rounds} with 95% bootstrap intervals; processor time and memory of verified copies.")
    for result in results:
        chosen = f"parts of {result.setting.chunk_mebibytes} MiB, {result.setting.concurrency} at a time"
        console.print(f"{result.store}, {result.megabytes} MB: s3fs is fastest with {chosen}")
    for result in results:
        aim, met = result.aim()
        console.print(f"{verdict(met)}  {aim}")


def _draw(results: Sequence[Result], machine: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    stores = list(dict.fromkeys(result.store for result in results))
    for axes, store in zip(figure.subplots(1, len(stores), squeeze=False)[0], stores, strict=True):
        own = [result for result in results if result.store == store]
        for place, (name, colour) in enumerate(COLOURS.items()):
            middles = [group + (place - 1) * 0.27 for group in range(len(own))]
            verified = [result.kinds[VERIFIED].seconds[name] for result in own]
            values = [one.value for one in verified]
            errors = [[one.value - one.low for one in verified], [one.high - one.value for one in verified]]
            axes.bar(middles, values, 0.25, yerr=errors, capsize=3, color=colour, label=f"{name}: read back, compared")
            sent = [result.kinds[SENT].seconds[name].value for result in own]
            axes.scatter(middles, sent, marker="_", s=300, color="black", label=None if place else "sent alone")
        ratios = [result.kinds[VERIFIED].ratios[TUNED] for result in own]
        labels = [
            f"{result.megabytes} MB\ncpsr over tuned:\n{interval_text(ratio)}"
            for result, ratio in zip(own, ratios, strict=True)
        ]
        axes.set_xticks(range(len(own)), labels)
        axes.set_title(f"{store}: seconds until copied", loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="upper left")
    figure.suptitle(
        f"A checkpoint to an S3 server on this machine ({machine_text(machine)}, {machine['date'][:10]})", fontsize=11
    )
    return figure
