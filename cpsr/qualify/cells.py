"""What a check runs with: an engine with its ZeRO stage, precision and optimizer, on the ranks of this job."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

__all__ = ["STAGES", "Cell", "Scene", "cells_of", "no_cpu_sharding"]

PRECISIONS = ("fp32", "bf16", "fp16")
STAGES = 2  # of a pipeline
WAIT_SECONDS = 60.0  # for what another rank or thread does at once
POLL_SECONDS = 0.005
KILLED = "killed.json"


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        engine: `torch` (each rank by itself), `ddp`, `fsdp2`, `tp` (tensor parallelism), `deepspeed`, `mixture`
            (DeepSpeed with experts) or `pipeline`.
        zero: stage of ZeRO; None outside DeepSpeed.
        precision: `fp32`, `bf16`, or `fp16`, which in plain torch is autocast with a gradient scaler; `bf16` of FSDP2
            is that of forward and backward.
        optimizer: as for `torch_jobs.optimizer_of`.
    """

    engine: str
    zero: int | None
    precision: str
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """The parts in one line, as in `deepspeed zero1 bf16 adamw`."""
        zero = "" if self.zero is None else f"zero{self.zero} "
        return f"{self.engine} {zero}{self.precision} {self.optimizer}"

    @property
    def is_split(self) -> bool:
        """Whether parameters are DTensors, which torch splits over ranks."""
        return self.engine in ("fsdp2", "tp")

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has all of the weights and moments."""
        return self.zero in (None, 0) and not self.is_split


def cells_of(device: str, ranks: int, stages_can_send: bool) -> Iterator[Cell]:
    """Every cell that this job can run; pipelines are the last, since they change DeepSpeed's groups.

    Args:
        device: `cpu` or `cuda`.
        ranks: of the job.
        stages_can_send: whether the backend sends tensors of the device from rank to rank: gloo does not for CUDA.
    """
    engine = "ddp" if ranks > 1 else "torch"
    yield from (Cell(engine, None, precision) for precision in PRECISIONS)
    if ranks > 1 and stages_can_send:
        if device != "cpu" or not no_cpu_sharding():
            yield from (Cell("fsdp2", None, precision) for precision in ("fp32", "bf16"))
        yield Cell("tp", None, "fp32")
    yield from (Cell("deepspeed", stage, precision) for stage in range(4) for precision in PRECISIONS)
    if device != "cpu":
        from torch.utils.cpp_extension import CUDA_HOME

        yield Cell(engine, None, "fp32", "adamw-fused")
        if CUDA_HOME is not None:  # DeepSpeed compiles it
            yield Cell("deepspeed", 1, "bf16", "fused")
    yield from (Cell("mixture", stage, precision) for stage, precision in enumerate(PRECISIONS))
    if ranks % STAGES == 0 and stages_can_send:
        yield from (Cell("pipeline", 0, "fp32"), Cell("pipeline", 1, "bf16"))


def no_cpu_sharding() -> str:
    """Why this torch cannot train with FSDP2 on a processor; empty where it can.

    Torch 2.6 calls `record_event` on the stream of the device, and its stream of the CPU has none.
    """
    if hasattr(torch.cpu.Stream, "record_event"):
        return ""
    return f"torch {torch.__version__} has no FSDP2 on processors"


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

    def builder(self, cell: Cell, micro_batches: int, schedule: str = "none") -> Callable[[], Any]:
        """What makes a new job of a cell here; see `torch_job` and `deepspeed_job`."""
        if cell.zero is None:
            from cpsr.qualify.torch_jobs import torch_job

            return partial(torch_job, cell, self.device, self.ranks, micro_batches, schedule)
        from cpsr.qualify.deepspeed_jobs import deepspeed_job

        return partial(deepspeed_job, cell, self.ranks, micro_batches, schedule)
