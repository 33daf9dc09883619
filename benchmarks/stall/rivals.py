"""Other packages' ways to save, as their documentation has them, each imported when it is opened; and all methods."""

import logging
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cpsr.benchmarks.stall.job import Job
from cpsr.benchmarks.stall.methods import Cpsr, Dcp, Method, Saves, TorchSave
from cpsr.errors import CPSRError

__all__ = ["INSTALL", "ROSTER", "Entry", "installed", "warnings_of_rivals_only"]

INSTALL = "pip install --no-build-isolation --constraint constraints.txt '.[bench]'"

METADATA = ".snapshot_metadata"  # the file that torchsnapshot writes last
RUN_ID = "cpsr-bench-stall"
JOB_VARIABLE = "TORCHELASTIC_RUN_ID"  # what DLRover names its shared memory after
SAVER_END_SECONDS = 10.0


def warnings_of_rivals_only() -> None:
    """No line in their logs for every save, which would be timed."""
    for package in ("lm_resiliency", "torchsnapshot"):
        logging.getLogger(package).setLevel(logging.WARNING)  # DLRover's has a variable of its own


class DlRover(Saves):
    """DLRover's flash checkpoint: into shared memory on the training thread, and from there to the disk by a process.

    The file that holds the state is not forced to the disk (the one that names the newest step is). A save while the
    one before is still being written is skipped without a word; here none begins before the last is complete.
    """

    name = "dlrover"

    @classmethod
    @contextmanager
    def open(cls, job: Job, directory: Path) -> Iterator["DlRover"]:
        """A checkpointer with a saver of its own, which is ended, and its shared memory removed, afterwards.

        Where it is not launched by `dlrover-run`, the package forks the saver from the training process, whose memory
        it would then hold on to. It is spawned here: the agent of `dlrover-run` holds no such memory either.
        """
        with _dlrover_environment() as sockets:
            from dlrover.python.common.constants import CheckpointConstant
            from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

            with _spawned_processes():
                checkpointer = DdpCheckpointer(str(directory))
            engine = checkpointer._engine
            try:
                yield cls(job, directory, checkpointer, CheckpointConstant.TRACER_FILE_NAME)
            finally:
                engine.saver_proc.terminate()
                engine.saver_proc.join(SAVER_END_SECONDS)
                engine.close()
                engine._shm_handler.unlink()
                shutil.rmtree(sockets, ignore_errors=True)

    def __init__(self, job: Job, directory: Path, checkpointer: Any, tracker: str) -> None:
        super().__init__(job, directory)
        self._checkpointer = checkpointer
        self._tracker = directory / tracker

    def save(self) -> None:
        """Into shared memory, and a message to the saver."""
        self._checkpointer.save_checkpoint(self._saves, self._job.state)

    def durable_unix_seconds(self) -> float | None:
        """When the saver noted the step; the state's file may still be in the page cache."""
        if self._checkpointer._engine.latest_step != self._saves:
            raise CPSRError(f"DLRover skipped its save {self._saves}")
        if not self._checkpointer._engine.saver_proc.is_alive():
            raise CPSRError(f"DLRover's saver ended before its save {self._saves} was complete")
        if not self._tracker.exists() or self._tracker.read_text() != str(self._saves):
            return None
        return self._tracker.stat().st_mtime

    @property
    def _path(self) -> Path:
        return self._directory / str(self._saves)


@contextmanager
def _dlrover_environment() -> Iterator[Path]:
    """Names for its sockets and its shared memory that no other job has; yields the directory of the sockets."""
    run_id, before = f"{RUN_ID}-{os.getpid()}", os.environ.get(JOB_VARIABLE)
    os.environ[JOB_VARIABLE] = run_id
    os.environ.setdefault("DLROVER_LOG_LEVEL", "ERROR")  # read when it is imported
    from dlrover.python.common.multi_process import SOCKET_TMP_DIR

    try:
        yield Path(SOCKET_TMP_DIR) / run_id
    finally:
        del os.environ[JOB_VARIABLE]
        if before is not None:
            os.environ[JOB_VARIABLE] = before


@contextmanager
def _spawned_processes() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


class LmResiliency(Saves):
    """lm-resiliency's GEMINI manager: into a host buffer, and from there to the disk at once, by its own thread.

    Its copy in host memory alone (and, with more ranks, at a peer) is not measured: no checkpoint is on the disk then.
    `checked` keeps a CRC-32 of the state beside it and compares it on loading, which is off by default.
    """

    @classmethod
    @contextmanager
    def open(cls, job: Job, directory: Path, *, checked: bool) -> Iterator["LmResiliency"]:
        """A manager for one rank; its threads and signal handlers are gone afterwards."""
        method = cls(job, directory, checked=checked)
        try:
            yield method
        finally:
            method._manager.close()

    def __init__(self, job: Job, directory: Path, *, checked: bool) -> None:
        super().__init__(job, directory)
        self.name = "lm-resiliency, checked" if checked else "lm-resiliency"
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        config = InMemoryCkptConfig(
            disk_flush_interval=0,  # would write the checkpoint before the newest; asked for one by one here
            disk_folder=str(directory),
            run_id=RUN_ID,
            verify_integrity=checked,
        )
        # Without this a single rank gets two more buffers, for a peer that there is not.
        replicas = SimpleNamespace(has_natural_replicas=True)
        self._manager: Any = InMemoryCheckpointManager(config, parallelism_info=replicas)

    def save(self) -> None:
        """Copy the state into a buffer, and hand a copy of that to the thread that writes."""
        self._manager.save(self._job.state, self._saves)
        self._manager.maybe_wait()  # the flush takes no buffer that is not marked complete
        self._manager.flush_to_disk(self._saves)

    def durable_unix_seconds(self) -> float | None:
        """When the forced file got its name: that changes the inode last."""
        writer = self._manager._disk
        if writer._write_thread.is_alive():
            return None
        writer.wait()  # raises what went wrong
        return (self._path / "rank-0.pt").stat().st_ctime

    @property
    def _path(self) -> Path:
        (path,) = self._directory.rglob(f"step-{self._saves}")
        return path


class TorchSnapshot(Saves):
    """`torchsnapshot.Snapshot.async_take`, which wants a new directory each time and forces nothing to the disk."""

    name = "torchsnapshot"

    def save(self) -> None:
        """Stage the state, and leave the writing to the package's thread."""
        from torchsnapshot import Snapshot, StateDict

        self._pending = Snapshot.async_take(str(self._path), {"state": StateDict(**self._job.state)})

    def durable_unix_seconds(self) -> float | None:
        """When its metadata was written, which makes the snapshot complete; all may still be in the page cache."""
        if not self._pending.done():
            return None
        self._pending.wait()  # raises what went wrong
        return (self._path / METADATA).stat().st_mtime


@dataclass(frozen=True)
class Entry:
    """A method that can be opened.

    Attributes:
        name: as in the tables.
        open: its method on a job, saving below a directory; a context manager.
        modules: what must be importable, beside our own dependencies; first the package itself.
        forced: whether its files are forced to the disk before it calls a checkpoint complete.
        verifies: whether it notices a flipped byte and a cut end in any of its files, as measured on 2026-11-24
            (docs/measured/overhead.md).
    """

    name: str
    open: Callable[[Job, Path], AbstractContextManager[Method]]
    modules: tuple[str, ...] = ()
    forced: bool = True
    verifies: bool = False


@contextmanager
def _opened(make: Callable[[Job, Path], Method], job: Job, directory: Path) -> Iterator[Method]:
    """A method that has nothing to close."""
    yield make(job, directory)


ROSTER = (
    Entry("cpsr", Cpsr.open, verifies=True),
    Entry("dcp async_save", partial(_opened, partial(Dcp, reuse_staging=False))),
    Entry("dcp, reused buffers", partial(_opened, partial(Dcp, reuse_staging=True))),
    Entry("dlrover", DlRover.open, ("dlrover", "grpc"), forced=False),  # it imports grpc without requiring it
    Entry("lm-resiliency", partial(LmResiliency.open, checked=False), ("lm_resiliency",)),
    Entry("lm-resiliency, checked", partial(LmResiliency.open, checked=True), ("lm_resiliency",), verifies=True),
    Entry("torch.save + fsync", partial(_opened, TorchSave)),
    Entry("torchsnapshot", partial(_opened, TorchSnapshot), ("torchsnapshot",), forced=False),
)


def installed(entry: Entry) -> bool:
    """Whether everything it needs can be imported here."""
    return all(find_spec(module) is not None for module in entry.modules)
