"""Ranks of a job that trains on the CPU or on GPUs: their environment, and the group that they join."""

import os

from cpsr.demo.device import CPU, CUDA

__all__ = ["backend_of", "join_ranks", "rank_environment"]


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
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
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
