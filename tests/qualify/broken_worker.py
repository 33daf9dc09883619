"""A rank of `cpsr qualify` whose checks pass, fail on one rank, and hang, in this order, and pass at the end."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cpsr.qualify import worker
from cpsr.qualify.cells import Cell
from cpsr.qualify.scene import Scene
from cpsr.qualify.trials import Check, NotApplicable, Trial

DEADLINE_SECONDS = 4.0
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


CHECKS = [
    Check("first", passes),
    Check("on one rank", fails_on_one_rank),
    Check("for ever", hangs, deadline_seconds=DEADLINE_SECONDS),
    Check("last", passes),
]


def plan(ranks: int, stages_can_send: bool, restarted: bool) -> worker.Plan:
    assert restarted
    never = NotApplicable(Trial(Check("never", passes), CELL), "needs 3 ranks")
    return [Trial(check, CELL) for check in CHECKS], [never]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    worker.MEETING_SECONDS = 2.0
    worker.Rank(arguments.folder, arguments.device).run(plan)
    worker.leave(0)
