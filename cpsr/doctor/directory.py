"""The run directory as far as it is known without writing: its file system, free space and files."""

import os
from pathlib import Path

from cpsr.checkpoint.resources import existing_part
from cpsr.checkpoint.run_directory import checkpoint_bytes
from cpsr.doctor.finding import Finding, error, ok, size, warning
from cpsr.doctor.needs import Needs
from cpsr.journal.database import filesystem_of, is_network

__all__ = ["check_file_system", "check_files_left", "check_space"]

_VOLATILE = {
    "tmpfs": "memory: a new start of the machine loses every checkpoint",
    "ramfs": "memory: a new start of the machine loses every checkpoint",
    "overlay": "a container's own layer: the next container does not see the checkpoints",
}
_LESS = (
    "make room, choose another run_dir, checkpoint less often (checkpoint.interval_iterations), or set "
    "checkpoint.disk_limit_bytes"
)


def check_file_system(run_dir: Path, kind: str | None = None) -> Finding:
    """The kind of the file system, and what it means for checkpoints and journal.

    Args:
        run_dir: of the run; need not exist.
        kind: of its file system; None: this machine's mount table says.
    """
    subject, kind = "file system", filesystem_of(run_dir) if kind is None else kind
    text = f"{run_dir} is on {kind}"
    if kind in _VOLATILE:
        return warning(subject, f"{text}, {_VOLATILE[kind]}", "mount a disk, or set checkpoint.target", kind=kind)
    if kind.startswith("fuse"):
        advice = "if it is an object store, set checkpoint.target to that, and run_dir to a disk that the ranks share"
        return warning(subject, f"{text}; the journal does without WAL", advice, kind=kind)
    if is_network(kind):
        return ok(subject, f"{text}, which machines may share; the journal does without WAL", kind=kind)
    return ok(subject, f"{text}, of this machine alone; the journal uses WAL", kind=kind)


def check_space(needs: Needs) -> Finding:
    """Free space against what the checkpoints take. Quotas are not seen."""
    subject, found = "disk space", os.statvfs(existing_part(needs.run_dir))
    free, own = found.f_bavail * found.f_frsize, checkpoint_bytes(needs.run_dir)
    figures = {"free_bytes": free, "checkpoint_bytes": own, "needed_bytes": needs.disk_bytes}
    text = f"{size(free)} are free"
    text += f", and {size(own)} hold the run's checkpoints" if own else ""
    if needs.disk_bytes is None:
        return ok(subject, f"{text}; not compared with a job, whose size is not given", **figures)
    least, most = needs.disk_bytes
    if least == most:
        text += f"; checkpoints take up to {size(most)}"
    else:
        text += f"; checkpoints take up to {size(least)} if all ranks hold the same, {size(most)} if each has a part"
    if least > free + own:
        return error(subject, text, f"the job refuses to start; {_LESS}", **figures)
    if most > free + own:
        return warning(subject, text, f"too little for the latter; {_LESS}", **figures)
    return ok(subject, text, **figures)


def check_files_left(needs: Needs) -> Finding:
    """Free inodes against the files of the run."""
    subject, found = "inodes", os.statvfs(existing_part(needs.run_dir))
    figures = {"free": found.f_favail, "total": found.f_files, "needed": needs.files}
    if not found.f_files:
        return ok(subject, "the file system does not limit the number of files", **figures)
    text = f"{found.f_favail:,} are free, the run takes up to {needs.files:,}"
    if needs.files > found.f_favail:
        advice = "saves would fail for want of inodes; remove files there, or choose another run_dir"
        return (error if found.f_favail == 0 else warning)(subject, text, advice, **figures)
    return ok(subject, text, **figures)
