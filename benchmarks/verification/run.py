"""`cpsr bench verification`: bits that flip in one rank, the verdicts on them, and what a repeated step costs."""

from collections import Counter
from pathlib import Path
from shutil import rmtree
from typing import Any

from cpsr.benchmarks.harness.intervals import median_interval
from cpsr.benchmarks.harness.measurement import interval_text, measuring
from cpsr.benchmarks.harness.ranks import run_ranks
from cpsr.benchmarks.verification.faults import KINDS

__all__ = ["main"]

LAYOUTS = ("plain", "ddp", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16")
RANKS = 3  # the fewest of which one can be told to be wrong
SOUND = 70
ROUNDS = 4
DEFAULT_SECONDS = 160.0
COST_JOBS = (("plain", 1), ("zero1", 2))
INTERVALS = (100, 500, 1000, 2000, 5000)  # iterations between two verifications, in the table
BUDGET = 0.002


def main(
    json_path: Path | None = None,
    rounds: int = ROUNDS,
    workdir: Path | None = None,
    sound: int = SOUND,
    default_seconds: float = DEFAULT_SECONDS,
) -> None:
    """Measure, print the tables, and write the JSON file.

    Args:
        json_path: where the figures go.
        rounds: faults of each kind in each job.
        workdir: holds the work folder.
        sound: repeated steps without a fault in each job, beside one before each fault.
        default_seconds: of each training with the default budget.
    """
    kinds = [(kind, persistent) for persistent in (False, True) for kind in KINDS] * rounds
    with measuring("verification", json_path, workdir) as call:
        advance = call.bar("jobs", len(LAYOUTS) * len(PRECISIONS) + len(COST_JOBS))
        jobs = []
        for number, (layout, precision) in enumerate((one, other) for one in LAYOUTS for other in PRECISIONS):
            options = {"layout": layout, "precision": precision, "kinds": kinds, "clean": sound, "seed": number}
            jobs += _job(call.directory, "verification.job", 1 if layout == "plain" else RANKS, **options)
            advance()
        costs = []
        for layout, ranks in COST_JOBS:
            costs += _job(call.directory, "verification.cost", ranks, layout=layout, default_seconds=default_seconds)
            advance()
        rows = [
            {"layout": job["layout"], "precision": job["precision"], **_outcome(row)}
            for job in jobs
            for row in job["rows"]
        ]
        verdicts = [verdict for job in jobs for verdict in job["sound"]]
        alarms = sum(verdict is not None and verdict["kind"] != "verified" for verdict in verdicts)
        repeated = sum(verdict is not None for verdict in verdicts)
        call.table(
            f"{len(rows)} flipped bits, by where and how often",
            ("", "flipped", "without effect", "found", "on the right rank", "not found"),
            _counted(rows),
        )
        call.console.print(f"{repeated} repeated steps without a fault: {alarms} false alarms")
        call.table(
            "A repeated step, and its share of the training by the iterations between two",
            ("", "step, ms", "repeated, ms", "in steps", *map(str, INTERVALS)),
            [_cost_row(cost) for cost in costs],
        )
        aims = {
            "no false alarm in 1,000 repeated steps": alarms == 0 and repeated >= 1000,
            "each bit found that flips once in a repeated step": not _missed(rows, persistent=False),
            f"at most {BUDGET:.1%} of the training by default": all(
                cost["spent_seconds"] <= BUDGET * cost["trained_seconds"] for cost in costs
            ),
        }
        call.judge(aims)
        call.leave({"rows": rows, "sound_steps": repeated, "false_alarms": alarms, "costs": costs, "aims": aims})


def _job(directory: Path, module: str, ranks: int, **options: Any) -> list[Any]:
    folder = directory / "job"
    folder.mkdir()
    try:
        return run_ranks(module, folder, ranks, **options)
    finally:
        rmtree(folder)


def _outcome(row: dict[str, Any]) -> dict[str, Any]:
    """A fault, and what came of it."""
    fault, verdict = row["fault"], row["verdict"]
    found = verdict is not None and verdict["kind"] == "wrong"
    # Flipped once in a step, it has no effect where the repetition comes to the same bits: in memory, outputs,
    # gradients and the state after the step. A bit that is stuck may have the right value.
    same = verdict is not None and verdict["kind"] == "verified"
    without_effect = not row["changes"] or (same and not fault["persistent"])
    return {
        **fault,
        "found": found,
        "located": found and list(verdict["ranks"]) == [fault["rank"]],
        "without_effect": without_effect,
        "where": verdict["where"] if found else None,
        "tried": row["tried"],
    }


def _counted(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each kind of fault, alone and with data parallelism."""
    table = []
    for parallel in (False, True):
        for persistent in (False, True):
            for kind in KINDS:
                chosen = [
                    row
                    for row in rows
                    if (row["kind"], row["persistent"], row["layout"] != "plain") == (kind, persistent, parallel)
                ]
                count = Counter(name for row in chosen for name in ("found", "located", "without_effect") if row[name])
                name = f"{kind}, {'each time' if persistent else 'once'}, {RANKS if parallel else 1} ranks"
                missed = sum(not row["found"] and not row["without_effect"] for row in chosen)
                counts = len(chosen), count["without_effect"], count["found"], count["located"], missed
                table.append((name, *map(str, counts)))
    return table


def _missed(rows: list[dict[str, Any]], *, persistent: bool) -> list[dict[str, Any]]:
    return [row for row in rows if row["persistent"] == persistent and not row["found"] and not row["without_effect"]]


def _cost_row(cost: dict[str, Any]) -> tuple[str, ...]:
    step, repeated = median_interval(cost["step_seconds"]), median_interval(cost["repeated_seconds"])
    shares = [f"{repeated.value / (iterations * step.value):.2%}" for iterations in INTERVALS]
    name = f"{cost['layout']}, {cost['parameters'] / 1e6:.1f}M parameters, {cost['ranks']} rank(s)"
    milliseconds = interval_text(step, 1e3, 1), interval_text(repeated, 1e3, 0)
    return name, *milliseconds, f"{repeated.value / step.value:.1f}", *shares
