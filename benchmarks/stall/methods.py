"""The ways to save a checkpoint that are compared, behind one interface."""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from cpsr.benchmarks.harness.checkpoint_files import commit_file
from cpsr.benchmarks.harness.processes import wait_for
from cpsr.benchmarks.stall.job import Job
from cpsr.checkpoint.manifest import step_name
from cpsr.demo.device import CUDA
from cpsr.errors import CPSRError
from cpsr.job import Rewind
from cpsr.planner.plan import fixed_plan
from cpsr.recovery import CPSRRecovery

__all__ = ["NEVER_ITERATIONS", "Cpsr", "Dcp", "Memcpy", "Method", "Saves", "TorchSave"]

NEVER_ITERATIONS = 2**30  # longer than any measurement
TORCH_FILE = "state.pt"


class Method(Protocol):
    """One way to save; everything is called on the training thread.

    Attributes:
        name: as in the tables.
    """

    name: str

    def arm(self) -> None:
        """Outside the timed step, before it: a checkpoint belongs at its end."""

    def save(self) -> None:
        """Inside the timed step, after the update."""

    def durable_unix_seconds(self) -> float | None:
        """When the checkpoint was on the disk; None while it is not. Asked for the first time after the next step.

        Raises:
            CPSRError: it failed or was skipped.
        """

    def clean(self) -> None:
        """Remove the checkpoint."""


class Cpsr:
    """CPSR as users run it, its own retention included; the benchmark only says at which step a save is due.

    Args:
        recovery: entered, on the job's adapter, with an interval of `NEVER_ITERATIONS`.
    """

    name = "cpsr"

    @classmethod
    @contextmanager
    def open(cls, job: Job, directory: Path) -> Iterator["Cpsr"]:
        """CPSR around the job, with its run directory in `directory`."""
        config = {"run_dir": directory / "run", "checkpoint": {"interval_iterations": NEVER_ITERATIONS}}
        with CPSRRecovery(job.adapter, config) as recovery:
            yield cls(recovery)

    def __init__(self, recovery: CPSRRecovery) -> None:
        self._recovery = recovery
        self._saver = recovery.life.saver
        self._iteration = 0

    def arm(self) -> None:
        """Let the interval end with the next step."""
        self._iteration = self._recovery.iteration + 1
        self._saver.rewound(Rewind(self._recovery.iteration, None, "each interval is measured alone"))
        self._saver.plan = fixed_plan(1)

    def save(self) -> None:
        """The hook behind the optimizer has begun the snapshot already; the next one is far away again."""
        self._saver.plan = fixed_plan(NEVER_ITERATIONS)

    def durable_unix_seconds(self) -> float | None:
        """When the commit record appeared; reported only once the retention behind it is through too."""
        if not self._saver.drain(0.0):
            return None
        self._saver.surface()
        if self._saver.saved_iteration != self._iteration:
            raise CPSRError(f"checkpoint {self._iteration} was not committed; the reason is in the log above")
        directory = self._recovery.config.run_dir / "checkpoints" / step_name(self._iteration)
        return commit_file(directory).stat().st_mtime

    def clean(self) -> None:
        """Old checkpoints are removed by the writer."""


class Saves:
    """What the other methods have in common: a new directory for every checkpoint."""

    def __init__(self, job: Job, directory: Path) -> None:
        self._job = job
        self._directory = directory
        self._saves = 0

    def arm(self) -> None:
        """The next checkpoint."""
        self._saves += 1

    def clean(self) -> None:
        """Remove its directory."""
        shutil.rmtree(self._path)

    @property
    def _path(self) -> Path:
        return self._directory / f"save-{self._saves}"


class Dcp(Saves):
    """`torch.distributed.checkpoint.async_save`; `reuse_staging` keeps the host buffers between saves."""

    def __init__(self, job: Job, directory: Path, *, reuse_staging: bool) -> None:
        super().__init__(job, directory)
        self.name = "dcp, reused buffers" if reuse_staging else "dcp async_save"
        self._durable: float | None = None
        self._future: Future[Any] | None = None
        on_gpu = job.device == CUDA  # else what async_save itself takes
        options = StagingOptions(
            use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
        )
        self._stager = DefaultStager(options) if reuse_staging else None

    def save(self) -> None:
        """Stage the state, and leave the writing to DCP's thread."""
        self._durable = None
        future = async_save(self._job.state, checkpoint_id=self._path, async_stager=self._stager, no_dist=True)
        assert isinstance(future, Future)  # staging is synchronous
        future.add_done_callback(self._note_durable)
        self._future = future

    def durable_unix_seconds(self) -> float | None:
        """When DCP's future was done: its files are forced to the disk by then."""
        if self._future is not None and self._future.done():
            try:
                self._future.result()
            except CheckpointException as error:  # no Exception: it derives from BaseException
                raise CPSRError(f"DCP could not save to {self._path}: {error}") from error
        return self._durable

    def _note_durable(self, future: Future[Any]) -> None:
        self._durable = time.time()


class TorchSave(Saves):
    """`torch.save` and fsync on the training thread."""

    name = "torch.save + fsync"

    def save(self) -> None:
        """Write the file and force it to the disk."""
        self._path.mkdir()
        with (self._path / TORCH_FILE).open("wb") as file:
            torch.save(self._job.state, file)
            file.flush()
            os.fsync(file.fileno())
        self._durable = time.time()

    def durable_unix_seconds(self) -> float | None:
        """When fsync returned."""
        return self._durable


class Memcpy:
    """The unit: every tensor of the state copied once, into memory that was touched before, with nothing beside it.

    The memory is the host's; for a GPU it is pinned.
    """

    def __init__(self, job: Job) -> None:
        self._device, pinned = job.device, job.device == CUDA
        tensors = [tensor.detach() for tensor in job.state.values()]
        self._pairs = [(torch.zeros_like(one, device="cpu", pin_memory=pinned), one) for one in tensors]
        self.seconds()  # touches every page

    def seconds(self) -> float:
        """Time of one copy, on torch's default number of threads or on the device's stream."""
        wait_for(self._device)
        started = time.perf_counter()
        for target, source in self._pairs:
            target.copy_(source, non_blocking=source.is_cuda)
        wait_for(self._device)
        return time.perf_counter() - started
