"""The recovery benchmark on the terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence

from cpsr.benchmarks.harness.measurement import Measurement, verdict
from cpsr.benchmarks.recovery.grid import FRACTIONS, INTERVALS
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.methods import LINE, MOVED, PREDICTORS, RECOMPUTE, STALE
from cpsr.benchmarks.recovery.result import END_COST_AIM, MIN_SEEDS, CellResult, GridMean, Mean, RecoveryResult

__all__ = ["show"]

LOST_TEXTS: dict[PartName, str] = {
    "all": "all lost",
    "1/2": "one shard of 2 lost",
    "1/4": "one shard of 4 lost",
    "1/8": "one shard of 8 lost",
    "stage": "a stage lost",
}
VERDICTS = ("better", "not worse", "undetermined", "worse")


def show(call: Measurement, result: RecoveryResult) -> None:
    """Means over the grid, and verdicts; single cells are in the JSON file."""
    call.console.print(
        "End cost over the horizon u: the gap in the final loss, in iterations of equal worth, plus the iterations "
        "that were trained again; 1 is recomputing. Means over failures, with their 95% interval over training runs "
        f"where there are {MIN_SEEDS} seeds."
    )
    for workload, worth in result.worths.items():
        call.console.print(
            f"{workload}: one more iteration is worth {1e6 * worth.nats:.0f} ± {1e6 * worth.standard_error_nats:.0f} "
            "millionths of a nat of the final loss."
        )
    for lost in result.selection.lost:
        _show_means(call, result, lost)
    for line in _verdict_lines(result):
        call.console.print(line)


def _show_means(call: Measurement, result: RecoveryResult, lost: PartName) -> None:
    fractions, intervals = result.selection.fractions, result.selection.intervals
    rows = []
    for method in result.selection.methods:
        means = [result.mean(method, fraction=fraction, lost=lost) for fraction in fractions]
        means += [result.mean(method, interval=interval, lost=lost) for interval in intervals]
        whole = result.mean(method, lost=lost)
        texts = ["-" if mean is None else f"{mean.end_cost.value:+.2f}" for mean in means]
        last = ["-", "-"] if whole is None else [_mean_text(whole.end_cost), f"{whole.of_all_horizons:+.2f}"]
        rows.append((method, *texts, *last))
    stages = (*(f"at {fraction:.0%}" for fraction in fractions), *(f"every {each}" for each in intervals))
    call.table(
        f"Mean end cost / u, {LOST_TEXTS[lost]}",
        ("method", *stages, "all cells", "of all u"),
        rows,
        caption="all cells count alike, whatever their horizon; of all u: sum of the end costs over sum of the "
        "horizons; diverged trainings are in no mean",
    )


def _verdict_lines(result: RecoveryResult) -> Iterator[str]:
    for method in (name for name in result.selection.methods if name in PREDICTORS):
        whole = result.mean(method)
        if whole is None:
            continue
        mine = [cell for cell in result.cells if cell.method == method]
        aim = _aim(result, whole, mine)
        yield f"{aim}  {method}: mean end cost {_mean_text(whole.end_cost)} u over {whole.cells} cells"
        if method in result.against_moved:
            yield (
                f"      against {MOVED}: {_mean_text(result.against_moved[method])} u; any run can move its weights "
                "so, failed or not: what is below 0 here is what the prediction saves of recomputing"
            )
        if method in result.against_line:
            yield f"      against {LINE}: {_mean_text(result.against_line[method])} u"
        for other in (RECOMPUTE, STALE):
            yield f"      against {other}: {_tally(mine, other)}"


def _aim(result: RecoveryResult, whole: GridMean, cells: Sequence[CellResult]) -> str:
    """The aim holds for the mean over a whole grid."""
    diverged = sum(cell.diverged for cell in cells)
    if whole.cells < len(result.selection.workloads) * len(INTERVALS) * len(FRACTIONS):
        return f"part of the grid (aim {END_COST_AIM})"
    if diverged:
        return f"undetermined, {diverged} recoveries diverged (aim {END_COST_AIM})"
    if whole.end_cost.high is None:
        return f"no interval, too few seeds (aim {END_COST_AIM})"
    return f"{verdict(whole.end_cost.value <= END_COST_AIM)} (aim {END_COST_AIM})"


def _tally(cells: Sequence[CellResult], other: str) -> str:
    found = Counter(cell.verdicts[other] for cell in cells if other in cell.verdicts)
    counted = ", ".join(f"{found[name]} {name}" for name in VERDICTS if found[name]) or "not measured"
    diverged, declined = sum(cell.diverged for cell in cells), sum(cell.declined for cell in cells)
    return f"{counted} (cells); {diverged} recoveries diverged, {declined} declined and recomputed"


def _mean_text(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return f"{mean.value:+.2f}"
    return f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"
