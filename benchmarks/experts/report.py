"""The expert benchmark as tables."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.experts.result import Arithmetic, Compared, Recovered, Result, Stalled
from cpsr.benchmarks.experts.scheduling import OPERATORS
from cpsr.benchmarks.experts.sizes import EXPERTS, SAVED_TOKENS, RankBytes, SnapshotSize, SweepPoint
from cpsr.benchmarks.experts.written import Written
from cpsr.benchmarks.harness.intervals import Estimate
from cpsr.benchmarks.harness.measurement import interval_text, verdict
from cpsr.tables import print_table

__all__ = ["show"]

PERCENT = 100.0
MEGABYTE, GIGABYTE = 1e6, 1e9
MILLISECONDS = 1e3


def show(console: Console, machine: dict[str, Any], result: Result) -> None:
    """Print what was measured."""
    if result.arithmetic is not None:
        _show_arithmetic(console, result.arithmetic)
    if result.stalls:
        print_table(console, _stalls(result.stalls))
    if result.written:
        print_table(console, _written(result.written))
    if result.recovered:
        print_table(console, _recovered(result.recovered))
        if result.compared:
            print_table(console, _compared(result.compared))
        for label, skew in result.skews.items():
            console.print(f"{label}: the routed tokens have a skew of {skew:.2f} over the run.")
    for aim, met in result.aims().items():
        console.print(f"{verdict(met)}  {aim}")
    console.print(f"{machine['cpu_model']}, {machine['cores']} cores, load before {machine['load_before']:.1f}")


def _show_arithmetic(console: Console, arithmetic: Arithmetic) -> None:
    print_table(console, _sizes(arithmetic.sizes))
    busiest = _ranks(arithmetic.rank_bytes)
    console.print(busiest)
    print_table(console, _sweep(arithmetic.sweep))
    table = _columns(f"Choosing among {OPERATORS:,} operators", "policy", "ranks", "ms", "chosen")
    for one in arithmetic.scheduling:
        table.add_row(one.policy, str(one.ranks), f"{MILLISECONDS * one.seconds:.1f}", f"{one.chosen:,}")
    print_table(console, table)


def _columns(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading)
    return table


def _sizes(sizes: Iterable[SnapshotSize]) -> Table:
    table = _columns(
        "Bytes of a snapshot (arithmetic, on the papers' shapes)",
        "model",
        "policy",
        "K",
        "GB",
        "less",
        "factor",
        "all within",
    )
    for size in sizes:
        table.add_row(
            size.shape,
            size.policy,
            "" if size.experts_per_layer is None else str(size.experts_per_layer),
            f"{size.snapshot_bytes / GIGABYTE:.1f} of {size.dense_bytes / GIGABYTE:.1f}",
            f"{PERCENT * size.saved:.1f}%",
            f"{size.dense_bytes / size.snapshot_bytes:.1f}",
            _round(size),
        )
    return table


def _round(size: SnapshotSize) -> str:
    if size.round_snapshots is None:
        return ""
    return f"{size.round_snapshots:,}" if size.fits else "none fits: all weights do not"


def _ranks(found: RankBytes) -> str:
    adaptive = PERCENT * (1 - found.adaptive / found.every_rank_saves_all)
    shorter = PERCENT * (1 - found.adaptive / found.equal)
    return (
        f"With one expert a layer and parts shared out by what each rank has to save, the busiest of 8 ranks saves "
        f"{adaptive:.1f}% less (PEC: 76.9%), and {shorter:.1f}% less than with parts shared out by themselves (PEC: "
        "11.7% of the time)."
    )


def _sweep(points: Sequence[SweepPoint]) -> Table:
    skews = sorted({point.skew for point in points})
    title = f"GPT-1.6B: whole state over a snapshot of the experts with {SAVED_TOKENS:.0%} of the tokens, by skew"
    table = _columns(title, "experts", *(f"{skew:g}" for skew in skews))
    for experts in EXPERTS:
        row = sorted((point for point in points if point.experts == experts), key=lambda point: point.skew)
        cells = [f"{point.dense_bytes / point.snapshot_bytes:.1f} ({point.saved_experts:.1f})" for point in row]
        table.add_row(str(experts), *cells)
    return table


def _stalls(stalls: Iterable[Stalled]) -> Table:
    headings = ("model", "snapshot", "MB of a rank", "skipped", "blocked, ms", "added to a step, %")
    table = _columns("A snapshot after every iteration (median, 95%)", *headings)
    for one in stalls:
        rounds = "" if one.rounds == 1 else f", rounds of {one.rounds}"
        table.add_row(
            f"{one.label}\n{MILLISECONDS * one.step_seconds:.0f} ms",
            f"{one.way}{rounds}",
            f"{one.snapshot_bytes / MEGABYTE:.1f} of {one.state_bytes / MEGABYTE:.1f}",
            str(one.skipped),
            interval_text(one.stall_seconds, MILLISECONDS),
            interval_text(one.added, PERCENT, digits=1),
        )
    return table


def _written(found: Iterable[Written]) -> Table:
    headings = ("model", "what ranks hold alike", "MB of the busiest", "written, ms", "bytes", "time to write")
    table = _columns("A checkpoint, slowest rank (median, 95%); shares of what each takes", *headings)
    for one in found:
        table.add_row(
            one.label,
            one.way,
            interval_text(one.busiest_bytes, 1 / MEGABYTE, digits=1),
            interval_text(one.write_seconds, MILLISECONDS, digits=0),
            *(interval_text(share, digits=2) for share in (one.bytes_share, one.write_share)),
        )
    return table


def _recovered(runs: Iterable[Recovered]) -> Table:
    headings = (
        "model",
        "policy",
        "experts",
        "saved a checkpoint",
        "lag, iterations",
        "gap since then, nats",
        "at once, nats",
        "lost, PLT",
        "MTL",
    )
    table = _columns("Four failures in one run: mean over seeds (95%); saved whole, the lag is 0", *headings)
    for one in runs:
        table.add_row(
            one.label,
            one.policy,
            one.mode,
            f"{one.experts_per_checkpoint:.2f}",
            f"{_text(one.lag_iterations, 1)} [{one.seeds}]",
            _text(one.mean_gap_nats, 4),
            _text(one.injection_gap_nats, 3),
            f"{PERCENT * one.portion_lost:.1f}%",
            f"{PERCENT * one.momentary_total:.1f}% ({PERCENT * one.momentary_mean:.1f}% a layer)",
        )
    return table


def _compared(found: Iterable[Compared]) -> Table:
    headings = (
        "model",
        "policy",
        "experts",
        "lag over that of stale",
        "lag less half of stale's",
        "gap less half, nats",
    )
    table = _columns("Catching up against stale, by the same policy (below 0: better than the aim)", *headings)
    for one in found:
        share = "-" if one.lag_share is None else f"{one.lag_share:.2f}"
        table.add_row(
            one.label, one.policy, one.mode, share, _text(one.lag_beyond_aim, 1), _text(one.gap_beyond_aim, 4)
        )
    return table


def _text(estimate: Estimate | None, digits: int) -> str:
    return "undetermined" if estimate is None else interval_text(estimate, digits=digits)
