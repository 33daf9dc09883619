"""`cpsr status`: the state of a run in a few lines, from its directory or from a service."""

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.checkpoint.orphans import runs_in_memory
from cpsr.errors import RunMismatchError, ServiceError
from cpsr.ranks.exits import ranks_named
from cpsr.service.access import TOKEN_VARIABLE
from cpsr.service.bubbles import list_bubbles
from cpsr.service.client import Client
from cpsr.service.health import health_of
from cpsr.service.identity import identity_of
from cpsr.service.parameters import Window
from cpsr.service.plan import plan_of

__all__ = ["run_status"]

HOUR_SECONDS, MINUTE_SECONDS = 3600.0, 60.0
SHARE_SHOWN = 0.0005  # rounded to a tenth of a percent, it is not 0
LOST = {  # parts of the wall time that are not useful
    "checkpoint_stall": "stalls of checkpoints",
    "memory_stall": "stalls of snapshots in memory",
    "recompute": "recomputed",
    "restart": "restarts",
    "other": "other",
}
SIZES_SHOWN = 3  # earlier ones
BASELINES_SHOWN = ("young", "checkfreq")
ORPHANED = ("gone", "unclear", "unknown")  # as `cpsr release --orphans` lists them
ENDINGS = {"clean": ", it has ended", "sigterm": ", it has left after SIGTERM"}
BUBBLE_ROWS = 1000  # the newest; the most that a service gives at once
BUBBLE_SUMS = (
    "seconds",
    "iterations",
    "bubble_seconds",
    "used_seconds",
    "late_seconds",
    "outside_seconds",
    "copied_seconds",
)


def run_status(location: str, run: str | None, as_json: bool) -> bool:
    """Print the state of a run.

    Returns:
        Whether the steps that its newest exact restart has repeated were restored, as far as they were compared.

    Args:
        location: a run directory, or the URL of a service; its token is taken from the environment.
        run: name of the run, where the service is over several.
        as_json: print one JSON object with `health`, `plan`, `bubbles` and `memory`. `plan` is null before the first
            one. `bubbles` has the sums of the newest rows of each rank that has waited in the newest life. `memory` is
            what the run holds of this machine's memory, and what others do whose directory is gone, or may be. It is
            null from a service, which may be on another machine.

    Raises:
        RunMismatchError: there is no run in the directory.
        JournalError: its journal cannot be read.
        ServiceError: the service cannot be reached, or refuses.
    """
    found = _of_service(location, run) if "://" in location else _of_directory(Path(location))
    if as_json:
        print(json.dumps(found, allow_nan=False))  # noqa: T201
        return _is_restored(found["plan"])
    console = Console(highlight=False)
    lines = _lines(found["health"], found["plan"])
    for line in [*lines, *_bubble_lines(found["bubbles"]), *_memory_lines(found["memory"])]:
        console.print(line, soft_wrap=not console.is_terminal)
    return _is_restored(found["plan"])


def _is_restored(plan: dict[str, Any] | None) -> bool:
    compared = [] if plan is None else plan.get("repeated_steps", [])  # a service of an older version lacks it
    return all(one["result"] != "not restored" for one in compared)


def _of_directory(run_dir: Path) -> dict[str, Any]:
    if not (run_dir / "journal.db").exists():
        raise RunMismatchError(f"{run_dir} is no run directory (no journal.db in it); name the run_dir of the training")
    plan = plan_of(run_dir)
    return {
        "health": health_of(run_dir).model_dump(mode="json"),
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "bubbles": _bubble_sums(list_bubbles(run_dir, Window(BUBBLE_ROWS)).model_dump(mode="json")["bubbles"]),
        "memory": _memory_here(run_dir),
    }


def _memory_here(run_dir: Path) -> dict[str, Any]:
    own = identity_of(run_dir)[0].get("run_id")
    found = runs_in_memory(SHARED_MEMORY)
    orphans = [run for run in found if run.run_id != own and run.standing in ORPHANED]
    return {
        "bytes": sum(run.bytes for run in found if run.run_id == own),
        "orphaned_runs": len(orphans),
        "orphaned_bytes": sum(run.bytes for run in orphans),
    }


def _memory_lines(memory: dict[str, Any] | None) -> list[str]:
    if memory is None:
        return []
    lines = [f"host memory of this machine: {memory['bytes'] / 1e6:,.1f} MB"] if memory["bytes"] else []
    if count := memory["orphaned_runs"]:
        which = "1 run whose directory is" if count == 1 else f"{count} runs whose directories are"
        size = f"{memory['orphaned_bytes'] / 1e6:,.1f} MB"
        lines.append(f"{which} gone, or not in sight, left {size} of it as well: cpsr release --orphans")
    return lines


def _of_service(url: str, run: str | None) -> dict[str, Any]:
    with Client(url, os.environ.get(TOKEN_VARIABLE), run) as client:
        bubbles = _bubble_sums(client.bubbles(limit=BUBBLE_ROWS)["bubbles"])
        found = {"health": client.health(), "bubbles": bubbles, "memory": None}
        try:
            return {**found, "plan": client.plan()}
        except ServiceError as error:
            if error.code != "no_plan_yet":
                raise
            return {**found, "plan": None}


def _bubble_sums(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bubbles of each rank of the newest life, by rank."""
    sums: dict[int, dict[str, Any]] = {}
    life = max((row["life"] for row in rows), default=0)
    for row in rows:
        if row["life"] == life:
            rank = sums.setdefault(row["rank"], {"rank": row["rank"], **dict.fromkeys(BUBBLE_SUMS, 0)})
            for name in BUBBLE_SUMS:
                rank[name] += row[name] or 0  # null where copies do not use waits
    return [sums[rank] for rank in sorted(sums)]


def _bubble_lines(ranks: list[dict[str, Any]]) -> list[str]:
    total = {name: sum(rank[name] for rank in ranks) for name in BUBBLE_SUMS}
    if not total["bubble_seconds"] or not total["seconds"]:
        return []
    waited, used = total["bubble_seconds"] / total["seconds"], total["used_seconds"] / total["bubble_seconds"]
    copied = total["copied_seconds"] / total["bubble_seconds"]
    count = f"{len(ranks)} rank" + "s" * (len(ranks) > 1)
    return [
        f"bubbles: training waited {waited:.1%} of the time on {count}, the predictor worked in {used:.1%} of that, "
        f"snapshots were copied in {copied:.1%}; {_duration(total['late_seconds'])} past the end of waits"
    ]


def _lines(health: dict[str, Any], plan: dict[str, Any] | None) -> list[str]:
    well = health["status"] == "ok"
    state = "[green]ok[/]" if well else f"[red]degraded[/]: {escape(str(health['reason']))}"
    state += ENDINGS.get(health["life"], "")
    at = "no step yet" if health["last_iteration"] is None else f"iteration {health['last_iteration']}"
    name = "run" if plan is None or plan["run_id"] is None else f"run {escape(plan['run_id'])}"
    lines = [f"{name}: {state}, {at}{'' if plan is None else _ranks(plan)}"]
    if plan is None:
        return [*lines, "no plan yet"]
    lines += [*_ettr_lines(plan), _plan_line(plan), *_class_lines(plan)]
    if plan["override"] is not None:
        lines.append(_override_line(plan["override"]))
    baselines = {one["name"]: one["interval_iterations"] for one in plan["rivals"]}
    shown = [f"{name} {baselines[name]}" for name in BASELINES_SHOWN if name in baselines]
    if shown:
        lines.append(f"others would choose: {', '.join(shown)}")
    found = _checkpoint_line(plan), _network_line(plan), *_recovery_lines(plan)
    lines += [line for line in found if line]
    if plan["descends_from_predicted"]:
        lines.append("[yellow]the state descends from a predicted one, or from one that was restored in part[/]")
    return lines + [f"[yellow]{escape(warning)}[/]" for warning in plan["warnings"]]


def _ranks(plan: dict[str, Any]) -> str:
    """How many ranks the run has, and had before."""
    sizes = plan.get("sizes", [])  # a service of an older version lacks them
    now = sizes[-1]["ranks"] if sizes else plan["world_size"]
    if now is None:
        return ""
    count = f", {now} rank{'s' * (now > 1)}"
    if len(sizes) < 2:
        return count
    before = [f"{one['ranks']} since {one['since_iteration']}" for one in sizes[-1 - SIZES_SHOWN : -1]]
    return f"{count} since iteration {sizes[-1]['since_iteration']} (before: {', '.join(before)})"


def _ettr_lines(plan: dict[str, Any]) -> list[str]:
    found = plan.get("ettr")  # a service of an older version lacks it
    if found is None:
        return ["effective training time: not recorded, the journal is of an older version"]
    whole, hour = found["since_start"], found["last_hour"]
    if whole["ettr"] is None:
        return []
    recent = hour["ettr"] is not None and hour["since_unix_seconds"] > whole["since_unix_seconds"]
    line = f"effective training time: {whole['ettr']:.1%} of {_duration(whole['wall_seconds'])}"
    line += f", {hour['ettr']:.1%} in the last hour" if recent else ""
    line += ", [red]down now[/]" if found["state"] == "down" else ""
    line += "; overhead on other steps: not measured"
    if whole["useful_seconds"] >= (1 - SHARE_SHOWN) * whole["wall_seconds"]:
        return [line]
    return [line, f"the rest: {_lost(whole)}" + (f"; in the last hour: {_lost(hour)}" if recent else "")]


def _lost(spent: dict[str, Any]) -> str:
    parts = [(name, spent[f"{part}_seconds"] / spent["wall_seconds"]) for part, name in LOST.items()]
    return ", ".join(f"{name} {share:.1%}" for name, share in parts if share >= SHARE_SHOWN) or "nothing"


def _plan_line(plan: dict[str, Any]) -> str:
    every = plan["ranks"][0]["interval_iterations"]
    seconds = plan["ranks"][0]["interval_seconds"]
    took = "" if seconds is None else f" ({_duration(seconds)})"
    way = plan["explanation"].get("expected", {}).get("failure", plan["recovery_mode"])
    mode = "" if plan["recovery_mode"] is None else f", after a failure: {way}"
    bound = "" if plan["bound"] in (None, "none") else f", bound: {plan['bound']}"
    phase = "" if plan["phase"] is None else f", phase {plan['phase']['phase']}"
    memory = plan.get("memory_interval_iterations")  # a service of an older version lacks it
    took += "" if memory is None else f", in memory every {memory}"
    return f"a checkpoint every {every} iterations{took}, by {escape(plan['ranks'][0]['origin'])}{bound}{phase}{mode}"


def _class_lines(plan: dict[str, Any]) -> list[str]:
    parts = []
    for one in plan.get("classes", []):
        rate, loss = one["failures_per_second"], one["loss_iterations"]
        if isinstance(rate, str) or isinstance(loss, str) or not rate:
            continue
        seen = f", {one['seen']} seen" if one["seen"] else ""
        parts.append(f"{one['scope']} every {_duration(1 / rate)}{seen}: {loss:.1f} iterations, {_ways(one)}")
    return [f"expected failures: {'; '.join(parts)}"] if parts else []


def _ways(one: dict[str, Any]) -> str:
    """Where such a failure goes back to, and what the other ways would cost."""
    first, *others = [way["way"] for way in one.get("ways", [])] or [one["back_to"]]  # older plans have no ways
    own = "predicted" if first == "predicted" else f"from {one['back_to']}"
    costs = {way["way"]: way["loss_iterations"] for way in one.get("ways", [])}
    known = [f"{way} {costs[way]:.1f}" for way in others if not isinstance(costs[way], str)]
    return own + (f" ({', '.join(known)})" if known else "")


def _override_line(override: dict[str, Any]) -> str:
    low, high = override["interval_min_iterations"], override["interval_max_iterations"]
    what = f"{low}" if low == high else f"{low or 1} to {'any' if high is None else high}"
    left = _duration(max(0.0, override["expires_unix_seconds"] - time.time()))
    taken = "" if override["taken_up"] else ", not applied yet"
    return f"override: {what} iterations for {left}{taken} ({escape(override['reason'])})"


def _checkpoint_line(plan: dict[str, Any]) -> str:
    checkpoint = plan["newest_checkpoint"]
    if checkpoint is None:
        return "no checkpoint yet"
    size = "" if checkpoint["bytes"] is None else f", {checkpoint['bytes'] / 1e6:,.1f} MB"
    age = _duration(max(0.0, time.time() - checkpoint["created_unix_seconds"]))
    return f"newest checkpoint: iteration {checkpoint['iteration']}{size}, {age} ago, {checkpoint['origin']}"


def _network_line(plan: dict[str, Any]) -> str:
    network = plan.get("network")  # a service of an older version lacks it
    if network is None:
        return ""
    taken, waiting = network["checkpoints_taken_in"], network["checkpoints_waiting"]
    updates = network["updates"]
    return f"predictor: learned from {taken} of {taken + waiting} checkpoints, {updates} gradient steps"


def _recovery_lines(plan: dict[str, Any]) -> list[str]:
    recovery = plan["last_recovery"]
    if recovery is None:
        return []
    failed = "" if recovery["failure_iteration"] is None else f" from a failure at {recovery['failure_iteration']}"
    line = (
        f"last recovery: {escape(recovery['method'])}{failed}, continued at {recovery['restored_iteration']}, "
        f"{recovery['outcome']}"
    )
    found: dict[str, list[int]] = {}  # what warnings do not say already
    for one in plan.get("repeated_steps", []):
        if one["result"] != "not restored":
            found.setdefault(one["message"], []).append(one["rank"])
    return [line, *(f"repeated steps of {ranks_named(ranks)}: {escape(said)}" for said, ranks in found.items())]


def _duration(seconds: float) -> str:
    if seconds >= HOUR_SECONDS:
        return f"{seconds / HOUR_SECONDS:.1f} h"
    return f"{seconds / MINUTE_SECONDS:.1f} min" if seconds >= MINUTE_SECONDS else f"{seconds:.3g} s"
