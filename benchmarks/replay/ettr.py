"""ETTR by the simulator, from what the comparison has measured: windows beside checkpoints at others' intervals."""

import statistics
from collections.abc import Mapping
from typing import Any

from cpsr.benchmarks.harness.measurement import Measurement
from cpsr.benchmarks.replay.compared import CONTROL, DENSE, STALE, WAYS, WINDOW, WINDOWS
from cpsr.benchmarks.simulate.rivals import gemini
from cpsr.benchmarks.simulate.simulation import Checkpoints, Failures, Job, Recovery, System, simulate
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.policies import young

__all__ = ["AIM", "simulated", "systems", "windows_of"]

AIM = 0.97  # at the shortest time between failures
MTBF_MINUTES = (10, 30, 60, 120)
WALL_SECONDS = 12 * 3600.0  # as of the paper's runs
RUNS, SEED = 1000, 0
ASSUMED_RESTART_SECONDS = 60.0  # of a large job: its launcher, imports and collectives; nobody has measured it here


def simulated(
    call: Measurement, comparison: Mapping[str, Any], ratios: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """ETTR at each time between failures, with measured restarts and with an assumed one; prints the table.

    Args:
        call: of the benchmark.
        comparison: what `compare` returned.
        ratios: of steps with windows, in the job of one process, where these costs were measured.
    """
    found = []
    iteration_seconds = _step_seconds(comparison, CONTROL)
    for minutes in MTBF_MINUTES:
        for name, (system, restart_seconds) in systems(comparison, ratios, 60.0 * minutes).items():
            for kind, seconds in (("measured", restart_seconds), ("assumed", ASSUMED_RESTART_SECONDS)):
                job = Job(iteration_seconds, WALL_SECONDS, restart_seconds=seconds)
                outcome = simulate(job, system, Failures(60.0 * minutes), RUNS, SEED)
                ettr, error = outcome.mean_and_error(outcome.ettr)
                found.append(
                    {
                        "system": name,
                        "mtbf_minutes": minutes,
                        "interval_iterations": system.checkpoints.interval_iterations,
                        "restart": kind,
                        "restart_seconds": seconds,
                        "ettr": ettr,
                        "standard_error": error,
                    }
                )
    _show(call, found)
    return found


def systems(
    comparison: Mapping[str, Any], ratios: Mapping[str, Any] | None, mtbf_seconds: float
) -> dict[str, tuple[System, float]]:
    """What is simulated, by name, each with the seconds of its restarts, from the last step to the first one after."""
    step, dense, stale = (
        _step_seconds(comparison, CONTROL),
        comparison["checkfreq"][DENSE],
        comparison["checkfreq"][STALE],
    )
    down = {way: [one for run in comparison["ways"][way]["down_seconds"] for one in run] for way in WAYS}
    restart = {way: statistics.median(seconds) for way, seconds in down.items()}
    stall, persist = dense["stall_seconds"], dense["persist_seconds"]
    by_young = young(PlannerInputs(step, stall, persist, 1 / mtbf_seconds)).interval_iterations
    # Gemini's copies go to memory: no time until they are durable, and the stall of a checkpoint at the most.
    by_gemini = gemini(PlannerInputs(step, stall, 0.0, 1 / mtbf_seconds)).interval_iterations
    checkpoints = {
        # A window is whole when the next one begins, and is replayed from its first iteration.
        **{
            name: (Checkpoints(length, overhead * length * step, length * step), WINDOWS)
            for name, (length, overhead) in windows_of(comparison, ratios).items()
        },
        "gemini": (Checkpoints(by_gemini, stall), WINDOWS),
        "young": (Checkpoints(max(by_young, int(persist / step) + 1), stall, persist), DENSE),
        "checkfreq": (Checkpoints(dense["interval_iterations"], stall, persist), DENSE),
        "stale": (
            Checkpoints(stale["interval_iterations"], stale["stall_seconds"], stale["persist_seconds"]),
            STALE,
        ),
    }
    return {name: (System(name, one, Recovery()), restart[way]) for name, (one, way) in checkpoints.items()}


def windows_of(comparison: Mapping[str, Any], ratios: Mapping[str, Any] | None) -> dict[str, tuple[int, float]]:
    """Iterations of windows and the share by which they lengthen a step, 0 where they did not.

    Of the comparison, and of the job of one process whose costs were measured, if they were.
    """
    own = _step_seconds(comparison, WINDOWS) / _step_seconds(comparison, CONTROL) - 1
    alone = {
        f"{name}, one process": (int(name.rpartition(" ")[2]), max(one["value"] - 1, 0.0))
        for name, one in (ratios or {}).items()
        if name.startswith("windows of ")
    }
    return {WINDOWS: (WINDOW, max(own, 0.0)), **alone}


def _step_seconds(comparison: Mapping[str, Any], way: str) -> float:
    return float(statistics.median(comparison["ways"][way]["step_seconds"]))


def _show(call: Measurement, found: list[dict[str, Any]]) -> None:
    rows = []
    for name, kind in dict.fromkeys((one["system"], one["restart"]) for one in found):
        own = [one for one in found if (one["system"], one["restart"]) == (name, kind)]
        cells = (f"{one['ettr']:.4f} (every {one['interval_iterations']})" for one in own)
        rows.append((name, f"{own[0]['restart_seconds']:.1f} s, {kind}", *cells))
    headings = ("system", "restart", *(f"{minutes} min" for minutes in MTBF_MINUTES))
    call.table("ETTR, simulated from the figures above (12 h, 1000 runs)", headings, rows)
    for one in found:
        shortest = (one["mtbf_minutes"], one["restart"]) == (MTBF_MINUTES[0], "measured")
        if one["system"].startswith("windows") and shortest:
            what = f"{one['system']} at {MTBF_MINUTES[0]} minutes: {one['ettr']:.4f}, aim {AIM:g}"
            call.judge({what: one["ettr"] >= AIM})
