"""The recovery benchmark on the terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import verdict as aim_text
from cpsr.benchmarks.recovery.grid import FRACTIONS, INTERVALS
from cpsr.benchmarks.recovery.methods.roster import MOVED, ORACLE, RECOMPUTE, STALE
from cpsr.benchmarks.recovery.result import (
    LAG_AIM,
    PAPER_BELOW,
    PAPER_SAVED,
    PAPER_SAVED_MEAN,
    PLAIN_LINE_LAG,
    GridMean,
    RecoveryResult,
)
from cpsr.benchmarks.recovery.statistics import MIN_CLUSTERS, CellResult, Mean
from cpsr.tables import print_table

__all__ = ["show"]

VERDICTS = ("better", "not worse", "undetermined", "worse")
STYLES = {"worse": "[red]{}[/red]", "better": "[green]{}[/green]"}


def show(console: Console, result: RecoveryResult) -> None:
    """Cells by workload and interval, means over the grid, verdicts, and where it was measured."""
    for workload in result.selection.workloads:
        for interval in result.selection.intervals:
            print_table(console, _cells_table(result, workload, interval))
    console.print(
        "Persistent lag over the horizon u (1 is what recomputing costs, below 0 is ahead of the run that never "
        "failed), mean over failure points with its 95% bootstrap interval where there are "
        f"{MIN_CLUSTERS} independent ones; green is better than recomputing, red is worse."
    )
    print_table(console, _means_table(result))
    print_table(console, _whole_table(result))
    for line in _anchor_lines(result):
        console.print(line)
    for line in _verdict_lines(result):
        console.print(line)
    console.print(machine_text(result.machine))


def _cells_table(result: RecoveryResult, workload: str, interval: int) -> Table:
    cells = {
        (cell.method, cell.cell.fraction): cell
        for cell in result.cells
        if (cell.cell.workload, cell.cell.interval) == (workload, interval)
    }
    table = Table(title=f"{workload}, a checkpoint every {interval} iterations: lag / u", title_justify="left")
    table.add_column("method", no_wrap=True)
    for fraction in result.selection.fractions:
        table.add_column(f"at {fraction:.0%}", justify="right")
    for heading in ("gap at injection, nats", "predict + inject, iterations"):
        table.add_column(heading, justify="right")
    for method in result.methods:
        row = [cells.get((method, fraction)) for fraction in result.selection.fractions]
        gaps = " ".join(_number(cell.injection_gap_nats if cell else None, 3) for cell in row)
        costs = " ".join(_number(cell.recover_iterations if cell else None, 1) for cell in row)
        table.add_row(method, *(_cell_text(cell) for cell in row), gaps, costs)
    return table


def _means_table(result: RecoveryResult) -> Table:
    table = Table(title="Mean lag / u, by stage of the training and by interval", title_justify="left")
    table.add_column("method", no_wrap=True)
    fractions = result.selection.fractions
    intervals = [interval for interval in result.selection.intervals if interval in INTERVALS]
    for heading in (*(f"at {fraction:.0%}" for fraction in fractions), *(f"every {each}" for each in intervals)):
        table.add_column(heading, justify="right")
    for method in result.methods:
        means = [result.mean(method, fraction=fraction) for fraction in fractions]
        means += [result.mean(method, interval=interval) for interval in intervals]
        table.add_row(method, *("-" if mean is None else f"{mean.lag.value:+.2f}" for mean in means))
    return table


def _whole_table(result: RecoveryResult) -> Table:
    table = Table(title="Mean lag / u over the feasible grid", title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in ("all cells", "of all u", "no lag", "beyond", "below", "learning, s"):
        table.add_column(heading, justify="right")
    for method in result.methods:
        table.add_row(method, *_whole_texts(result, method), _learning_text(result, method))
    table.caption = (
        "all cells count alike, whatever their horizon; of all u: sum of the lags over sum of the horizons; no lag: "
        "failures without a lag, in no mean; beyond: further ahead/behind than is looked for, counted as that; below: "
        "share of the evaluations after a failure with a lower loss than recomputing after as many iterations; "
        "learning: seconds a run had spent on it by the failure"
    )
    return table


def _whole_texts(result: RecoveryResult, method: str) -> list[str]:
    whole = result.mean(method)
    if whole is None:
        return ["-"] * 5
    cells = [cell for cell in result.cells if cell.method == method and cell.cell.interval in INTERVALS]
    below = [cell.below_recompute for cell in cells if cell.below_recompute is not None]
    share = f"{sum(below) / len(below):.0%}" if below else "-"
    beyond = f"{whole.beyond_ahead}/{whole.beyond_behind}"
    return [_mean_text(whole.lag), f"{whole.of_all_horizons:+.2f}", str(whole.untold), beyond, share]


def _learning_text(result: RecoveryResult, method: str) -> str:
    seconds = [cell.learning_seconds for cell in result.cells if cell.method == method and cell.learning_seconds]
    return f"{max(seconds):.1f}" if seconds else "-"


def _anchor_lines(result: RecoveryResult) -> Iterator[str]:
    stages = ", ".join(f"{saved:.1%} at {fraction:.0%}" for fraction, saved in PAPER_SAVED.items())
    yield (
        f"For comparison: the paper's predictor saved {stages} of the training, {PAPER_SAVED_MEAN:.1%} on average, and "
        f"was below its baseline {PAPER_BELOW:.1%} of the time (other models, other hardware); the plain line with "
        f"gain 2 had {PLAIN_LINE_LAG} u over five cosine cells of another 0.9M GPT."
    )


def _verdict_lines(result: RecoveryResult) -> Iterator[str]:
    aside = (RECOMPUTE, MOVED, ORACLE, STALE)
    for method in (name for name in result.methods if name not in aside):
        whole = result.mean(method)
        if whole is None:
            continue
        yield f"{_aim(result, whole)}  {method}: mean lag {_mean_text(whole.lag)} u over {whole.cells} cells"
        if method in result.against_moved:
            yield (
                f"      against {MOVED}: {_mean_text(result.against_moved[method])} u; any run can move its weights "
                "so, failed or not: what is below 0 here is what the prediction saves of recomputing"
            )
        for other in (RECOMPUTE, STALE):
            yield f"      against {other}: {_tally([cell for cell in result.cells if cell.method == method], other)}"


def _aim(result: RecoveryResult, whole: GridMean) -> str:
    """The aim holds for a whole grid, and where the interval says so."""
    if whole.cells < len(result.selection.workloads) * len(INTERVALS) * len(FRACTIONS):
        return f"part of the grid (aim {LAG_AIM})"
    # What lies further ahead than is looked for only makes the mean too high, which the aim can bear.
    if whole.untold or whole.beyond_behind:
        return (
            f"undetermined, {whole.untold} failures without a lag, {whole.beyond_behind} further behind than is looked "
            f"for (aim {LAG_AIM})"
        )
    if whole.lag.high is None:
        return f"no interval, too few independent failures (aim {LAG_AIM})"
    return f"{aim_text(whole.lag.high <= LAG_AIM)} (aim {LAG_AIM})"


def _tally(cells: Sequence[CellResult], other: str) -> str:
    found = Counter(cell.verdicts[other] for cell in cells if other in cell.verdicts)
    counted = ", ".join(f"{found[name]} {name}" for name in VERDICTS if found[name]) or "not measured"
    aside = [
        f"{sum(cell.without_lag for cell in cells)} failure points without a lag",
        f"{sum(cell.declined for cell in cells)} declined and recomputed",
    ]
    return f"{counted} (cells); {', '.join(aside)}"


def _cell_text(cell: CellResult | None) -> str:
    if cell is None:
        return "-"
    text = _mean_text(cell.lag)
    if cell.without_lag:
        text += f" ({cell.without_lag} without a lag)"
    return STYLES.get(cell.verdicts.get(RECOMPUTE, ""), "{}").format(text)


def _mean_text(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return f"{mean.value:+.2f}"
    return f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
