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
from cpsr.benchmarks.stall.methods import Cpsr, Dcp, Method, State, TorchSave, empty_state, save_name
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


class DlRover:
    """DLRover's flash checkpoint: into shared memory on the training thread, and from there to the disk by a process.

    The file that holds the state is not forced to the disk (the one that names the newest step is). A save while the
    one before is still being written is skipped without a word; here none begins before the last is complete.

    Args:
        job: whose state is saved.
        directory: holds the checkpoints.
        checkpointer: a `DdpCheckpointer` on that directory.
        tracker: name of the file in which it notes the newest complete step.
    """

    name = "dlrover"
    checkpoints = "."

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
        self._job = job
        self._directory = directory
        self._checkpointer = checkpointer
        self._tracker = directory / tracker
        self._saves = 0

    def arm(self) -> None:
        """The next step number."""
        self._saves += 1

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

    def clean(self) -> None:
        """Remove the step's directory."""
        shutil.rmtree(self._directory / str(self._saves))

    def restore(self, job: Job, directory: Path) -> State | None:
        """What it loads where the shared memory is gone, as after the loss of a node."""
        from dlrover.python.common.storage import PosixDiskStorage
        from dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine import FullCheckpointEngine

        reader = SimpleNamespace(
            checkpoint_dir=str(directory), storage=PosixDiskStorage(), _global_shard_num=1, _rank=0
        )
        reader._gen_restore_checkpoint_path = lambda step: FullCheckpointEngine._gen_restore_checkpoint_path(
            reader, step
        )
        state: State = FullCheckpointEngine._load_from_storage(reader)
        return state or None


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


class LmResiliency:
    """lm-resiliency's GEMINI manager: into a host buffer, and from there to the disk at once, by its own thread.

    Its copy in host memory alone (and, with more ranks, at a peer) is not measured: no checkpoint is on the disk then.

    Args:
        job: whose state is saved.
        directory: holds the checkpoints.
        checked: keep a CRC-32 of the state beside it and compare it on loading, which is off by default.
    """

    checkpoints = "."

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
        self.name = "lm-resiliency, checked" if checked else "lm-resiliency"
        self._job = job
        self._directory = directory
        self._checked = checked
        self._saves = 0
        self._manager = self._open_manager(directory)

    def arm(self) -> None:
        """The next step number."""
        self._saves += 1

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
        (path,) = self._directory.rglob(f"step-{self._saves}/rank-0.pt")
        return path.stat().st_ctime

    def clean(self) -> None:
        """Remove the step's directory."""
        (path,) = self._directory.rglob(f"step-{self._saves}")
        shutil.rmtree(path)

    def restore(self, job: Job, directory: Path) -> State | None:
        """What a new manager loads; an older checkpoint where it refuses the newest."""
        manager = self._open_manager(directory)
        try:
            loaded = manager.load()
        finally:
            manager.close()
        return None if loaded is None else loaded[0]

    def _open_manager(self, directory: Path) -> Any:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        config = InMemoryCkptConfig(
            disk_flush_interval=0,  # would write the checkpoint before the newest; asked for one by one here
            disk_folder=str(directory),
            run_id=RUN_ID,
            verify_integrity=self._checked,
        )
        # Without this a single rank gets two more buffers, for a peer that there is not.
        return InMemoryCheckpointManager(config, parallelism_info=SimpleNamespace(has_natural_replicas=True))


class TorchSnapshot:
    """`torchsnapshot.Snapshot.async_take`, which wants a new directory each time and forces nothing to the disk.

    What fails in its reading tasks goes to asyncio's log only: the caller gets zeros where a file was too short.

    Args:
        job: whose state is saved.
        directory: holds the checkpoints.
    """

    name = "torchsnapshot"
    checkpoints = "."

    def __init__(self, job: Job, directory: Path) -> None:
        self._job = job
        self._directory = directory
        self._saves = 0
        self._pending: Any = None

    def arm(self) -> None:
        """The next directory."""
        self._saves += 1

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

    def clean(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self._path)

    def restore(self, job: Job, directory: Path) -> State | None:
        """The newest directory, read into tensors of the same shapes."""
        from torchsnapshot import Snapshot, StateDict

        target = StateDict(**empty_state(job))
        Snapshot(str(directory / save_name(self._saves))).restore({"state": target})
        state: State = target.state_dict()
        return state

    @property
    def _path(self) -> Path:
        return self._directory / save_name(self._saves)


@dataclass(frozen=True)
class Entry:
    """A method that can be opened.

    Attributes:
        name: as in the tables.
        open: its method on a job, saving below a directory; a context manager.
        modules: what must be importable, beside our own dependencies; first the package itself.
        forced: whether its files are forced to the disk before it calls a checkpoint complete.
    """

    name: str
    open: Callable[[Job, Path], AbstractContextManager[Method]]
    modules: tuple[str, ...] = ()
    forced: bool = True


@contextmanager
def _opened(make: Callable[[Job, Path], Method], job: Job, directory: Path) -> Iterator[Method]:
    """A method that has nothing to close."""
    yield make(job, directory)


ROSTER = (
    Entry("cpsr", Cpsr.open),
    Entry("dcp async_save", partial(_opened, partial(Dcp, reuse_staging=False))),
    Entry("dcp, reused buffers", partial(_opened, partial(Dcp, reuse_staging=True))),
    Entry("dlrover", DlRover.open, ("dlrover", "grpc"), forced=False),  # it imports grpc without requiring it
    Entry("lm-resiliency", partial(LmResiliency.open, checked=False), ("lm_resiliency",)),
    Entry("lm-resiliency, checked", partial(LmResiliency.open, checked=True), ("lm_resiliency",)),
    Entry("torch.save + fsync", partial(_opened, TorchSave)),
    Entry("torchsnapshot", partial(_opened, TorchSnapshot), ("torchsnapshot",), forced=False),
)


def installed(entry: Entry) -> bool:
    """Whether everything it needs can be imported here."""
    return all(find_spec(module) is not None for module in entry.modules)
