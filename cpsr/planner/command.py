"""`cpsr plan`: plans of a described job, as tables or JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cpsr.errors import ConfigError
from cpsr.planner.plan import LEAST_COST, Plan, make_plan, policy_names
from cpsr.planner.spec import PlanSpec, read_plan_spec
from cpsr.planner.units import SECONDS_PER_HOUR
from cpsr.tables import print_table

__all__ = ["run_plan"]

PERCENT = 100.0


def run_plan(path: Path, policies: Sequence[str], as_json: bool) -> None:
    """Plan a described job by each policy, and print the plans.

    Args:
        path: the description.
        policies: names; none is the policy of least cost.
        as_json: print one JSON object.

    Raises:
        ConfigError: the description or a policy is not usable.
    """
    spec = read_plan_spec(path)
    known = policy_names(spec.baselines())
    unknown = [name for name in policies if name not in known]
    if unknown:
        raise ConfigError(
            f"policies that cannot be used: {', '.join(unknown)}; known are {', '.join(known)}, and fixed if the "
            "description has fixed_interval_iterations"
        )
    plans = [_plan(spec, policy) for policy in policies or (LEAST_COST,)]
    if as_json:
        print(json.dumps({"plans": [_plain(plan) for plan in plans]}, allow_nan=False))  # noqa: T201
        return
    console = Console()
    print_table(console, _plans_table(plans))
    print_table(console, _classes_table(plans[0]))
    print_table(console, _rules_table(plans[0]))
    console.print(
        "A failure that goes back to the disk costs, on average over its distance from the checkpoint, one of:"
    )
    for option in plans[0].explanation["modes"].values():
        if isinstance(option, Mapping):
            console.print(f"- {option['failure']} (a checkpoint every {option['interval_iterations']} iterations)")
    for note in dict.fromkeys(note for plan in plans for note in plan.explanation["notes"]):
        console.print(f"- {note}")


def _plan(spec: PlanSpec, policy: str) -> Plan:
    return make_plan(spec.inputs(), spec.bounds(), policy, spec.mode, spec.baselines())


def _plain(plan: Plan) -> dict[str, Any]:
    return {
        "policy": plan.origin,
        "interval_iterations": plan.interval_iterations,
        "memory_interval_iterations": plan.memory_interval_iterations,
        "mode": plan.mode,
        "explanation": plan.explanation,
    }


def _plans_table(plans: Sequence[Plan]) -> Table:
    inputs = plans[0].explanation["inputs"]
    title = f"Plans at a failure every {_figure(inputs['mtbf_hours'])} h, in % of the wall time (without restarts)"
    table = Table("policy", "interval", "in memory", "mode", "bound", "stall %", "recover %", "total %", title=title)
    for plan in plans:
        expected: Mapping[str, Any] = plan.explanation["expected"]
        shares = [expected[f"{part}_per_second"] for part in ("stall", "recovery", "cost")]
        memory = "-" if plan.memory_interval_iterations is None else str(plan.memory_interval_iterations)
        table.add_row(
            plan.origin,
            str(plan.interval_iterations),
            memory,
            plan.mode,
            plan.explanation["bound"],
            *map(_percent, shares),
        )
    return table


def _classes_table(plan: Plan) -> Table:
    headings = "failures", "share %", "every h", "go back to", "iterations lost", "other ways, iterations"
    table = Table(*headings, title="By what failures leave")
    for scope, one in plan.explanation["classes"].items():
        rate = one["failures_per_second"]
        hours = 1 / rate / SECONDS_PER_HOUR if isinstance(rate, float) and rate > 0 else "-"
        first, *others = one["ways"]
        rest = ", ".join(f"{way['way']} {_figure(way['loss_iterations'])}" for way in others)
        own = "predicted" if first["way"] == "predicted" else one["back_to"]
        table.add_row(scope, _percent(one["share"]), _figure(hours), own, _figure(one["loss_iterations"]), rest)
    return table


def _rules_table(plan: Plan) -> Table:
    """What every rule would choose before any bound; the cost of a baseline is by its own recovery."""
    table = Table("rule", "interval", "cost %", "note", title="What others would choose, unbounded")
    for name, choice in {**plan.explanation["forms"], **plan.explanation["rivals"]}.items():
        table.add_row(name, str(choice["interval_iterations"]), _percent(choice["cost_per_second"]), choice["note"])
    return table


def _percent(share: float | str) -> str:
    return share if isinstance(share, str) else f"{PERCENT * share:.3f}"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
