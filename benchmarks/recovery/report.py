"""The recovery benchmark on the terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import verdict as aim_text
from cpsr.benchmarks.recovery.grid import FRACTIONS, INTERVALS
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.methods.roster import HARNESS, LINE, MOVED, RECOMPUTE, STALE
from cpsr.benchmarks.recovery.result import (
    END_COST_AIM,
    PAPER_BELOW,
    PAPER_SAVED,
    PAPER_SAVED_MEAN,
    GridMean,
    RecoveryResult,
)
from cpsr.benchmarks.recovery.statistics import MIN_SEEDS, CellResult, Mean
from cpsr.tables import print_table

__all__ = ["mean_text", "show"]

LOST_TEXTS: dict[PartName, str] = {
    "all": "all lost",
    "1/2": "one shard of 2 lost",
    "1/4": "one shard of 4 lost",
    "1/8": "one shard of 8 lost",
    "stage": "a stage lost",
}
VERDICTS = ("better", "not worse", "undetermined", "worse")
STYLES = {"worse": "[red]{}[/red]", "better": "[green]{}[/green]"}


def show(console: Console, result: RecoveryResult) -> None:
    """Cells by workload and interval, means over the grid, verdicts, and where it was measured."""
    for workload in result.selection.workloads:
        for interval in result.selection.intervals:
            for lost in result.selection.lost:
                print_table(console, _cells_table(result, workload, interval, lost))
    console.print(
        "End cost over the horizon u: the gap in the final loss, in iterations of equal worth, plus the iterations "
        "that were trained again; 1 is recomputing. Means over failures, with their 95% interval over training runs "
        f"where there are {MIN_SEEDS} seeds. Green is better than recomputing, red is worse."
    )
    for workload, worth in result.worths.items():
        console.print(
            f"{workload}: one more iteration is worth {1e6 * worth.nats:.0f} ± {1e6 * worth.standard_error_nats:.0f} "
            "millionths of a nat of the final loss."
        )
    for lost in result.selection.lost:
        print_table(console, _means_table(result, lost))
        print_table(console, _whole_table(result, lost))
    for line in _anchor_lines(result):
        console.print(line)
    for line in _verdict_lines(result):
        console.print(line)
    console.print(machine_text(result.machine))


def _cells_table(result: RecoveryResult, workload: str, interval: int, lost: PartName) -> Table:
    cells = {
        (cell.method, cell.cell.fraction): cell
        for cell in result.cells
        if (cell.cell.workload, cell.cell.interval, cell.cell.lost) == (workload, interval, lost)
    }
    title = f"{workload}, a checkpoint every {interval} iterations, {LOST_TEXTS[lost]}: end cost / u"
    table = Table(title=title, title_justify="left")
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


def _means_table(result: RecoveryResult, lost: PartName) -> Table:
    title = f"Mean end cost / u, {LOST_TEXTS[lost]}, by stage of the training and by interval"
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    fractions = result.selection.fractions
    intervals = [interval for interval in result.selection.intervals if interval in INTERVALS]
    for heading in (*(f"at {fraction:.0%}" for fraction in fractions), *(f"every {each}" for each in intervals)):
        table.add_column(heading, justify="right")
    for method in result.methods:
        means = [result.mean(method, fraction=fraction, lost=lost) for fraction in fractions]
        means += [result.mean(method, interval=interval, lost=lost) for interval in intervals]
        table.add_row(method, *("-" if mean is None else f"{mean.end_cost.value:+.2f}" for mean in means))
    return table


def _whole_table(result: RecoveryResult, lost: PartName) -> Table:
    table = Table(title=f"Mean end cost / u, {LOST_TEXTS[lost]}, over the feasible grid", title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in ("all cells", "of all u", "lag after 60-160 iterations", "diverged", "learning, s"):
        table.add_column(heading, justify="right")
    for method in result.methods:
        table.add_row(method, *_whole_texts(result, method, lost), _learning_text(result, method))
    table.caption = (
        "all cells count alike, whatever their horizon; of all u: sum of the end costs over sum of the horizons; lag: "
        "what the loss curve shows soon after the failure, which is no measure of the cost; diverged: in no mean; "
        "learning: seconds a run had spent on it by the failure"
    )
    return table


def _whole_texts(result: RecoveryResult, method: str, lost: PartName) -> list[str]:
    whole = result.mean(method, lost=lost)
    if whole is None:
        return ["-"] * 4
    lag = "-" if whole.lag is None else f"{whole.lag.value:+.2f}"
    return [mean_text(whole.end_cost), f"{whole.of_all_horizons:+.2f}", lag, str(whole.diverged)]


def _learning_text(result: RecoveryResult, method: str) -> str:
    seconds = [cell.learning_seconds for cell in result.cells if cell.method == method and cell.learning_seconds]
    return f"{max(seconds):.1f}" if seconds else "-"


def _anchor_lines(result: RecoveryResult) -> Iterator[str]:
    stages = ", ".join(f"{saved:.1%} at {fraction:.0%}" for fraction, saved in PAPER_SAVED.items())
    yield (
        f"For comparison: the paper's predictor saved {stages} of the training, {PAPER_SAVED_MEAN:.1%} on average, and "
        f"was below its baseline {PAPER_BELOW:.1%} of the time (other models, other hardware, another score)."
    )


def _verdict_lines(result: RecoveryResult) -> Iterator[str]:
    aside = (*HARNESS, STALE)
    for method in (name for name in result.methods if name not in aside):
        whole = result.mean(method)
        if whole is None:
            continue
        yield f"{_aim(result, whole)}  {method}: mean end cost {mean_text(whole.end_cost)} u over {whole.cells} cells"
        if method in result.against_moved:
            yield (
                f"      against {MOVED}: {mean_text(result.against_moved[method])} u; any run can move its weights "
                "so, failed or not: what is below 0 here is what the prediction saves of recomputing"
            )
        if method in result.against_line:
            both = result.against_line_predicted.get(method)
            where = "" if both is None else f"; where both predict {mean_text(both)} u"
            yield f"      against {LINE}: {mean_text(result.against_line[method])} u{where}"
        for other in (RECOMPUTE, STALE):
            yield f"      against {other}: {_tally([cell for cell in result.cells if cell.method == method], other)}"


def _aim(result: RecoveryResult, whole: GridMean) -> str:
    """The aim holds for the mean over a whole grid."""
    if whole.cells < len(result.selection.workloads) * len(INTERVALS) * len(FRACTIONS):
        return f"part of the grid (aim {END_COST_AIM})"
    if whole.diverged:
        return f"undetermined, {whole.diverged} recoveries diverged (aim {END_COST_AIM})"
    if whole.end_cost.high is None:
        return f"no interval, too few seeds (aim {END_COST_AIM})"
    return f"{aim_text(whole.end_cost.value <= END_COST_AIM)} (aim {END_COST_AIM})"


def _tally(cells: Sequence[CellResult], other: str) -> str:
    found = Counter(cell.verdicts[other] for cell in cells if other in cell.verdicts)
    counted = ", ".join(f"{found[name]} {name}" for name in VERDICTS if found[name]) or "not measured"
    aside = [
        f"{sum(cell.diverged for cell in cells)} recoveries diverged",
        f"{sum(cell.declined for cell in cells)} declined and recomputed",
    ]
    return f"{counted} (cells); {', '.join(aside)}"


def _cell_text(cell: CellResult | None) -> str:
    if cell is None:
        return "-"
    text = mean_text(cell.end_cost)
    if cell.diverged:
        text += f" ({cell.diverged} diverged)"
    return STYLES.get(cell.verdicts.get(RECOMPUTE, ""), "{}").format(text)


def mean_text(mean: Mean) -> str:
    """With its interval, where it has one."""
    if mean.low is None or mean.high is None:
        return f"{mean.value:+.2f}"
    return f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
