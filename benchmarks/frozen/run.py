"""`cpsr bench frozen`: what a checkpoint of adapters costs beside a frozen base, and where the base is copied."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.harness.intervals import Estimate, median_interval, median_ratio_interval
from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import interval_text, measuring, verdict
from cpsr.errors import CPSRError
from cpsr.journal import JournalReader
from cpsr.tables import print_table

__all__ = ["main"]

FROZEN, COPIED = "frozen", "copied"
LAYERS, WIDTH, RANK = 24, 1024, 8
CHECKPOINTS = 16  # of each way; the first is of its own kind, since it writes the base
INTERVAL = 20
DRAIN_SECONDS = 60.0
BYTES_AIM = 3.1  # times what trains with its two moments


@dataclass(frozen=True)
class Way:
    """How a base is kept.

    Attributes:
        first_bytes: that the first checkpoint wrote.
        bytes: that each later one wrote.
        stalls_seconds: of the training thread, by later checkpoint.
        durable_seconds: until each of them was committed.
    """

    first_bytes: int
    bytes: tuple[int, ...]
    stalls_seconds: tuple[float, ...]
    durable_seconds: tuple[float, ...]


class Adapted(nn.Module):
    """A layer that does not train, with a trained product of two narrow ones beside it (LoRA)."""

    def __init__(self, width: int, *, copied: bool) -> None:
        super().__init__()
        base = torch.randn(width, width) / width**0.5
        self.base: torch.Tensor
        if copied:  # as a buffer, which every snapshot copies and every checkpoint writes
            self.register_buffer("base", base)
        else:
            self.base = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, width) / width)
        self.up = nn.Parameter(torch.zeros(width, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.base.T + x @ self.down.T @ self.up.T


def main(
    json_path: Path | None = None,
    checkpoints: int = CHECKPOINTS,
    workdir: Path | None = None,
    width: int = WIDTH,
    interval: int = INTERVAL,
) -> None:
    """Measure, print the table, and write the JSON file with its plot.

    Args:
        json_path: where the figures go.
        checkpoints: of each way.
        workdir: on the disk that is measured; by default the one for temporary files.
        width: of the layers.
        interval: iterations between checkpoints.

    Raises:
        CPSRError: a checkpoint was not committed.
    """
    with measuring("frozen", json_path, workdir) as call:
        ways = {}
        for name in (COPIED, FROZEN):
            ways[name] = _measured(call.directory / name, width, interval, checkpoints, copied=name == COPIED)
        trained = sum(one.nbytes for one in _module(width, copied=True).parameters())
        frozen = LAYERS * width * width * 4
        stall = median_ratio_interval(ways[COPIED].stalls_seconds, ways[FROZEN].stalls_seconds)
        met = max(ways[FROZEN].bytes) <= BYTES_AIM * trained
        table = Table(title=f"{frozen / 1e6:.1f} MB frozen, {trained / 1e6:.2f} MB trained", title_justify="left")
        for heading in ("base", "first checkpoint, MB", "each later one, MB", "stall, ms", "durable after, s"):
            table.add_column(heading)
        for name, way in ways.items():
            table.add_row(
                name,
                f"{way.first_bytes / 1e6:.2f}",
                f"{max(way.bytes) / 1e6:.2f}",
                interval_text(median_interval(way.stalls_seconds), 1e3),
                interval_text(median_interval(way.durable_seconds), digits=3),
            )
        print_table(call.console, table)
        call.console.print(f"Copied over frozen, stall: {interval_text(stall)}; medians with 95% bootstrap intervals")
        call.console.print(f"{verdict(met)}  at most {BYTES_AIM} times the bytes that train, with their moments")
        call.console.print(machine_text(call.machine))
        figures = {"trained_bytes": trained, "frozen_bytes": frozen, "stall_ratio": asdict(stall), "aim_met": met}
        call.leave(figures | {"ways": {name: asdict(way) for name, way in ways.items()}}, _draw(ways))


def _module(width: int, *, copied: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(width, copied=copied) for _ in range(LAYERS)))


def _measured(run_dir: Path, width: int, interval: int, checkpoints: int, *, copied: bool) -> Way:
    module = _module(width, copied=copied)
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad])
    # Whole ones all stay, so that none is thinned before its files are counted.
    checkpoint = {"interval_iterations": interval, "shared_memory": False, "full_checkpoints": checkpoints + 2}
    config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": checkpoint}
    batches = [torch.randn(8, width) for _ in range(interval)]
    with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
        for batch in recovery.resume(batches, repeat=True):
            module(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recovery.life.saver.drain(DRAIN_SECONDS)
            if recovery.iteration > interval * checkpoints:
                break
    with JournalReader(run_dir / "journal.db") as journal:
        rows = [row for row in journal.checkpoints() if row.iteration % interval == 0]
    if len(rows) != checkpoints:
        raise CPSRError(f"{len(rows)} of {checkpoints} checkpoints were committed")
    first, *later = _new_bytes(run_dir, [row.iteration for row in rows])
    durable = tuple((row.write_seconds or 0.0) + (row.commit_seconds or 0.0) for row in rows[1:])
    return Way(first, tuple(later), tuple(row.stall_seconds or 0.0 for row in rows[1:]), durable)


def _new_bytes(run_dir: Path, iterations: Sequence[int]) -> list[int]:
    """Bytes of the tensor files that each checkpoint wrote, and did not link."""
    known: set[int] = set()
    found = []
    for iteration in iterations:
        files = [path.stat() for path in run_dir.glob(f"checkpoints/step-{iteration:010d}/*.safetensors")]
        found.append(sum(file.st_size for file in files if file.st_ino not in known))
        known |= {file.st_ino for file in files}
    return found


def _draw(ways: dict[str, Way]) -> Figure:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    stalls: dict[str, Estimate] = {name: median_interval(way.stalls_seconds) for name, way in ways.items()}
    left.bar(list(ways), [max(way.bytes) / 1e6 for way in ways.values()], color="#1f6f8b")
    left.set_title("MB written by a checkpoint after the first", loc="left", fontsize=10)
    right.bar(list(ways), [1e3 * stall.value for stall in stalls.values()], color="#d08c2f")
    right.set_title("stall, ms (median)", loc="left", fontsize=10)
    return figure
