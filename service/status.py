"""`cpsr status`: the state of a run in a few lines, from its directory."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cpsr.checkpoint.memory_owners import runs_in_memory
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.errors import RunMismatchError
from cpsr.ranks.exits import ranks_named
from cpsr.service.plan import plan_of
from cpsr.service.run import RECENT_STEPS, health_of, iteration_seconds, open_journal, run_id_of

__all__ = ["effective_time_ratio", "run_status"]

HOUR_SECONDS, MINUTE_SECONDS = 3600.0, 60.0
ORPHANED = ("gone", "unclear", "unknown")  # as `cpsr release --orphans` lists them
IN_ORDER = ("clean", "sigterm")
ENDINGS = {"clean": ", it has ended", "sigterm": ", it has left after SIGTERM"}


def run_status(run_dir: Path, as_json: bool) -> bool:
    """Print the state of a run.

    Returns:
        Whether the steps that its newest exact restart has repeated were restored, as far as they were compared.

    Args:
        run_dir: of the run.
        as_json: print one JSON object with `health`, `plan` (null before the first one), `ettr`, and `memory`: what the
            run holds of this machine's memory, and what others do whose directory is gone, or may be.

    Raises:
        RunMismatchError: there is no run in the directory.
        JournalError: its journal cannot be read.
    """
    if not (run_dir / "journal.db").exists():
        raise RunMismatchError(f"{run_dir} is no run directory (no journal.db in it); name the run_dir of the training")
    plan = plan_of(run_dir)
    found: dict[str, Any] = {
        "health": health_of(run_dir).model_dump(mode="json"),
        "plan": None if plan is None else plan.model_dump(mode="json"),
        "ettr": effective_time_ratio(run_dir),
        "memory": _memory_here(run_dir),
    }
    if as_json:
        print(json.dumps(found, allow_nan=False))  # noqa: T201
        return _is_restored(found["plan"])
    console = Console(highlight=False)
    for line in [*_lines(found["health"], found["plan"], found["ettr"]), *_memory_lines(found["memory"])]:
        console.print(line, soft_wrap=not console.is_terminal)
    return _is_restored(found["plan"])


def effective_time_ratio(run_dir: Path) -> float | None:
    """ETTR: what the trained iterations take at their recent pace, over the wall time; None before a step.

    Iterations up to the newest one count, each once, and none that was trained before the journal began. The wall time
    begins with the first life and goes on while the job is down. It excludes pauses, which are between a life that
    ended in good order and the next. What CPSR adds to each step counts as useful.

    Source: MoEvement (arXiv:2412.15411), section 2.4.

    Raises:
        JournalError: the journal cannot be read.
    """
    with open_journal(run_dir) as reader:
        steps, lives, trained = reader.recent_steps(RECENT_STEPS), reader.lives(), reader.trained_iterations()
    seconds = iteration_seconds(steps)
    if seconds is None or not lives:
        return None
    until = lives[-1].ended_unix_seconds if lives[-1].ending in IN_ORDER else None
    wall_seconds = (time.time() if until is None else until) - lives[0].started_unix_seconds
    for life, later in pairwise(lives):
        if life.ending in IN_ORDER and life.ended_unix_seconds is not None:
            wall_seconds -= later.started_unix_seconds - life.ended_unix_seconds
    return min(1.0, trained * seconds / wall_seconds) if wall_seconds > 0 else None


def _is_restored(plan: dict[str, Any] | None) -> bool:
    return plan is None or all(one["result"] != "not restored" for one in plan["repeated_steps"])


def _memory_here(run_dir: Path) -> dict[str, Any]:
    own = run_id_of(run_dir)
    found = runs_in_memory(SHARED_MEMORY)
    orphans = [run for run in found if run.run_id != own and run.standing in ORPHANED]
    return {
        "bytes": sum(run.bytes for run in found if run.run_id == own),
        "orphaned_runs": len(orphans),
        "orphaned_bytes": sum(run.bytes for run in orphans),
    }


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    lines = [f"host memory of this machine: {memory['bytes'] / 1e6:,.1f} MB"] if memory["bytes"] else []
    if count := memory["orphaned_runs"]:
        which = "1 run whose directory is" if count == 1 else f"{count} runs whose directories are"
        size = f"{memory['orphaned_bytes'] / 1e6:,.1f} MB"
        lines.append(f"{which} gone, or not in sight, left {size} of it as well: cpsr release --orphans")
    return lines


def _lines(health: dict[str, Any], plan: dict[str, Any] | None, ettr: float | None) -> list[str]:
    well = health["status"] == "ok"
    state = "[green]ok[/]" if well else f"[red]degraded[/]: {escape(str(health['reason']))}"
    state += ENDINGS.get(health["life"], "")
    at = "no step yet" if health["last_iteration"] is None else f"iteration {health['last_iteration']}"
    name = "run" if plan is None or plan["run_id"] is None else f"run {escape(plan['run_id'])}"
    ranks = None if plan is None else plan["ranks"]
    lines = [f"{name}: {state}, {at}" + ("" if ranks is None else f", {ranks} rank{'s' * (ranks > 1)}")]
    if plan is None:
        return [*lines, "no plan yet"]
    lines += [] if ettr is None else [f"effective training time: {ettr:.1%}"]
    lines.append(_plan_line(plan))
    if plan["override"] is not None:
        lines.append(_override_line(plan["override"]))
    lines += [_checkpoint_line(plan), *_recovery_lines(plan)]
    if plan["descends_from_predicted"]:
        lines.append("[yellow]the state descends from a predicted one, or from one that was restored in part[/]")
    warnings = [*(one["message"] for one in plan["slow_ranks"]), *plan["warnings"]]
    return lines + [f"[yellow]{escape(warning)}[/]" for warning in warnings]


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
    left = _duration(max(0.0, override["expires_unix_seconds"] - time.time()))
    taken = "" if override["taken_up"] else ", not applied yet"
    return f"override: {override['interval_iterations']} iterations for {left}{taken} ({escape(override['reason'])})"


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
