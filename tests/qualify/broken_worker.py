"""A rank of `cpsr qualify` whose checks pass, fail beside a killed rank, fail on one rank, and hang, in this order."""

import sys
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

from cpsr.qualify import ranks
from cpsr.qualify.cells import KILLED, Cell, Scene
from cpsr.qualify.checks import Check, Trial
from cpsr.qualify.command import write_so_far

DEADLINE_SECONDS = 1.0
CELL = Cell("ddp", None, "fp32")


def passes(cell: Cell, scene: Scene) -> None:
    dist.barrier()


def fails_on_one_rank(cell: Cell, scene: Scene) -> None:
    if scene.rank == 1:
        raise AssertionError("weights differ by 0.25")
    dist.barrier()  # in which the other rank never arrives


def hangs(cell: Cell, scene: Scene) -> None:
    time.sleep(300)


def goes_on_beside_a_killed_rank(cell: Cell, scene: Scene) -> None:
    """As the ranks that are left see it; nobody ends here, which would take another life of the job."""
    if not scene.killed:
        dist.barrier()
        (scene.folder / KILLED).write_text("{}", encoding="utf-8")
        raise AssertionError("the training continued")


TRIALS = [
    Trial(check, CELL)
    for check in (
        Check("first", passes),
        Check("after a kill", goes_on_beside_a_killed_rank, kills=True),
        Check("on one rank", fails_on_one_rank),
        Check("for ever", hangs, deadline_seconds=DEADLINE_SECONDS),
        Check("last", passes),
    )
]


def main(folder: Path, device: str) -> None:
    """Keeps the result that the life before has left, as a user finds it if the launcher gives up."""
    ranks.MEETING_SECONDS = 0.5
    rank = ranks.Rank(folder, device)
    result = folder / "qualify.json"
    if result.exists() and rank.rank == 0:
        result.rename(folder / f"left-{len(list(folder.glob('left-*')))}")
    rank.run(TRIALS, partial(write_so_far, folder, device))
    ranks.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
