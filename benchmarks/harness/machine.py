"""Where and when a measurement was taken."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from cpsr.demo.device import CPU, describe_device, device_text

__all__ = ["busy_warning", "describe_machine", "machine_text", "measured_code"]

PACKAGES = ("cpsr", "torch", "deepspeed", "safetensors", "xxhash", "numpy")
GIT_SECONDS = 10.0
LOAD_PER_CORE_MAX = 0.25  # above it, other processes take turns with what is measured


def describe_machine(workdir: Path, device: str = CPU) -> dict[str, Any]:
    """Date, processor, the device that is measured on, memory, file system, commit and versions, as plain data."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu_model": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "device": describe_device(device),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
        "file_system": _file_system(workdir),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "code": measured_code(Path(__file__).resolve().parent),
        "versions": {package: version(package) for package in PACKAGES},
    }


def machine_text(machine: Mapping[str, Any]) -> str:
    """Processor and device, for people."""
    return f"{machine['cpu_model']}, {machine['cores']} cores, device: {device_text(machine['device'])}"


def measured_code(directory: Path) -> str | None:
    """The git commit of the sources there, with `+` where files differ from it; None where git does not have them."""
    tracked = _git(directory, "ls-files", "--error-unmatch", ".")  # an installed package may lie in another's checkout
    return _git(directory, "describe", "--always", "--abbrev=40", "--match=", "--dirty=+") if tracked else None


def busy_warning(machine: dict[str, Any]) -> str | None:
    """A line for the reader where other processes were running when the measurement began."""
    if machine["load_before"] <= LOAD_PER_CORE_MAX * machine["cores"]:
        return None
    return (
        f"the machine was busy before this began (load {machine['load_before']:.1f} on {machine['cores']} cores): "
        "take the figures again when it is quiet"
    )


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _file_system(path: Path) -> str:
    mounts = [disk for disk in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(disk.mountpoint)]
    return str(max(mounts, key=lambda disk: len(disk.mountpoint)).fstype) if mounts else "unknown"
