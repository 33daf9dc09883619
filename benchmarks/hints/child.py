"""One run of a function in a process of its own, which can be killed.

    python -m cpsr.benchmarks.hints.child NAME ROUNDS RUN_DIR ALLOWANCE [--forget]

Prints a line when the function begins, and one with what was measured when it has ended. An allowance of 0 is the plain
function. `--forget` goes on without the saved random states, as a control of the comparison.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import torch

from cpsr.benchmarks.hints.work import WORK, arguments, digest, times
from cpsr.hints import call, resumable

__all__ = ["main"]


def main(name: str, rounds: int, run_dir: Path, allowance: float, *, forget: bool) -> None:
    """Run it, and print the two lines."""
    torch.set_num_threads(1)
    if forget:
        setattr(call, "restore_host_rng", lambda state: None)  # noqa: B010 - it is imported there
    given, function = arguments(name, rounds), WORK[name]
    run = resumable(run_dir, allowance)(function) if allowance else None
    print("begun", flush=True)  # noqa: T201
    began = perf_counter()
    result = function(**given) if run is None else run(**given)
    seconds = perf_counter() - began
    report = None if run is None else run.report
    line = {
        "seconds": seconds,
        "digest": digest(result),
        "hints": [at - began for at in times()],
        "resumed_from": None if report is None else report.resumed_from,
        "own_seconds": seconds if report is None else report.own_seconds,
        "checkpoint_seconds": 0.0 if report is None else report.checkpoint_seconds,
        "checkpoints": [] if report is None else list(report.checkpoints),
    }
    print(json.dumps(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    name_, rounds_, run_dir_, allowance_, *more = sys.argv[1:]
    main(name_, int(rounds_), Path(run_dir_), float(allowance_), forget="--forget" in more)
