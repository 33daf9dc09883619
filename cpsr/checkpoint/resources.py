"""Checks, before training starts, that host memory and disk are large enough."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from cpsr.checkpoint.catalogue import Retention
from cpsr.config import CPSRConfig
from cpsr.errors import ResourceError

__all__ = ["available_host_bytes", "check_disk", "check_host_memory", "existing_part", "host_buffers", "kept_bytes"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")

_log = logging.getLogger(__name__)


def check_host_memory(required_bytes: int, local_ranks: int, reusable_bytes: int = 0) -> int:
    """Refuse snapshot buffers that do not fit into this machine's (or container's) memory.

    Args:
        required_bytes: bytes of one rank's buffers.
        local_ranks: ranks that share this machine.
        reusable_bytes: memory of an earlier life that these buffers reuse.

    Returns:
        Bytes that are left for each rank beside them.

    Raises:
        ResourceError: the bytes required, the bytes free and what to change.
    """
    needed, available = max(required_bytes * local_ranks - reusable_bytes, 0), available_host_bytes()
    if needed > available:
        raise ResourceError(
            f"snapshot buffers need {needed} bytes of host memory ({required_bytes} for each of {local_ranks} ranks "
            f"here), {available} are available: run fewer ranks on a machine, raise the container's memory limit, or "
            "split the optimizer state over more ranks (ZeRO)"
        )
    return (available - needed) // local_ranks


def check_disk(run_dir: Path, required_bytes: int) -> None:
    """Refuse a run whose checkpoints do not fit on the disk.

    Args:
        run_dir: directory of the run; need not exist yet.
        required_bytes: bytes that all ranks' checkpoints will take.

    Raises:
        ResourceError: the bytes required, the bytes free and what to change.
    """
    free = shutil.disk_usage(existing_part(run_dir)).free
    if required_bytes > free:
        raise ResourceError(
            f"checkpoints need {required_bytes} bytes on the disk of {run_dir}, {free} are free: make room, choose "
            "another run_dir, checkpoint less often (checkpoint.interval_iterations), or set "
            "checkpoint.disk_limit_bytes"
        )


def host_buffers(config: CPSRConfig) -> int:
    """Host buffers of each rank, each of the size of its state.

    With four, a snapshot at every iteration keeps its promise also while the disk writes from one of them.
    """
    return 4 if config.memory.interval_iterations == 1 else 3


def existing_part(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists; absolute."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def kept_bytes(state_bytes: int, weight_bytes: int, config: CPSRConfig) -> int:
    """Disk space of a run's checkpoints: whole ones, the one being written, and the weights of the history.

    Args:
        state_bytes: of one checkpoint.
        weight_bytes: of the weights in it.
        config: the run's.
    """
    checkpoint, kept = config.checkpoint, Retention()
    copied = int(checkpoint.target is not None)  # stays whole while it is read
    # If the planner chooses the interval, it is not known yet: assume the longest.
    interval = checkpoint.interval_iterations or config.planner.interval_max_iterations
    verified = int(config.verification.budget_fraction > 0)
    full = (kept.full_checkpoints + 1 + copied + verified) * state_bytes
    history = kept.history_checkpoints(interval) * weight_bytes
    if checkpoint.disk_limit_bytes is not None:
        history = min(history, max(checkpoint.disk_limit_bytes - full, 0))  # retention drops history first
    return full + history


def available_host_bytes(cgroup_root: Path = _CGROUP_ROOT, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Memory that can still be allocated: on the machine, or within the tightest control group around us."""
    return min([psutil.virtual_memory().available, *_cgroup_headrooms(cgroup_root, own_cgroup)])


def _cgroup_headrooms(root: Path, own: Path) -> Iterator[int]:
    for path, limit_file, usage_file in _cgroups(root, own):
        limit, usage = _read_bytes(path / limit_file), _read_bytes(path / usage_file)
        if limit is not None and usage is not None:
            yield max(0, limit - usage + _reclaimable(path / "memory.stat"))


def _cgroups(root: Path, own: Path) -> Iterator[tuple[Path, str, str]]:
    """Our group and those around it, up to the mount, for version 2 and version 1 (`memory` controller)."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        _log.debug("no control groups to respect: %s", error)
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = mount / group.lstrip("/")
        # In a container the mount already is our group, and the path inside it does not exist.
        for path in {mount, inner, *inner.parents}:
            if path == mount or mount in path.parents:
                yield (path, *names)


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None  # the group does not limit memory, or is not mounted here
    return int(text) if text.isdigit() else None  # "max" is no limit


def _reclaimable(path: Path) -> int:
    """File cache that the kernel drops before it refuses memory."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
