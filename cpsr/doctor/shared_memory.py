"""The memory that snapshots lie in: `/dev/shm`, and the machine's or container's own."""

import os
import pwd
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cpsr.checkpoint.file_lock import FileLock
from cpsr.checkpoint.memory import shared_memory_left
from cpsr.checkpoint.memory_removal import bytes_in_memory
from cpsr.checkpoint.memory_states import BLOCK_BYTES, SHARED_MEMORY
from cpsr.checkpoint.resources import available_host_bytes
from cpsr.checkpoint.run_directory import run_id
from cpsr.doctor.finding import Finding, error, ok, size, warning
from cpsr.doctor.needs import Needs
from cpsr.errors import CPSRError
from cpsr.journal.database import filesystem_of

__all__ = ["check_host_memory", "check_lifetime", "check_memory_kind", "check_shared_memory"]

_KINDS = ("tmpfs", "ramfs", "hugetlbfs")
_SYSTEMD, _LINGER = Path("/run/systemd/system"), Path("/var/lib/systemd/linger")
_LOGIND = tuple(
    f"{one}/systemd/{name}" for name in ("logind.conf", "logind.conf.d/*.conf") for one in ("/usr/lib", "/etc")
)
_SYSTEM_USERS = 1000  # whose memory systemd leaves alone
_LARGER = "docker: --shm-size or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm; else remount it"
_LOSES = "snapshots do not outlive their process, and a restart begins from the disk"
_NO_WINDOWS = "the job starts, no windows are kept, and a failure goes back to the newest checkpoint"


def check_memory_kind(directory: Path = SHARED_MEMORY) -> Finding:
    """Whether shared memory is memory."""
    kind = filesystem_of(directory)
    if kind in _KINDS:
        return ok("memory kind", f"{directory} is {kind}", kind=kind)
    text = f"{directory} is {kind}, on a disk"
    return warning("memory kind", text, "snapshots there are as slow as it; mount a tmpfs there", kind=kind)


def check_shared_memory(needs: Needs, directory: Path = SHARED_MEMORY) -> Finding:
    """Whether the snapshot buffers and windows of this machine's ranks fit, and can be locked."""
    subject = "shared memory"
    if not needs.config.checkpoint.shared_memory:
        return ok(subject, "turned off by checkpoint.shared_memory")
    try:
        memory, left = os.statvfs(directory), shared_memory_left(directory)
        held = sum(path.lstat().st_blocks * BLOCK_BYTES for path in directory.glob("cpsr-*"))
        FileLock(directory / f"cpsr-doctor-{os.getpid()}", create=True).remove()
    except OSError as problem:
        return warning(subject, f"{directory} cannot be used ({problem})", f"{_LOSES}; mount a tmpfs there")
    total, own = memory.f_blocks * memory.f_frsize, _own_bytes(needs, directory)
    figures = {
        "total_bytes": total,
        "usable_bytes": left,
        "held_by_runs_bytes": held,
        "needed_bytes": needs.buffer_bytes,
        "window_bytes": needs.window_bytes,
    }
    text = f"{size(left)} of {size(total)} can be used in {directory}"
    text += f"; runs of CPSR hold {size(held)} of it, {size(own)} this one" if held else ""
    if needs.buffer_bytes is None:
        return ok(subject, f"{text}; not compared with a job, whose size is not given", **figures)
    text += f"; {_takes(needs)}"
    if needs.buffer_bytes > left + own:
        release = "; `cpsr release --orphans` frees what runs have left" if held > own else ""
        return warning(subject, text, f"{_LOSES}; {_LARGER}{release}", **figures)
    needed = needs.buffer_bytes + needs.window_bytes
    if needed > left + own:
        return warning(subject, text, f"{_NO_WINDOWS}; {_LARGER}", **figures)
    if needed + needs.replica_bytes > left + own:
        more = f"{text} and replicas of other machines up to {size(needs.replica_bytes)}"
        return warning(subject, more, f"some replicas will be missing; {_LARGER}", **figures)
    return ok(subject, text, **figures)


def check_host_memory(needs: Needs) -> Finding:
    """Whether the machine, or its container, has the memory that the buffers and windows take."""
    available = available_host_bytes()
    needed, windows = needs.buffer_bytes, needs.window_bytes
    figures = {"available_bytes": available, "needed_bytes": needed, "window_bytes": windows}
    text = f"{size(available)} of host memory are available"
    if needed is None:
        return ok("host memory", f"{text}; not compared with a job, whose size is not given", **figures)
    text += f"; {_takes(needs)}"
    available += _own_bytes(needs, SHARED_MEMORY)
    remedy = "fewer ranks on a machine, a higher limit of the container, or ZeRO"
    if needed > available:
        return error("host memory", text, f"the job refuses to start; {remedy}", **figures)
    if needed + windows > available:
        return warning("host memory", text, f"{_NO_WINDOWS}; {remedy}", **figures)
    return ok("host memory", text, **figures)


def check_lifetime(
    user: int | None = None, system: Path = _SYSTEMD, linger: Path = _LINGER, files: Sequence[str] = _LOGIND
) -> Finding:
    """Whether systemd removes the shared memory of a user who has logged out (RemoveIPC).

    Args:
        user: number of it; None: of this process.
        system: there where systemd runs.
        linger: holds a file for each user whose processes stay.
        files: patterns of the configuration of logind, later ones before earlier ones.
    """
    subject, user = "memory lifetime", os.getuid() if user is None else user
    if not system.is_dir():
        return ok(subject, "no systemd that removes shared memory at a logout")
    if user < _SYSTEM_USERS:
        return ok(subject, "systemd leaves the shared memory of a system user alone")
    if _setting("RemoveIPC", files) in ("no", "false", "0", "off") or _lingers(linger / _name(user)):
        return ok(subject, "systemd leaves shared memory alone at a logout")
    advice = "a restart after it begins from the disk; `loginctl enable-linger`, or RemoveIPC=no in logind.conf"
    return warning(subject, "systemd may remove a user's shared memory at the last logout (RemoveIPC)", advice)


def _own_bytes(needs: Needs, directory: Path) -> int:
    """Bytes that an earlier life of this run has left there, and the next one takes over."""
    try:
        return bytes_in_memory(run_id(needs.run_dir), range(needs.launched.ranks), directory)
    except (OSError, CPSRError):  # no run yet
        return 0


def _lingers(file: Path) -> bool:
    """Whether the file is there, as far as this process may see it."""
    try:
        return file.exists()
    except OSError:
        return False


def _setting(name: str, patterns: Sequence[str]) -> str:
    """The last value of a setting in files of INI lines; empty where there is none, or it may not be read."""
    value = ""
    for pattern in patterns:
        path = Path(pattern)
        for file in sorted(path.parent.glob(path.name)):
            with suppress(OSError):
                for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                    key, _, given = line.partition("=")
                    value = given.strip().lower() if key.strip() == name else value
    return value


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _takes(needs: Needs) -> str:
    count = needs.launched.local_ranks
    windows = f", and of their windows {size(needs.window_bytes)}" if needs.window_bytes else ""
    return f"the buffers of {count} rank{'s' if count > 1 else ''} take {size(needs.buffer_bytes or 0)}{windows}"
