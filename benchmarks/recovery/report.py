"""The recovery benchmark on the terminal, in a picture, and as plain data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from matplotlib.figure import Figure

from cpsr.benchmarks.harness.measurement import Measurement, verdict
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.lost import PartName
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods import AUTO, CONTROLS, RECOMPUTE, STALE
from cpsr.benchmarks.recovery.result import MIN_SEEDS, Group, GroupCost, Pooled, difference
from cpsr.benchmarks.recovery.selection import Selection

__all__ = ["draw", "show", "to_json"]

# Of the mean net end cost of mode `auto`, in horizons: the whole state lost, and a part of it.
AIM_WHOLE, AIM_PART = 0.5, 0.1

Costs = Mapping[Group, GroupCost]


def show(
    call: Measurement,
    selection: Selection,
    costs: Costs,
    outcomes: Sequence[Outcome],
    worths: Mapping[str, IterationWorth],
) -> None:
    """The net figures first, then a table for each lost part; single cells are in the JSON file."""
    for line in _headline(selection, costs, outcomes):
        call.console.print(line)
    call.console.print(
        "End cost over the horizon u: the gap in the final loss, in iterations of equal worth, plus the iterations "
        "that were trained again; 1 is recomputing. Net: less the end cost of what the method does beside coming back "
        f"({', '.join(f'{method}: {control}' for method, control in CONTROLS.items())}), done at the failure with "
        f"nothing lost. Sums over sums of each workload, and their mean over workloads, with its 95% interval over "
        f"training runs where there are {MIN_SEEDS} seeds."
    )
    for workload, worth in worths.items():
        call.console.print(
            f"{workload}: one more iteration is worth {1e6 * worth.nats:.0f} ± {1e6 * worth.standard_error_nats:.0f} "
            "millionths of a nat of the final loss."
        )
    for lost in selection.lost:
        _show_costs(call, selection, costs, lost)


def _headline(selection: Selection, costs: Costs, outcomes: Sequence[Outcome]) -> Iterator[str]:
    for lost in selection.lost:
        found = costs.get(Group(AUTO, lost))
        if found is None:
            continue
        aim = AIM_WHOLE if lost == "all" else AIM_PART
        judged = verdict(found.net.value <= aim) if not found.diverged else "undetermined"
        yield f"{judged} (aim {aim})  {AUTO}, lost: {lost}: net end cost {_text(found.net)} u"
        beside = [one for one in outcomes if one.point.lost == lost]
        for other in (STALE, RECOMPUTE):
            less = difference(beside, AUTO, other)
            if less is not None:
                yield f"      less than {other}: {_text(Pooled(-less.value, *_swapped(less)))} u"


def _swapped(of: Pooled) -> tuple[float | None, float | None]:
    return None if of.high is None else -of.high, None if of.low is None else -of.low


def _show_costs(call: Measurement, selection: Selection, costs: Costs, lost: PartName) -> None:
    stages = [Group("", lost, fraction=fraction) for fraction in selection.fractions]
    stages += [Group("", lost, interval=interval) for interval in selection.intervals if len(selection.intervals) > 1]
    rows = []
    for method in selection.methods:
        found = [costs.get(replace(stage, method=method)) for stage in stages]
        texts = ["-" if one is None else f"{one.net.value:+.2f}, {one.end_cost.value:+.2f}" for one in found]
        whole = costs.get(Group(method, lost))
        if whole is not None:
            texts += [_text(whole.net), _text(whole.end_cost), f"{whole.declined}, {whole.diverged}"]
            rows.append((method, *texts))
    headings = [f"at {fraction:.0%}" for fraction in selection.fractions]
    headings += [f"every {interval}" for interval in selection.intervals if len(selection.intervals) > 1]
    call.table(
        f"End cost / u, lost: {lost}; net, and with what any run could gain",
        ("method", *headings, "all, net", "all", "recomputed, diverged"),
        rows,
        caption="all: sum of the end costs over that of the horizons, by workload; diverged trainings are in no figure",
    )


def draw(selection: Selection, costs: Costs) -> Figure:
    """Net end cost over the horizon by stage of the training: one panel for each lost part."""
    figure = Figure(figsize=(11, 1.0 + 3.2 * len(selection.lost)), layout="constrained")
    for axes, lost in zip(figure.subplots(len(selection.lost), squeeze=False)[:, 0], selection.lost, strict=True):
        for number, method in enumerate(selection.methods):
            found = [costs.get(Group(method, lost, fraction=fraction)) for fraction in selection.fractions]
            bars = [(place, one.net) for place, one in enumerate(found) if one is not None]
            places = [place + 0.7 * ((number + 0.5) / len(selection.methods) - 0.5) for place, _ in bars]
            errors = [0.0 if mean.high is None else mean.high - mean.value for _, mean in bars]
            axes.errorbar(places, [mean.value for _, mean in bars], errors, fmt="o", label=method)
        axes.axhline(1, color="black", lw=0.9, ls="--")
        axes.set_xticks(range(len(selection.fractions)), [f"at {share:.0%}" for share in selection.fractions])
        axes.set_ylabel("net end cost / u")
        axes.set_title(f"lost: {lost}; dashed: recomputing", loc="left", fontsize=10)
    figure.axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    return figure


def to_json(
    selection: Selection, costs: Costs, outcomes: Sequence[Outcome], worths: Mapping[str, IterationWorth]
) -> dict[str, Any]:
    """Plain data; each failure is `[seed, interval, checkpoint, failure, lost, end cost, its control's]`."""
    failures: dict[str, dict[str, list[list[Any]]]] = {}
    for one in outcomes:
        point, pair = one.point, (one.end_cost_iterations, one.control_iterations)
        row = [one.seed, point.interval, point.checkpoint, point.failure, point.lost]
        measured = [None if cost is None else round(cost, 2) for cost in pair]
        failures.setdefault(one.workload, {}).setdefault(one.method, []).append([*row, *measured])
    return {
        "selection": asdict(selection),
        "aim": {"net_end_cost_over_horizon": AIM_WHOLE, "of_a_part": AIM_PART},
        "costs": [asdict(cost) for cost in costs.values()],
        "worths": {name: asdict(worth) for name, worth in worths.items()},
        "failures": failures,
    }


def _text(cost: Pooled) -> str:
    if cost.low is None or cost.high is None:
        return f"{cost.value:+.2f}"
    return f"{cost.value:+.2f} ({cost.low:+.2f} to {cost.high:+.2f})"
