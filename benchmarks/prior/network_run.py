"""`cpsr bench network`: pretrain the predictor's network on the prior's runs, and judge it on those left out."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.files import write_tensors
from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.prior.network import INTERVALS, SEED, STEPS, judge, pretrained, windows_of
from cpsr.benchmarks.prior.network_report import draw, show
from cpsr.benchmarks.prior.runs import RUNS, PriorRun
from cpsr.predictor.examples import Windows

__all__ = ["folds", "main"]


def main(
    cache: Path,
    workers: int = 1,
    weights: Path | None = None,
    json_path: Path | None = None,
    *,
    runs: Sequence[PriorRun] = RUNS,
) -> None:
    """Pretrain, judge, print, and write the weights where that is asked for.

    Args:
        cache: keeps the runs and what was judged; an interrupted call goes on from there.
        workers: processes, of one thread each.
        weights: where a network goes that is pretrained on all runs; None: none is.
        json_path: where the figures go; the plot is put beside it.
        runs: that are trained on, and judged without their group.

    Raises:
        CPSRError: the cache is damaged.
    """
    with measuring("network", json_path, place=cache, timed=False) as call, Workers(workers) as pool:
        reading = call.progress.add_task("runs read", total=len(runs))
        taken = windows_of(runs, cache, pool, lambda done: call.progress.update(reading, completed=done))
        if weights is not None:
            head = pretrained(_joined(taken, runs))
            source = {"source": json.dumps(_source(taken))}
            write_tensors(weights, {"parameters": head.parameters.detach()}, source)
            call.console.print(f"weights: {weights}")
        left_out = folds(runs)
        heads = {
            name: pretrained(_joined(taken, [run for run in runs if run not in mine]))
            for name, mine in left_out.items()
        }
        judging = call.progress.add_task("runs judged", total=len(runs))
        found = judge(left_out, heads, cache, pool, lambda done: call.progress.update(judging, completed=done))
        show(call.console, found)
        shipped = {} if weights is None else {"weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
        figures = {"data": _source(taken), **shipped, "judged": [asdict(one) for one in found]}
        call.leave(figures, draw(found, call.machine))


def folds(runs: Sequence[PriorRun]) -> dict[str, list[PriorRun]]:
    """The runs that are left out together: those of a group, or of a schedule where all are of one group."""
    by_group = {run.group for run in runs}
    found: dict[str, list[PriorRun]] = {}
    for run in runs:
        found.setdefault(run.group if len(by_group) > 1 else run.workload.schedule, []).append(run)
    return found


def _joined(taken: Mapping[PriorRun, Sequence[Windows]], runs: Sequence[PriorRun]) -> list[Windows]:
    return [window for run in runs for window in taken[run]]


def _source(taken: Mapping[PriorRun, Sequence[Windows]]) -> dict[str, Any]:
    """What a network was pretrained on."""
    return {
        "made_by": "cpsr bench network",
        "target": "later motion",
        "runs": {run.workload.name: run.seed for run in taken},
        "intervals": list(INTERVALS),
        "windows": sum(map(len, taken.values())),
        "steps": STEPS,
        "seed": SEED,
    }
