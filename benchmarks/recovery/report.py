"""The recovery benchmark on the terminal, in a picture, and as plain data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from matplotlib.figure import Figure

from cpsr.benchmarks.harness.measurement import Measurement, verdict
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.grid import FRACTIONS, INTERVALS
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods import LINE, MOVED, PREDICTORS
from cpsr.benchmarks.recovery.result import MIN_SEEDS, Group, GroupMean, Mean, differences, mean_of
from cpsr.benchmarks.recovery.selection import Selection

__all__ = ["draw", "show", "to_json"]

END_COST_AIM = 0.2  # mean end cost over the grid, in horizons, on workloads that the prior was fitted to

Means = Mapping[Group, GroupMean]


def show(
    call: Measurement,
    selection: Selection,
    means: Means,
    outcomes: Sequence[Outcome],
    worths: Mapping[str, IterationWorth],
) -> None:
    """Means over the grid, and what predictions cost beside other ways; single cells are in the JSON file."""
    call.console.print(
        "End cost over the horizon u: the gap in the final loss, in iterations of equal worth, plus the iterations "
        "that were trained again; 1 is recomputing. Means over failures, with their 95% interval over training runs "
        f"where there are {MIN_SEEDS} seeds."
    )
    for workload, worth in worths.items():
        call.console.print(
            f"{workload}: one more iteration is worth {1e6 * worth.nats:.0f} ± {1e6 * worth.standard_error_nats:.0f} "
            "millionths of a nat of the final loss."
        )
    for lost in selection.lost:
        _show_means(call, selection, means, lost)
    for line in _lines(selection, means, outcomes):
        call.console.print(line)


def _show_means(call: Measurement, selection: Selection, means: Means, lost: PartName) -> None:
    stages = [Group("", lost, fraction=fraction) for fraction in selection.fractions]
    stages += [Group("", lost, interval=interval) for interval in selection.intervals]
    rows = []
    for method in selection.methods:
        found = [means.get(replace(stage, method=method)) for stage in stages]
        texts = ["-" if mean is None else f"{mean.end_cost.value:+.2f}" for mean in found]
        whole = means.get(Group(method, lost))
        if whole is not None:
            texts += [_text(whole.end_cost), f"{whole.of_all_horizons:+.2f}", f"{whole.declined}, {whole.diverged}"]
            rows.append((method, *texts))
    headings = [f"at {fraction:.0%}" for fraction in selection.fractions]
    headings += [f"every {interval}" for interval in selection.intervals]
    call.table(
        f"Mean end cost / u, lost: {lost}",
        ("method", *headings, "all cells", "of all u", "declined, diverged"),
        rows,
        caption="all cells count alike, whatever their horizon; of all u: sum of the end costs over sum of the "
        "horizons; diverged trainings are in no mean, declined failures are recomputed",
    )


def _lines(selection: Selection, means: Means, outcomes: Sequence[Outcome]) -> Iterator[str]:
    for method in (name for name in selection.methods if name in PREDICTORS):
        whole = means.get(Group(method))
        if whole is None:
            continue
        aim = f"aim {END_COST_AIM}"
        if whole.cells < len(selection.workloads) * len(INTERVALS) * len(FRACTIONS):
            aim = f"part of the grid ({aim})"
        elif whole.diverged or whole.end_cost.high is None:
            aim = f"undetermined ({aim})"
        else:
            aim = f"{verdict(whole.end_cost.value <= END_COST_AIM)} ({aim})"
        yield f"{aim}  {method}: mean end cost {_text(whole.end_cost)} u over {whole.cells} cells"
        for other, difference in _against(outcomes, method).items():
            yield f"      against {other}: {_text(difference)} u"
    if MOVED in selection.methods:
        yield (
            f"Any run can move its weights as {MOVED} does, failed or not: what is below 0 beside it is what the "
            "prediction saves of recomputing."
        )


def _against(outcomes: Sequence[Outcome], method: str) -> dict[str, Mean]:
    """A method beside the line, and beside recomputing and moving as far, paired by failure."""
    found = {other: differences(outcomes, method, other) for other in (MOVED, LINE) if other != method}
    return {other: mean_of(samples) for other, samples in found.items() if samples}


def draw(selection: Selection, means: Means) -> Figure:
    """Mean end cost over the horizon by stage of the training: one panel for each lost part."""
    figure = Figure(figsize=(11, 1.0 + 3.2 * len(selection.lost)), layout="constrained")
    for axes, lost in zip(figure.subplots(len(selection.lost), squeeze=False)[:, 0], selection.lost, strict=True):
        for number, method in enumerate(selection.methods):
            found = [means.get(Group(method, lost, fraction=fraction)) for fraction in selection.fractions]
            bars = [(place, one.end_cost) for place, one in enumerate(found) if one is not None]
            places = [place + 0.7 * ((number + 0.5) / len(selection.methods) - 0.5) for place, _ in bars]
            errors = [0.0 if mean.high is None else mean.high - mean.value for _, mean in bars]
            axes.errorbar(places, [mean.value for _, mean in bars], errors, fmt="o", label=method)
        axes.axhline(1, color="black", lw=0.9, ls="--")
        axes.set_xticks(range(len(selection.fractions)), [f"at {share:.0%}" for share in selection.fractions])
        axes.set_ylabel("end cost / u")
        axes.set_title(f"lost: {lost}; dashed: recomputing", loc="left", fontsize=10)
    figure.axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    return figure


def to_json(
    selection: Selection, means: Means, outcomes: Sequence[Outcome], worths: Mapping[str, IterationWorth]
) -> dict[str, Any]:
    """Plain data; each failure is `[seed, interval, checkpoint, failure, lost, end cost, final gap]`."""
    failures: dict[str, dict[str, list[list[Any]]]] = {}
    for one in outcomes:
        cost, gap, point = one.end_cost_iterations, one.final_gap_nats, one.point
        row = [one.seed, point.interval, point.checkpoint, point.failure, point.lost]
        measured = [None if cost is None else round(cost, 2), None if gap is None else round(gap, 6)]
        failures.setdefault(one.cell.workload, {}).setdefault(one.method, []).append([*row, *measured])
    against = {method: _against(outcomes, method) for method in selection.methods if method in PREDICTORS}
    return {
        "selection": asdict(selection),
        "aim": {"mean_end_cost_over_horizon": END_COST_AIM},
        "means": [asdict(mean) for mean in means.values()],
        "against": {
            method: {other: asdict(mean) for other, mean in found.items()} for method, found in against.items()
        },
        "worths": {name: asdict(worth) for name, worth in worths.items()},
        "failures": failures,
    }


def _text(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return f"{mean.value:+.2f}"
    return f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"
