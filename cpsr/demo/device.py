"""The device that the demo and the benchmarks train on: chosen by `--device`, and described in every result.

Importing this module imports nothing heavy: the command line does.
"""

import subprocess
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from cpsr.errors import ConfigError

__all__ = ["CPU", "CUDA", "Device", "describe_device", "device_text", "find_device"]

CPU, CUDA = "cpu", "cuda"
NVIDIA_SMI_SECONDS = 10.0


class Device(StrEnum):
    """What `--device` takes."""

    AUTO = "auto"
    CPU = CPU
    CUDA = CUDA


def find_device(wanted: str = Device.AUTO) -> str:
    """`cpu` or `cuda`: the wanted one, or for `auto` CUDA where torch finds a GPU.

    Raises:
        ConfigError: CUDA is wanted, and torch finds no GPU.
    """
    import torch

    available = torch.cuda.is_available()
    if wanted == Device.CUDA and not available:
        raise ConfigError(f"--device cuda: {_obstacle(torch.version.cuda)}, or take --device cpu. Nothing was started")
    return CUDA if wanted != Device.CPU and available else CPU


def describe_device(device: str) -> dict[str, Any]:
    """The device as plain data: `kind` and, of a GPU, `name`, `count`, `cuda` (torch's) and `driver` (or None)."""
    if device == CPU:
        return {"kind": CPU}
    import torch

    return {
        "kind": CUDA,
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def device_text(described: Mapping[str, Any]) -> str:
    """What `describe_device` returned, for people."""
    if described["kind"] == CPU:
        return CPU
    driver = "unknown" if described["driver"] is None else described["driver"]
    return f"{described['count']} x {described['name']} (CUDA {described['cuda']}, driver {driver})"


def _obstacle(cuda_version: str | None) -> str:
    if cuda_version is None:
        return "this build of torch has no CUDA; install one that has"
    return f"torch, built for CUDA {cuda_version}, finds no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a driver without its tools
        return None
    versions = done.stdout.split()
    return versions[0] if done.returncode == 0 and versions else None
