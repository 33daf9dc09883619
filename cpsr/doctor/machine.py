"""What one machine offers a job, found without writing anything: devices, memory, limits, and the run's file system.

A job makes the cheap ones of these checks when it starts (`report_machine`). The rest of its start compares memory and
disk with what the job takes.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cpsr.checkpoint.arena import shared_memory_left
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.job import Job
from cpsr.journal.database import filesystem_of, is_network

__all__ = ["EVENT", "Finding", "check_devices", "check_file_system"]
__all__ += ["check_memory", "check_memory_kind", "failed", "report_machine", "size"]

logger = logging.getLogger(__name__)

EVENT = "machine"  # kind of the journal's events
Level = Literal["ok", "warning", "error"]
_LOG_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}
_UNIT_BYTES = 1000.0
_MEMORY_KINDS = ("tmpfs", "ramfs", "hugetlbfs")
_VOLATILE = {
    "tmpfs": "memory: a new start of the machine loses every checkpoint",
    "ramfs": "memory: a new start of the machine loses every checkpoint",
    "overlay": "a container's own layer: the next container does not see the checkpoints",
}
_LARGER = "docker: --shm-size or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm; else remount it"
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One line of `cpsr doctor`.

    Attributes:
        level: `ok`; `warning`: the job runs, and something is lost or slower; `error`: it would not run, or lose state.
        subject: what was looked at, as `shared memory`.
        measured: a clause without a full stop.
        advice: what to do, likewise; empty where nothing is.
        machine: which one it is about; empty where it is about the whole job.
    """

    level: Level
    subject: str
    measured: str
    advice: str = ""
    machine: str = ""

    @property
    def sentence(self) -> str:
        """What was measured and what to do."""
        return f"{self.measured}: {self.advice}" if self.advice else self.measured


def failed(subject: str, problem: OSError) -> Finding:
    """An operation that a file system refused."""
    advice = "look at its free space, inodes and quota, its mount, and the rights of the job's user"
    return Finding("error", subject, f"the file system refuses: {problem}", advice)


def size(count: float) -> str:
    """Bytes for people, in powers of 1000: `4.2 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < _UNIT_BYTES or unit == "TB":
            break
        count /= _UNIT_BYTES
    return f"{count:.3g} {unit}"


def report_machine(job: Job) -> None:
    """Report what is wrong with this machine, and on rank 0 with the run directory: one line and one event each.

    The first rank of a machine looks; nothing is written, and no other rank is waited for.
    """
    if job.group.rank != job.run.local_ranks[0]:
        return
    try:
        findings = [one for one in _cheap(job) if one.level != "ok"]
    except OSError as problem:
        logger.warning("this machine could not be looked at (%s); training begins, `cpsr doctor` looks again", problem)
        return
    for one in findings:
        job.journal.event(EVENT, f"{one.subject}: {one.sentence}", level=_LOG_LEVELS[one.level])


def _cheap(job: Job) -> Iterator[Finding]:
    if job.config.checkpoint.shared_memory:
        yield check_memory_kind()
    if job.group.rank == 0:
        yield check_file_system(job.config.run_dir)


def check_devices(local_ranks: int, driver: Path = _DRIVER) -> Finding:
    """Whether torch can use this machine's GPUs, and each local rank has one. Initialises CUDA where there is a GPU."""
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(index) for index in range(count)]
    except RuntimeError as problem:  # a driver that is too old, a device that is lost
        return Finding("error", "devices", f"torch cannot use the GPUs ({problem})", "see nvidia-smi and dmesg")
    if not names:
        if not driver.exists():
            return Finding("ok", "devices", "no GPU and no driver: ranks train on the processor, over gloo")
        advice = "install a build of torch for this driver, and see nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Finding("warning", "devices", "a driver is here, and torch finds no GPU", advice)
    kinds = " and ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    text = f"{kinds}, CUDA {torch.version.cuda}"
    if not torch.distributed.is_nccl_available():
        return Finding("warning", "devices", text, "torch has no NCCL: ranks on GPUs cannot train together")
    if local_ranks > count > 1:  # a launcher may show each rank its own GPU alone
        return Finding("warning", "devices", text, f"{local_ranks} ranks share {count} GPUs; start one rank a GPU")
    return Finding("ok", "devices", text)


def check_memory(needed_bytes: int | None, directory: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Whether the snapshot buffers of this machine's ranks fit into its memory, and into shared memory.

    Args:
        needed_bytes: of all buffers; None: not known.
        directory: where shared memory is mounted.
    """
    available = available_host_bytes()
    takes = "; not compared with a job" if needed_bytes is None else f"; the ranks' buffers take {size(needed_bytes)}"
    text = f"{size(available)} are available{takes}"
    if (needed_bytes or 0) > available:
        advice = "the job refuses to start; fewer ranks on a machine, a higher limit of the container, or ZeRO"
        yield Finding("error", "host memory", text, advice)
    else:
        yield Finding("ok", "host memory", text)
    loses = "snapshots do not outlive their process, and a restart begins from the disk"
    try:
        left = shared_memory_left(directory)
        writable = os.access(directory, os.W_OK)
    except OSError:
        left, writable = 0, False
    if not writable:
        yield Finding("warning", "shared memory", f"{directory} cannot be used", f"{loses}; mount a tmpfs there")
    elif (needed_bytes or 0) > left:
        release = "`cpsr release --orphans` frees what runs have left"
        text = f"{size(left)} are free in {directory}{takes}"
        yield Finding("warning", "shared memory", text, f"{loses}; {_LARGER}; {release}")
    else:
        yield Finding("ok", "shared memory", f"{size(left)} are free in {directory}{takes}")


def check_memory_kind(directory: Path = SHARED_MEMORY) -> Finding:
    """Whether shared memory is memory."""
    kind = filesystem_of(directory)
    if kind in _MEMORY_KINDS:
        return Finding("ok", "memory kind", f"{directory} is {kind}")
    text = f"{directory} is {kind}, on a disk"
    return Finding("warning", "memory kind", text, "snapshots there are as slow as it; mount a tmpfs there")


def check_file_system(run_dir: Path) -> Finding:
    """The kind of file system under the run directory, and what it means for checkpoints and journal."""
    subject, kind = "file system", filesystem_of(run_dir)
    text = f"{run_dir} is on {kind}"
    if kind in _VOLATILE:
        return Finding("warning", subject, f"{text}, {_VOLATILE[kind]}", "mount a disk, or set checkpoint.target")
    if kind.startswith("fuse"):
        advice = "if it is an object store, set checkpoint.target to that, and run_dir to a disk that the ranks share"
        return Finding("warning", subject, f"{text}; the journal does without WAL", advice)
    shared = "which machines may share" if is_network(kind) else "of this machine alone"
    return Finding("ok", subject, f"{text}, {shared}")
