"""A rank of `cpsr qualify` whose checks pass, fail beside a killed rank, fail on one rank, and hang, in this order."""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cpsr.qualify import worker
from cpsr.qualify.cells import Cell
from cpsr.qualify.checks import Check, Trial
from cpsr.qualify.command import write_so_far
from cpsr.qualify.scene import KILLED, Scene

DEADLINE_SECONDS = 1.0
CELL = Cell("ddp", None, "fp32", "sgd")


def passes(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    dist.barrier()
    return {"rank": scene.rank}


def fails_on_one_rank(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    if scene.rank == 1:
        raise AssertionError("weights differ by 0.25")
    dist.barrier()  # in which the other rank never arrives
    return {}


def hangs(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    time.sleep(300)
    return {}


def goes_on_beside_a_killed_rank(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """As the ranks that are left see it; nobody ends here, which would take another life of the job."""
    if not scene.killed:
        dist.barrier()
        (scene.folder / KILLED).write_text("{}", encoding="utf-8")
        raise AssertionError("the training continued")
    return {}


CHECKS = [
    Check("first", passes),
    Check("after a kill", goes_on_beside_a_killed_rank, kills=True),
    Check("on one rank", fails_on_one_rank),
    Check("for ever", hangs, deadline_seconds=DEADLINE_SECONDS),
    Check("last", passes),
]


def plan(folder: Path, ranks: int, stages_can_send: bool, restarted: bool) -> list[Trial]:
    """Keeps the result that the life before has left, as a user finds it if the launcher gives up."""
    assert restarted
    result = folder / "qualify.json"
    if result.exists() and dist.get_rank() == 0:
        result.rename(folder / f"left-{len(list(folder.glob('left-*')))}")
    return [*(Trial(check, CELL) for check in CHECKS), Trial(Check("never", passes), CELL, "needs 3 ranks")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    worker.MEETING_SECONDS = 0.5
    rank = worker.Rank(arguments.folder, arguments.device)
    rank.run(partial(plan, arguments.folder), partial(write_so_far, arguments.folder, arguments.device, "log"))
    worker.leave(0)
