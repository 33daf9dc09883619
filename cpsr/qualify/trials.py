"""The checks, the cells that they run with, and their order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from cpsr.qualify.cells import Cell, cells_of
from cpsr.qualify.environment import no_cpu_sharding, no_muon
from cpsr.qualify.kill_checks import (
    check_dump,
    check_prediction,
    check_replay,
    check_return_from_disk,
    check_return_from_memory,
)
from cpsr.qualify.restart_check import check_restart
from cpsr.qualify.scene import Scene
from cpsr.qualify.side_group_check import check_side_group
from cpsr.qualify.speed_check import check_speed

__all__ = ["CHECKS", "Check", "NotApplicable", "Trial", "trials_of", "without"]

DEADLINE_SECONDS = 300.0  # for what takes seconds; a first use of an operator may compile it
REPRESENTATIVE = "run with representative cells only"

# A sharded, a replicated and a partitioned state; on CUDA also the two fused implementations of AdamW.
RETURNING_OF_DEEPSPEED = ("deepspeed zero1 bf16 adamw", "deepspeed zero3 fp32 adamw")
SPLIT = ("fsdp2 bf16 adamw", "tp fp32 adamw")
OFFLOADED = "deepspeed zero2 bf16 json offload_optimizer"
RETURNING = ("ddp fp32 adamw", *SPLIT, *RETURNING_OF_DEEPSPEED, OFFLOADED)
REPLAYED = (*RETURNING[:-1], "deepspeed zero2 fp16 adamw")
RETURNING_ON_CUDA = ("ddp fp32 adamw-fused", "deepspeed zero1 bf16 fused")
PREDICTED = (*SPLIT, *RETURNING_OF_DEEPSPEED, OFFLOADED, *RETURNING_ON_CUDA)
DUMPED = ("ddp fp32 adamw", "fsdp2 bf16 adamw", "deepspeed zero1 bf16 adamw", *RETURNING_ON_CUDA)
ALONE = "torch fp32 adamw"  # the only rank


@dataclass(frozen=True)
class Check:
    """One column of the table.

    Attributes:
        name: of the column.
        run: carries it out on every rank, raises an exception where it fails, and returns figures.
        cells: names of the cells that it runs with; None for all.
        kills: whether a rank kills itself in it, so that a launcher must restart the job.
        ranks: that it needs.
        deadline_seconds: after which the processes are ended.
    """

    name: str
    run: Callable[[Cell, Scene], Mapping[str, Any]]
    cells: tuple[str, ...] | None = None
    kills: bool = False
    ranks: int = 1
    deadline_seconds: float = DEADLINE_SECONDS


@dataclass(frozen=True)
class Trial:
    """A check of a cell."""

    check: Check
    cell: Cell

    @property
    def name(self) -> str:
        """In one line, as in `deepspeed zero1 bf16 adamw: restart`."""
        return f"{self.cell.name}: {self.check.name}"


@dataclass(frozen=True)
class NotApplicable:
    """A place of the table that stays empty, with the reason."""

    trial: Trial
    reason: str


CHECKS = (
    Check("restart", check_restart),
    Check("side group", check_side_group, ("ddp fp32 adamw",), ranks=2),
    Check("speed", check_speed, ("ddp fp32 adamw", "deepspeed zero1 fp32 adamw", ALONE, *RETURNING_ON_CUDA)),
    Check("memory", check_return_from_memory, (*RETURNING, *RETURNING_ON_CUDA, ALONE), kills=True),
    Check("replay", check_replay, (*REPLAYED, ALONE), kills=True),
    Check("disk", check_return_from_disk, (*RETURNING, ALONE), kills=True),
    Check("dump", check_dump, DUMPED, kills=True, ranks=2),
    Check("predict", check_prediction, (*PREDICTED, ALONE), kills=True),
)


def trials_of(
    device: str, only: str, ranks: int, stages_can_send: bool, restarted: bool
) -> tuple[list[Trial], list[NotApplicable]]:
    """The checks of this job in the order in which they run, and what does not apply.

    Args:
        device: `cpu` or `cuda`.
        only: text that the names of the checks contain; cells without one are left out.
        ranks: of the job.
        stages_can_send: see `cells_of`.
        restarted: whether a launcher restarts the job after a kill.
    """
    trials: list[Trial] = []
    empty: list[NotApplicable] = []
    for cell in cells_of(device, ranks, stages_can_send):
        places = [Trial(check, cell) for check in CHECKS]
        reasons = [_reason(trial, ranks, restarted) for trial in places]
        if not any(only in trial.name and not reason for trial, reason in zip(places, reasons, strict=True)):
            continue
        for trial, reason in zip(places, reasons, strict=True):
            if reason or only not in trial.name:
                empty.append(NotApplicable(trial, reason or f"left out by --only {only!r}"))
            else:
                trials.append(trial)
    return without(*without(_ordered(trials), empty, _missing_package), partial(_missing_in_torch, device))


def without(
    trials: Sequence[Trial], empty: Sequence[NotApplicable], problem: Callable[[Cell], str]
) -> tuple[list[Trial], list[NotApplicable]]:
    """Checks of cells that have a problem on this machine do not apply; an empty text is none."""
    problems = [problem(trial.cell) for trial in trials]
    left = [trial for trial, found in zip(trials, problems, strict=True) if not found]
    lost = [NotApplicable(trial, found) for trial, found in zip(trials, problems, strict=True) if found]
    return left, [*empty, *lost]


def _missing_package(cell: Cell) -> str:
    return f"{cell.package} is not installed" if cell.package and find_spec(cell.package) is None else ""


def _missing_in_torch(device: str, cell: Cell) -> str:
    if cell.engine == "fsdp2" and device == "cpu":
        return no_cpu_sharding()
    return no_muon() if cell.optimizer == "muon+adamw" else ""


def _reason(trial: Trial, ranks: int, restarted: bool) -> str:
    """Why a check does not apply; empty where it does."""
    check, cell = trial.check, trial.cell
    if check.cells is not None and cell.name not in check.cells:
        return REPRESENTATIVE
    if cell.name == ALONE and check.cells is not None and ranks > 1:
        return "in a job of several ranks each trains by itself here: run with the other engines"
    if check.ranks > ranks:
        return f"needs {check.ranks} ranks"
    return "no launcher restarts these ranks; start them with `cpsr run`" if check.kills and not restarted else ""


def _ordered(trials: Sequence[Trial]) -> list[Trial]:
    """Checks within a process first, then kills; pipelines last, as they change DeepSpeed's groups."""
    return sorted(trials, key=lambda trial: (trial.cell.engine == "pipeline", trial.check.kills))
