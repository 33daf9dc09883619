"""Jobs whose parameters are split over ranks: by `fully_shard` (FSDP2), and by tensor parallelism."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cpsr.qualify.cells import CPU_OFFLOAD, HSDP, REPLICAS, Cell
from cpsr.qualify.models import TinySplitLM, token_batch
from cpsr.qualify.torch_cases import TorchJob, optimizer_of, scheduler_of

__all__ = ["fully_sharded_job", "mesh_of", "sharded", "split_job", "tensor_parallel", "tensor_parallel_job"]

EVEN_HIDDEN = 12  # torch's own layers of tensor parallelism divide activations in equal parts
LARGEST_NORM = 0.5  # below those of the tiny models, so that each step is clipped


def split_job(cell: Cell, device: torch.device | str, ranks: int, micro_batches: int, schedule: str) -> TorchJob:
    """The job of a cell whose parameters torch splits over the ranks.

    Args:
        cell: of engine `fsdp2` or `tp`.
        device: of this rank.
        ranks: of the job.
        micro_batches: of an iteration.
        schedule: as for `scheduler_of`.
    """
    if cell.engine == "tp":
        return tensor_parallel_job(device, ranks, cell.optimizer, micro_batches, schedule)
    mesh = (REPLICAS, ranks // REPLICAS) if cell.feature == HSDP else (ranks,)
    offload = cell.feature == CPU_OFFLOAD
    return fully_sharded_job(device, mesh, cell.precision, cell.optimizer, micro_batches, schedule, offload=offload)


def mesh_of(device: torch.device | str, *shape: int) -> DeviceMesh:
    """A mesh of all ranks; one dimension is for shards, the first of two for replicas."""
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh(torch.device(device).type, shape, mesh_dim_names=names)


def sharded(module: nn.Module, mesh: DeviceMesh, precision: str = "fp32", offload: bool = False, **more: Any) -> None:
    """Call `fully_shard` on the module and on one layer in it.

    Args:
        module: a `TinyLM`, on its device.
        mesh: of one dimension, or of two.
        precision: `fp32`, or `bf16` of forward and backward, with gradients summed in fp32.
        offload: keep parameters on the CPU.
        more: for `fully_shard`.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
    place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for one in (module.get_submodule("up"), module):
        fully_shard(one, mesh=mesh, mp_policy=policy, offload_policy=place, **more)


def fully_sharded_job(
    device: torch.device | str,
    mesh: Sequence[int],
    precision: str = "fp32",
    optimizer: str = "adamw",
    micro_batches: int = 1,
    schedule: str = "cosine",
    **more: Any,
) -> TorchJob:
    """A rank of a job of FSDP2, with clipped gradients that are summed over the ranks at the last micro-batch.

    Args:
        device: of this rank.
        mesh: shape, of all ranks.
        precision: as for `sharded`.
        optimizer: as for `optimizer_of`.
        micro_batches: of an iteration.
        schedule: as for `scheduler_of`.
        more: for `sharded`.
    """
    module = TinySplitLM().to(device)
    sharded(module, mesh_of(device, *mesh), precision, **more)
    tuned = optimizer_of(optimizer, module)
    job = TorchJob(module, tuned, scheduler_of(schedule, tuned), None, micro_batches)
    job.accumulating = summed_at_the_last(module)
    job.largest_norm = LARGEST_NORM
    return job


def summed_at_the_last(module: nn.Module) -> Callable[[bool], AbstractContextManager[Any]]:
    """Lets the ranks sum gradients of FSDP2 at the last micro-batch alone."""
    assert isinstance(module, FSDPModule)

    def accumulating(last: bool) -> AbstractContextManager[Any]:
        module.set_requires_gradient_sync(last)
        return nullcontext()

    return accumulating


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split two layers of a `TinyLM` with an even number of hidden units: one by rows, one by columns."""
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel_job(
    device: torch.device | str, ranks: int, optimizer: str = "adamw", micro_batches: int = 1, schedule: str = "cosine"
) -> TorchJob:
    """A rank of a job of tensor parallelism alone: all ranks train on the same batches.

    Args:
        device: of this rank.
        ranks: of the job.
        optimizer: as for `optimizer_of`.
        micro_batches: of an iteration.
        schedule: as for `scheduler_of`.
    """
    module = TinySplitLM(EVEN_HIDDEN).to(device)
    tensor_parallel(module, mesh_of(device, ranks))
    tuned = optimizer_of(optimizer, module)
    job = TorchJob(module, tuned, scheduler_of(schedule, tuned), None, micro_batches)
    job.batch = lambda step, micro, rank: token_batch(step, micro, 0)
    return job
