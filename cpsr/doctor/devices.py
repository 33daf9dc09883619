"""GPUs, their driver, and NCCL, as far as torch says."""

import os
from pathlib import Path
from typing import Any

from cpsr.doctor.finding import Finding, error, ok, size, warning
from cpsr.doctor.needs import Launched

__all__ = ["Devices", "check_devices", "find_devices"]

_DRIVER = Path("/proc/driver/nvidia/version")
Devices = dict[str, Any]
"""What torch and driver say: `problem`, `torch_cuda`, `names`, `memory_bytes`, `uuids`, `nccl`, `driver`, or None."""


def find_devices(driver: Path = _DRIVER) -> Devices:
    """What this process sees; torch initialises CUDA in it where there is a GPU."""
    import torch

    properties: list[Any] = []
    nccl = problem = None
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
        if count and torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except RuntimeError as error_of_cuda:  # a driver that is too old, a device that is lost
        problem = " ".join(str(error_of_cuda).split())
    return {
        "problem": problem,
        "torch_cuda": torch.version.cuda,
        "names": [one.name for one in properties],
        "memory_bytes": [one.total_memory for one in properties],
        # A build of torch that does not say it: as if no other rank saw the GPU, rather than a false warning.
        "uuids": [str(getattr(one, "uuid", f"{os.getpid()}-{index}")) for index, one in enumerate(properties)],
        "nccl": nccl,
        "driver": _driver_version(driver),
    }


def check_devices(found: Devices, launched: Launched, gpus: int | None = None) -> Finding:
    """Whether the ranks of this machine have a GPU each.

    Args:
        found: of `find_devices`, on the machine's first rank.
        launched: the job.
        gpus: that all ranks of the machine see together; None: those that are found.
    """
    names, driver = found["names"], found["driver"]
    if found["problem"] is not None:
        return error("devices", f"torch cannot use the GPUs ({found['problem']})", "see nvidia-smi and dmesg", **found)
    if not names:
        return _none(found)
    kinds = " and ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    memory = size(min(found["memory_bytes"]))
    text = f"{kinds} of {memory}, driver {driver or 'unknown'}, CUDA {found['torch_cuda']}, NCCL {found['nccl']}"
    if found["nccl"] is None:
        return warning("devices", text, "torch has no NCCL: ranks on GPUs cannot train together; install one that has")
    gpus = len(names) if gpus is None else gpus
    text += f"; the ranks here see {gpus} GPUs together" if gpus > len(names) else ""
    if launched.local_ranks > gpus:
        advice = f"{launched.local_ranks} ranks share {gpus} GPU{'s' if gpus > 1 else ''}; start one rank a GPU"
        return warning("devices", text, advice, **found)
    return ok("devices", text, **found)


def _none(found: Devices) -> Finding:
    if found["driver"] is None:
        return ok("devices", "no GPU, no driver, no NCCL: ranks train on the processor, over gloo", **found)
    why, advice = "torch is built without CUDA", "install a build of torch for this driver"
    if found["torch_cuda"]:
        why, advice = (
            f"torch, built for CUDA {found['torch_cuda']}, finds no GPU",
            "see nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    return warning("devices", f"a driver ({found['driver']}) is here, and {why}", advice, **found)


def _driver_version(path: Path) -> str | None:
    """From the first line, as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...`."""
    try:
        words = path.read_text(encoding="utf-8").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and word.replace(".", "").isdigit()), "unknown")
