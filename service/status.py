"""`cpsr status`: the state of a run in a few lines, from its directory or from a service."""

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cpsr.checkpoint.memory_owners import runs_in_memory
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.errors import RunMismatchError, ServiceError
from cpsr.ranks.exits import ranks_named
from cpsr.service.access import TOKEN_VARIABLE
from cpsr.service.client import Client
from cpsr.service.plan import plan_of
from cpsr.service.run import health_of, identity_of

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
RIVALS_SHOWN = ("young", "daly")
ORPHANED = ("gone", "unclear", "unknown")  # as `cpsr release --orphans` lists them
ENDINGS = {"clean": ", it has ended", "sigterm": ", it has left after SIGTERM"}


def run_status(location: str, run: str | None, as_json: bool) -> bool:
    """Print the state of a run.

    Returns:
        Whether the steps that its newest exact restart has repeated were restored, as far as they were compared.

    Args:
        location: a run directory, or the URL of a service; its token is taken from the environment.
        run: name of the run, where the service is over several.
        as_json: print one JSON object with `health`, `plan` and `memory`. `plan` is null before the first one.
            `memory` is what the run holds of this machine's memory, and what others do whose directory is gone, or may
            be. It is null from a service, which may be on another machine.

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
    for line in [*_lines(found["health"], found["plan"]), *_memory_lines(found["memory"])]:
        console.print(line, soft_wrap=not console.is_terminal)
    return _is_restored(found["plan"])


def _is_restored(plan: dict[str, Any] | None) -> bool:
    return plan is None or all(one["result"] != "not restored" for one in plan["repeated_steps"])


def _of_directory(run_dir: Path) -> dict[str, Any]:
    if not (run_dir / "journal.db").exists():
        raise RunMismatchError(f"{run_dir} is no run directory (no journal.db in it); name the run_dir of the training")
    plan = plan_of(run_dir)
    return {
        "health": health_of(run_dir).model_dump(mode="json"),
        "plan": None if plan is None else plan.model_dump(mode="json"),
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
        found = {"health": client.health(), "plan": None, "memory": None}
        try:
            return found | {"plan": client.plan()}
        except ServiceError as error:
            if error.code != "no_plan_yet":
                raise
            return found


def _lines(health: dict[str, Any], plan: dict[str, Any] | None) -> list[str]:
    well = health["status"] == "ok"
    state = "[green]ok[/]" if well else f"[red]degraded[/]: {escape(str(health['reason']))}"
    state += ENDINGS.get(health["life"], "")
    at = "no step yet" if health["last_iteration"] is None else f"iteration {health['last_iteration']}"
    name = "run" if plan is None or plan["run_id"] is None else f"run {escape(plan['run_id'])}"
    lines = [f"{name}: {state}, {at}{'' if plan is None else _ranks(plan)}"]
    if plan is None:
        return [*lines, "no plan yet"]
    lines += [*_ettr_lines(plan), _plan_line(plan)]
    if plan["override"] is not None:
        lines.append(_override_line(plan["override"]))
    rivals = plan["explanation"].get("rivals", {})
    shown = [f"{name} {rivals[name]['interval_iterations']}" for name in RIVALS_SHOWN if name in rivals]
    if shown:
        lines.append(f"others would choose: {', '.join(shown)}")
    lines += [_checkpoint_line(plan), *_recovery_lines(plan)]
    if plan["descends_from_predicted"]:
        lines.append("[yellow]the state descends from a predicted one, or from one that was restored in part[/]")
    return lines + [f"[yellow]{escape(warning)}[/]" for warning in plan["warnings"]]


def _ranks(plan: dict[str, Any]) -> str:
    """How many ranks the run has, and had before."""
    sizes = plan["sizes"]
    now = sizes[-1]["ranks"] if sizes else plan["world_size"]
    if now is None:
        return ""
    count = f", {now} rank{'s' * (now > 1)}"
    if len(sizes) < 2:
        return count
    before = [f"{one['ranks']} since {one['since_iteration']}" for one in sizes[-1 - SIZES_SHOWN : -1]]
    return f"{count} since iteration {sizes[-1]['since_iteration']} (before: {', '.join(before)})"


def _ettr_lines(plan: dict[str, Any]) -> list[str]:
    found = plan["ettr"]
    if found is None or found["ettr"] is None:
        return []
    line = f"effective training time: {found['ettr']:.1%} of {_duration(found['wall_seconds'])}"
    line += ", [red]down now[/]" if found["state"] == "down" else ""
    shares = [(name, found[f"{part}_seconds"] / found["wall_seconds"]) for part, name in LOST.items()]
    lost = [f"{name} {share:.1%}" for name, share in shares if share >= SHARE_SHOWN]
    return [line, f"the rest: {', '.join(lost)}"] if lost else [line]


def _plan_line(plan: dict[str, Any]) -> str:
    seconds, memory = plan["interval_seconds"], plan["memory_interval_iterations"]
    took = "" if seconds is None else f" ({_duration(seconds)})"
    took += "" if memory is None else f", in memory every {memory}"
    way = plan["explanation"].get("expected", {}).get("failure", plan["recovery_mode"])
    mode = "" if plan["recovery_mode"] is None else f", after a failure: {way}"
    bound = plan["explanation"].get("bound", "none")
    bound = "" if bound == "none" else f", bound: {bound}"
    phase = "" if plan["phase"] is None else f", phase {plan['phase']['phase']}"
    every = plan["interval_iterations"]
    return f"a checkpoint every {every} iterations{took}, by {escape(plan['origin'])}{bound}{phase}{mode}"


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
    for one in plan["repeated_steps"]:
        if one["result"] != "not restored":
            found.setdefault(one["message"], []).append(one["rank"])
    return [line, *(f"repeated steps of {ranks_named(ranks)}: {escape(said)}" for said, ranks in found.items())]


def _duration(seconds: float) -> str:
    if seconds >= HOUR_SECONDS:
        return f"{seconds / HOUR_SECONDS:.1f} h"
    return f"{seconds / MINUTE_SECONDS:.1f} min" if seconds >= MINUTE_SECONDS else f"{seconds:.3g} s"
