"""Where a check runs: the device, the ranks, the folder, the jobs, and the kill by which a rank ends itself."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpsr.qualify.cells import Cell
from cpsr.qualify.torch_jobs import TinyLM, torch_job

__all__ = ["Scene"]

WAIT_SECONDS = 60.0  # for what another rank or thread does at once
POLL_SECONDS = 0.005
KILLED = "killed.json"


@dataclass(frozen=True)
class Scene:
    """Where a check runs.

    Attributes:
        device: of this rank.
        rank: of this process.
        ranks: their number.
        local_ranks: those on this machine.
        folder: of this check alone, the same on all ranks.
    """

    device: torch.device
    rank: int
    ranks: int
    local_ranks: int
    folder: Path

    @property
    def killed(self) -> bool:
        """Whether a rank has killed itself in this check: then this is the life after."""
        return (self.folder / KILLED).exists()

    def kill_myself(self, iteration: int) -> None:
        """Record the kill in the folder, and end by SIGKILL."""
        (self.folder / KILLED).write_text(json.dumps({"rank": self.rank, "iteration": iteration}), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for a state of the job.

        Raises:
            AssertionError: it is not reached in time; `what` names it.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while not reached():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} within {WAIT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def builder(
        self, cell: Cell, micro_batches: int, schedule: str = "none", model: Callable[[], nn.Module] = TinyLM
    ) -> Callable[[], Any]:
        """What makes a new job of a cell here; see `torch_job` and `deepspeed_job`."""
        if cell.zero is None:
            return partial(torch_job, cell, self.device, self.ranks, micro_batches, schedule, model)
        from cpsr.qualify.deepspeed_jobs import deepspeed_job

        return partial(deepspeed_job, cell, self.ranks, micro_batches, schedule, model)
