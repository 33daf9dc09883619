"""`cpsr bench cadence`: what snapshots to host memory cost a step, and what a kill of all processes then loses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.cadence.lost import CHECKPOINT_ITERATIONS, Loss, kill_and_restart
from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import interval_text, measuring, verdict
from cpsr.benchmarks.harness.ranks import RANKS, run_ranks
from cpsr.benchmarks.overhead.blocks import Pair
from cpsr.benchmarks.overhead.result import VariantResult, summarise
from cpsr.tables import print_table

__all__ = ["INTERVALS", "Size", "main"]

AIM = 0.02  # of a step
INTERVALS = (1, 5)  # iterations between snapshots
JOBS = {"torch, one process": True, f"DeepSpeed ZeRO-1, {RANKS} ranks": False}
PERCENT, MEGABYTE, MILLISECOND = 100.0, 1e6, 1e-3
COLOURS = ("#1f6f8b", "#d08c2f", "#8a8a8a")


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        runs: jobs started anew, of each kind.
        pairs: of blocks in a run, an even number.
        kills: of jobs, for each interval.
    """

    runs: int = 3
    pairs: int = 20
    kills: int = 8


def main(json_path: Path | None = None, size: Size | None = None, workdir: Path | None = None) -> None:
    """Measure, print the tables, and write the JSON file with its plot.

    Args:
        json_path: where the figures go.
        size: how much is measured.
        workdir: holds the runs' directories; by default a temporary one.

    Raises:
        CPSRError: a job failed.
    """
    size = Size() if size is None else size
    found: dict[str, list[dict[str, Any]]] = {}
    losses: list[Loss] = []
    with measuring("cadence", json_path, workdir) as call:
        step = call.bar("jobs", size.runs * len(JOBS) * len(INTERVALS) + size.kills * (len(INTERVALS) + 1))
        for number in range(size.runs):
            for job, alone in JOBS.items():
                for interval in INTERVALS:
                    found.setdefault(_name(job, interval), []).append(
                        _measured(call.directory / f"turns-{number}-{interval}-{alone}", size, interval, alone)
                    )
                    step()
        for number in range(size.kills):
            for one in (*INTERVALS, None):
                directory = call.directory / f"kill-{number}-{one}"
                directory.mkdir()
                losses.append(kill_and_restart(directory, one, number))
                step()
        results = [
            summarise(name, [[Pair(**pair) for pair in run["pairs"]] for run in runs], aim=AIM)
            for name, runs in found.items()
        ]
        _show(call.console, results, found, losses)
        call.console.print(machine_text(call.machine))
        figures = {
            "size": vars(size),
            "checkpoint_iterations": CHECKPOINT_ITERATIONS,
            "jobs": [
                result.to_json()
                | {
                    key: [run[key] for run in found[result.variant]]
                    for key in ("stall_seconds", "state_bytes", "skipped")
                }
                for result in results
            ],
            "kills": [loss.to_json() for loss in losses],
            "aims": {"lost at most the interval, exactly": _kept(losses)},
        }
        call.leave(figures, _draw(results, losses, call.machine))


def _measured(directory: Path, size: Size, interval_iterations: int, alone: bool) -> dict[str, Any]:
    directory.mkdir()
    ranks = 1 if alone else RANKS
    options: dict[str, Any] = {"pairs": size.pairs, "interval_iterations": interval_iterations, "alone": alone}
    measured: dict[str, Any] = run_ranks("cadence.turns", directory, ranks, **options)[0]
    return measured


def _name(job: str, interval_iterations: int) -> str:
    every = "every iteration" if interval_iterations == 1 else f"every {interval_iterations} iterations"
    return f"{job}, {every}"


def _kept(losses: Sequence[Loss]) -> bool:
    """Whether each kill lost its interval at most, and came back bit for bit."""
    with_snapshots = [loss for loss in losses if loss.interval_iterations is not None]
    return all(loss.exact and loss.lost_iterations <= (loss.interval_iterations or 0) for loss in with_snapshots)


def _show(
    console: Console,
    results: Sequence[VariantResult],
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    losses: Sequence[Loss],
) -> None:
    table = Table(title="A step with snapshots to host memory, beside one without", title_justify="left")
    for heading in ("job", "state of a rank, MB", "step, ms", "overhead, % of a step", "stall, ms", "skipped", "aim"):
        table.add_column(heading)
    for result in results:
        runs = found[result.variant]
        table.add_row(
            result.variant,
            f"{runs[0]['state_bytes'] / MEGABYTE:.1f}",
            f"{result.step_seconds / MILLISECOND:.1f}",
            interval_text(result.overhead, PERCENT),
            " ".join(f"{run['stall_seconds'] / MILLISECOND:.2f}" for run in runs),
            str(sum(run["skipped"] for run in runs)),
            f"{verdict(result.met)}  below {result.aim:.0%}",
        )
    print_table(console, table)
    kills = Table(title=f"All processes killed; a checkpoint every {CHECKPOINT_ITERATIONS}", title_justify="left")
    for heading in ("snapshots", "kills", "iterations lost", "from", "bit for bit"):
        kills.add_column(heading)
    for interval in (*INTERVALS, None):
        own = [loss for loss in losses if loss.interval_iterations == interval]
        kills.add_row(
            "none between checkpoints" if interval is None else f"every {interval}",
            str(len(own)),
            " ".join(str(loss.lost_iterations) for loss in own),
            ", ".join(sorted({loss.tier for loss in own})),
            f"{sum(loss.exact for loss in own)} of {len(own)}",
        )
    print_table(console, kills)
    console.print(f"{verdict(_kept(losses))}  at most the interval is lost, bit for bit")


def _draw(results: Sequence[VariantResult], losses: Sequence[Loss], machine: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(len(results))
    for place, result in zip(places, results, strict=True):
        low, value, high = (PERCENT * one for one in (result.overhead.low, result.overhead.value, result.overhead.high))
        left.errorbar(place, value, [[value - low], [high - value]], fmt="o", capsize=4, color=COLOURS[0])
        left.plot([place] * len(result.run_medians), [PERCENT * one for one in result.run_medians], "_", color="black")
    left.axhline(PERCENT * AIM, color="#c0392b", ls="--", lw=1, label=f"aim: below {AIM:.0%}")
    left.axhline(0, color="black", lw=0.6)
    left.set_xticks(places, [result.variant.replace(", ", "\n") for result in results], fontsize=8)
    left.set_ylabel("overhead, % of a step")
    left.set_title("median, 95%, and the runs' medians (dashes)", loc="left", fontsize=10)
    left.legend(fontsize=8)
    for colour, interval in zip(COLOURS, (*INTERVALS, None), strict=True):
        own = sorted(loss.lost_iterations for loss in losses if loss.interval_iterations == interval)
        label = "checkpoints alone" if interval is None else f"snapshots every {interval}"
        right.plot(range(1, len(own) + 1), own, "o-", color=colour, label=label)
    right.set_xlabel("kills, by what they lost")
    right.set_ylabel("iterations lost")
    right.set_title(f"All processes killed, a checkpoint every {CHECKPOINT_ITERATIONS}", loc="left", fontsize=10)
    right.legend(fontsize=8)
    figure.suptitle(f"Snapshots to host memory ({machine_text(machine)}, {machine['date'][:10]})", fontsize=11)
    return figure
