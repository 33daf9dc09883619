"""The device that the demo and the benchmarks train on: chosen by `--device`, described in results, joined by ranks.

Importing this module imports nothing heavy: the command line does.
"""

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from cpsr.errors import ConfigError

__all__ = [
    "CPU",
    "CUDA",
    "Device",
    "backend_of",
    "describe_device",
    "device_text",
    "find_device",
    "join_ranks",
    "rank_environment",
]

CPU, CUDA = "cpu", "cuda"


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
    """The device as plain data: `kind` and, of a GPU, `name`, `count` and `cuda` (torch's)."""
    if device == CPU:
        return {"kind": CPU}
    import torch

    return {
        "kind": CUDA,
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }


def device_text(described: Mapping[str, Any]) -> str:
    """What `describe_device` returned, for people."""
    if described["kind"] == CPU:
        return CPU
    return f"{described['count']} x {described['name']} (CUDA {described['cuda']})"


def _obstacle(cuda_version: str | None) -> str:
    if cuda_version is None:
        return "this build of torch has no CUDA; install one that has"
    return f"torch, built for CUDA {cuda_version}, finds no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def rank_environment(device: str) -> dict[str, str]:
    """Environment variables of the ranks, set before they import DeepSpeed."""
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device}  # one thread a rank: two ranks on two cores
    return variables | ({"CUDA_VISIBLE_DEVICES": ""} if device == CPU else {})


def backend_of(ranks: int, gpus: int) -> str:
    """The backend of a machine's ranks: `nccl` where each has a GPU of its own, else `gloo` (also without GPUs)."""
    return "nccl" if gpus >= ranks else "gloo"


def join_ranks(init_method: str = "env://") -> None:
    """Join the other ranks of the job over NCCL or gloo; called in each rank.

    Where ranks share GPUs, `LOCAL_RANK`, which is DeepSpeed's number of the GPU, is set to that of the shared one.

    Args:
        init_method: where the ranks meet, as of `torch.distributed.init_process_group`.
    """
    import deepspeed
    import torch

    # Without this, DeepSpeed compiles a shared-memory collective for 70 s, and leaves its memory behind when killed.
    # The dictionary is replaced: reading it would first look for each operator, and run a C compiler.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = deepspeed.accelerator.get_accelerator().device_name() == CUDA
    gpus = torch.cuda.device_count() if on_gpu else 0
    backend = backend_of(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), gpus)
    if on_gpu and backend == "gloo":
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
        # By torch, and not by DeepSpeed, which binds the group to the GPU: gloo cannot split a group that is bound.
        torch.distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=ranks)
    deepspeed.init_distributed(
        backend, auto_mpi_discovery=False, verbose=False, init_method=init_method, rank=rank, world_size=ranks
    )
