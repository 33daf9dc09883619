"""`cpsr bench tune`: the peak rate at which each workload of the recovery benchmark ends best."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cpsr.benchmarks.harness.machine import machine_text
from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.workload import RATE_STEP
from cpsr.benchmarks.tune.report import draw, plain, show
from cpsr.benchmarks.tune.space import Setting
from cpsr.benchmarks.tune.sweep import sweep

__all__ = ["CACHE", "main"]

CACHE = Path("runs/bench-tune")


def main(
    chosen: Sequence[Setting],
    seeds: int,
    cache: Path = CACHE,
    json_path: Path | None = None,
    workers: int = 1,
    device: str = "cpu",
) -> None:
    """Sweep, print, draw and write.

    Args:
        chosen: what to tune.
        seeds: trainings at each rate.
        cache: keeps every training; an interrupted call goes on from there.
        json_path: where the figures go, with the plot beside it.
        workers: processes, of one thread each.
        device: `cpu` or `cuda`.

    Raises:
        CPSRError: the best rate of a setting lies at the limit of what is tried.
    """
    with measuring("tune", json_path, place=cache.parent, timed=False, device=device) as call:
        call.machine.update(torch_threads=1, workers=workers)
        bar = call.progress.add_task("trainings", total=None)
        with Workers(workers) as pool:
            found = sweep(
                chosen,
                seeds,
                cache,
                device,
                pool,
                lambda done, total: call.progress.update(bar, completed=done, total=total),
            )
        show(call.console, found)
        call.console.print(machine_text(call.machine))
        figures = {"rate_step": RATE_STEP, "seeds": seeds, "chosen": [asdict(one) for one in chosen]}
        call.leave(figures | {"settings": plain(found)}, draw(found, call.machine))
