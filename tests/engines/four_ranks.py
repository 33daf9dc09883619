"""What a rank of four holds of tensors that were counted through: run by `test_sharded.py`."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cpsr.checkpoint.write_assignment import WriteAssignment
from cpsr.engines import TorchAdapter
from cpsr.engines.distributed_tensors import local, part_of
from cpsr.learning.exchange import Exchange
from cpsr.ranks.group import Group

SPLIT: dict[str, list[Placement]] = {
    "rows, rows": [Shard(0), Shard(0)],
    "rows, columns": [Shard(0), Shard(1)],
    "columns, rows": [Shard(1), Shard(0)],
    "columns": [Replicate(), Shard(1)],
    "last dimension": [Replicate(), Shard(-1)],
    "replicas": [Replicate(), Replicate()],
}


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).view(shape)


def described(tensor: torch.Tensor, name: str, replicas: int) -> dict[str, Any]:
    part = part_of(tensor, name)
    place = {"global_shape": part.global_shape, "offset": part.offset, "block": part.block, "replicas": replicas}
    return place | {"values": local(tensor).reshape(-1).tolist()}


def counted_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(counted(tuple(parameter.shape)))
    return model


def find() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    parts: dict[str, Any] = {}
    for name, placements in SPLIT.items():
        replicas = 2 ** sum(one.is_replicate() for one in placements)
        parts[name] = described(distribute_tensor(counted((7, 5)), mesh, placements), name, replicas)
    parts["three dimensions"] = described(distribute_tensor(counted((2, 7, 3)), mesh, [Shard(1), Shard(2)]), "three", 1)

    model = counted_model()
    parallelize_module(model, mesh["second"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["first"])
    for name, parameter in model.named_parameters():
        parts[f"fsdp-tp {name}"] = described(parameter, name, 2 if name == "1.bias" else 1)
    both = TorchAdapter(model, torch.optim.SGD(model.parameters()))

    replicated = counted_model()[0]
    fully_shard(replicated, mesh=mesh)
    for name, parameter in replicated.named_parameters():
        parts[f"hsdp {name}"] = described(parameter, name, 2)
    hsdp = TorchAdapter(replicated, torch.optim.AdamW(replicated.parameters()))

    group = Group()
    exchange = Exchange(group, hsdp.shard(), hsdp.data_parallel_ranks)
    writes = WriteAssignment(hsdp.shard(), {}, hsdp.data_parallel_ranks, group)
    assert writes.replicated
    assert not WriteAssignment(both.shard(), {}, both.data_parallel_ranks, group).replicated
    others = writes.share(None).writers
    found = {
        "parts": parts,
        "fsdp-tp ranks": both.data_parallel_ranks,
        "hsdp ranks": hsdp.data_parallel_ranks,
        "writes": [name for name in hsdp.shard().operators if name not in others],
        "portions": {name: exchange.portion(name) for name in hsdp.shard().operators},
    }
    group.close()
    return found
