"""The conformance cases of parameters that FSDP2 or tensor parallelism split; run by `worker.py` on two ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from cpsr.engines import TorchAdapter
from cpsr.engines.distributed_tensors import local
from cpsr.engines.moe.token_counts import MixtureOfExperts
from cpsr.engines.offload import offloaded_activations
from cpsr.errors import ConfigError, UnsupportedEngineError
from cpsr.qualify.cells import Cell
from cpsr.qualify.conformance import (
    AFTER,
    check_early_state,
    check_resume,
    inject,
    run,
    seed,
    take_snapshot,
)
from cpsr.qualify.torch_jobs import (
    TinyLM,
    TinySplitLM,
    TorchJob,
    mesh_of,
    optimizer_of,
    scaler_on,
    sharded,
    token_batch,
    torch_job,
)
from tests.device import DEVICE, ON_CUDA
from tests.engines.torch_cases import counts_of, ddp_job

RANKS = 2
TP = partial(torch_job, Cell("tp", None, "fp32"), DEVICE, RANKS)


def fsdp_job(precision: str = "fp32", optimizer: str = "adamw", **more: Any) -> TorchJob:
    return torch_job(Cell("fsdp2", None, precision, optimizer), DEVICE, RANKS, **more)


def hybrid_job(**more: Any) -> TorchJob:
    """Two replicas of one shard each."""
    return fsdp_job(mesh=mesh_of(DEVICE, RANKS, 1), **more)


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(found, value)
    return found


def assert_makes_up_the_model(job: TorchJob) -> None:
    """The slices of all ranks, each put where it says that it belongs, are the whole parameters."""
    pieces = gathered(
        {
            name: (one.parameter.offset, one.parameter.block, one.parameter.values.clone())
            for name, one in job.adapter.shard().operators.items()
        }
    )
    for name, parameter in job.module.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        mine = torch.full_like(whole, torch.nan)
        for part in pieces:
            if name not in part:
                continue
            offset, block, values = part[name]
            if block is None:
                mine.view(-1)[offset : offset + values.numel()] = values
            else:
                rows, columns = divmod(offset, whole.shape[1])
                mine[rows : rows + block[0], columns : columns + block[1]] = values.view(block)
        assert torch.equal(mine, whole), name


def fsdp_is_resumed(**options: Any) -> None:
    """Each rank has a slice of uneven size, or nothing of a parameter; the views are the shards, and stay in place."""
    result = check_resume(partial(fsdp_job, **options), skip=3)
    assert len(result["evaluations"]) == AFTER
    described = gathered(result["description"])
    tensors = [one["tensors"] for one in described]
    assert described[0]["precision"] == options.get("precision", "fp32")
    assert [one["up.weight"]["numel"] for one in tensors] == [7 * 7, 6 * 7]
    assert [one["up.weight"]["offset"] for one in tensors] == [0, 7 * 7]
    assert [one["gain"]["numel"] for one in tensors] == [1, 0]
    assert all(one["up.weight"]["dtype"] == "float32" for one in tensors)

    seed(1)
    job = fsdp_job(**options)
    assert job.adapter.data_parallel_ranks == [0, 1]
    assert job.adapter.device.type == torch.device(DEVICE).type
    assert_makes_up_the_model(job)
    before = {key: view.data_ptr() for key, view in job.adapter.shard().tensors()}
    assert ("param/gain" in before) == (job.adapter.rank == 0)
    run(job, 0, 1)  # creates the moments
    addresses = {key: view.data_ptr() for key, view in job.adapter.shard().tensors()}
    moved = [key for key, at in before.items() if key.startswith("param/") and addresses[key] != at]
    assert not moved or job.adapter.rank == 1  # older torch pads uneven shards anew in the first forward; views follow
    run(job, 1, 1)
    assert {key: view.data_ptr() for key, view in job.adapter.shard().tensors()} == addresses
    parameters = dict(job.module.named_parameters())
    assert addresses["param/up.weight"] == local(parameters["up.weight"]).data_ptr()


def hsdp_is_resumed() -> None:
    result = check_resume(partial(hybrid_job, micro_batches=2))
    assert gathered(result["snapshot"]["tensors"]["param/up.weight"].tolist()) == 2 * [
        result["snapshot"]["tensors"]["param/up.weight"].tolist()
    ]
    assert result["description"]["tensors"]["up.weight"]["layout"] == "R, S(0) over ranks [[0], [1]]"
    assert hybrid_job().adapter.data_parallel_ranks == [0, 1]


def tensor_parallel_is_resumed() -> None:
    """One layer is split by rows and one by columns; each rank has all of the others."""
    result = check_resume(partial(TP, micro_batches=2), skip=3)
    tensors = gathered(result["description"]["tensors"])
    assert [(one["up.weight"]["offset"], one["up.weight"]["numel"]) for one in tensors] == [(0, 42), (42, 42)]
    assert [(one["down.weight"]["offset"], one["down.weight"]["numel"]) for one in tensors] == [(0, 42), (6, 42)]
    assert tensors[0]["embed.weight"]["numel"] == 11 * 7
    seed(1)
    job = TP()
    shard, rank = job.adapter.shard(), job.adapter.rank
    assert shard.operators["up.weight"].parameter.block is None
    assert shard.operators["down.weight"].parameter.block == (7, 6)
    assert job.adapter.data_parallel_ranks == [rank]
    assert_makes_up_the_model(job)


def outside_the_optimizer(build: Callable[[], TorchJob]) -> TorchJob:
    """Frozen parameters are no operators, but parts of them are saved."""
    job = build()
    trained = [one for one in job.module.parameters() if one.requires_grad]
    found = TorchJob(job.module, torch.optim.SGD(trained, lr=0.1, momentum=0.9))
    found.accumulating = job.accumulating
    return found


def frozen_parameters() -> None:
    result = check_resume(partial(outside_the_optimizer, fsdp_job))
    tensors = gathered(result["description"]["tensors"])
    assert [one["frozen.weight"]["numel"] for one in tensors] == [4 * 7, 3 * 7]
    assert [one["frozen.weight"]["offset"] for one in tensors] == [0, 4 * 7]


def ddp_without_sync() -> TorchJob:
    job = ddp_job()
    assert isinstance(job.called, DistributedDataParallel)
    wrapper = job.called
    whole = job.accumulating
    job.accumulating = lambda last: whole(last) if last else wrapper.no_sync()
    job.largest_norm = 0.5
    return job


def what_is_written_reaches_the_next_forward() -> None:
    """A forward without gradients leaves gathered parameters; what was restored must not be hidden by them."""
    seed(1)
    job = fsdp_job()
    tokens, targets = (one.to(DEVICE) for one in token_batch(0, 0, 0))
    run(job, 0, 2)
    snapshot = take_snapshot(job.adapter)
    with job.adapter.evaluation():
        wanted = job.adapter.evaluate((tokens, targets), {})
    run(job, 2, 2)
    job.module.eval()
    with torch.no_grad():
        assert job.called(tokens, targets) != wanted
        root = {type(one).__name__ for one in job.module.parameters(recurse=False)}
        assert root == {"Parameter"}  # the user's evaluation has gathered them
        assert job.adapter.shard().operators.keys() >= {"up.weight", "embed.weight"}
        assert job.adapter.describe()["tensors"]["embed.weight"]["shape"] == [11, 7]
        inject(job.adapter, snapshot)
        assert job.called(tokens, targets) == wanted
    adapter = TorchAdapter(job.module, job.optimizer)  # of a module with gathered parameters
    assert adapter.shard().operators.keys() == job.adapter.shard().operators.keys()


def a_snapshot_is_copied_while_the_next_step_runs() -> None:
    """Nothing but the optimizer's step writes into the shards."""
    seed(1)
    job = fsdp_job(precision="bf16", micro_batches=2)
    run(job, 0, 1)
    views = [view for key, view in job.adapter.shard().tensors() if not key.startswith("other/")]
    before, seen = [view.clone() for view in views], []

    def compare(*_: Any) -> None:
        seen.append(all(torch.equal(view, copy) for view, copy in zip(views, before, strict=True)))

    handle = job.optimizer.register_step_pre_hook(compare)
    job.train_step(1)
    handle.remove()
    assert seen == [True]
    assert not all(torch.equal(view, copy) for view, copy in zip(views, before, strict=True))


def views_follow_replaced_moments() -> None:
    """As after the user's `load_state_dict` of the optimizer."""
    seed(1)
    job = fsdp_job()
    run(job, 0, 1)
    job.adapter.shard()
    state = job.optimizer.state[dict(job.module.named_parameters())["up.weight"]]
    state["exp_avg"] = state["exp_avg"].clone()
    moment = job.adapter.shard().operators["up.weight"].moments["exp_avg"]
    assert moment.data_ptr() == local(state["exp_avg"]).data_ptr()


def weight_of(values: torch.Tensor) -> nn.Module:
    """A layer with this weight."""
    module = nn.Linear(values.shape[1], values.shape[0], bias=False)
    module.weight = nn.Parameter(values)
    return module


def refused() -> None:
    """Each with what it is, and what to do instead."""
    flat = FullyShardedDataParallel(nn.Linear(4, 4).to(DEVICE), device_id=torch.device(DEVICE))
    for module in (flat, nn.Sequential(flat)):
        with pytest.raises(UnsupportedEngineError, match=r"sharded by FSDP1.*torch\.distributed\.fsdp\.fully_shard"):
            TorchAdapter(module, torch.optim.SGD(module.parameters()))

    mesh, values = mesh_of(DEVICE, RANKS), torch.zeros(4, 4, device=DEVICE)
    addends = weight_of(DTensor.from_local(values, mesh, [Partial()]))
    with pytest.raises(UnsupportedEngineError, match=r"weight is placed as P.*holds no block of it; use Shard"):
        TorchAdapter(addends, torch.optim.SGD(addends.parameters()))

    rows = torch.zeros(1 + 2 * torch.distributed.get_rank(), 5, device=DEVICE)
    uneven = weight_of(DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size((4, 5)), stride=(5, 1)))
    with pytest.raises(UnsupportedEngineError, match=r"weight of shape \(4, 5\) is split in parts of sizes that CPSR"):
        TorchAdapter(uneven, torch.optim.SGD(uneven.parameters()))

    buffered = nn.Linear(4, 4).to(DEVICE)
    buffered.register_buffer("split", distribute_tensor(values, mesh, [Shard(0)]))
    with pytest.raises(UnsupportedEngineError, match=r"buffer split of shape .* is split over ranks"):
        TorchAdapter(buffered, torch.optim.SGD(buffered.parameters()))

    columns = weight_of(distribute_tensor(values, mesh, [Shard(1)]))
    with pytest.raises(UnsupportedEngineError, match=r"weight is split in blocks over ranks.*experts="):
        TorchAdapter(columns, torch.optim.SGD(columns.parameters()), experts=MixtureOfExperts(counts_of))


def gathered_weights_are_no_activations() -> None:
    with (
        pytest.raises(ConfigError, match="fully_shard gathers the weights of a layer"),
        offloaded_activations(fsdp_job().adapter, 1, 1 << 30, print),
    ):
        pass
    job = TP()
    with offloaded_activations(job.adapter, 1, 1 << 30, lambda *_: None):
        job.train_step(0)  # the storage of a split parameter is that of its part


def ranks_of_other_meshes() -> None:
    """Ranks that split a batch are those of the mesh of FSDP2, and of DDP's group around split parameters."""
    alone = torch_job(Cell("torch", None, "fp32", "sgd"), DEVICE, ranks=1)
    assert alone.adapter.data_parallel_ranks == [0, 1]
    rank = torch.distributed.get_rank()
    mesh = mesh_of(DEVICE, RANKS, 1)["shard"]
    module = TinyLM().to(DEVICE)
    fully_shard(module, mesh=mesh)
    assert isinstance(module, FSDPModule)
    assert TorchAdapter(module, optimizer_of("sgd", module)).data_parallel_ranks == [rank]
    replicated = nn.Linear(4, 4).to(DEVICE)
    weight = distribute_tensor(replicated.weight.detach(), mesh_of(DEVICE, RANKS), [Replicate()])
    replicated.weight = nn.Parameter(weight)
    adapter = TorchAdapter(replicated, torch.optim.SGD(replicated.parameters()))
    assert adapter.data_parallel_ranks == [rank]
    assert adapter.shard().operators["weight"].parameter.numel == 16


def with_scaler() -> TorchJob:
    """Steps that overflow are skipped on all ranks together."""
    module = TinySplitLM().to(DEVICE)
    sharded(module, mesh_of(DEVICE, RANKS))
    optimizer = optimizer_of("adamw", module)
    return TorchJob(module, optimizer, None, scaler_on(DEVICE))


def kept_gathered(**options: Any) -> TorchJob:
    return fsdp_job(reshard_after_forward=False, **options)


SHARDED: dict[str, Callable[[], Any]] = {
    "fsdp2-fp32": fsdp_is_resumed,
    "fsdp2-bf16": partial(fsdp_is_resumed, precision="bf16", micro_batches=2),
    "fsdp2-sgd": partial(fsdp_is_resumed, optimizer="sgd"),
    "fsdp2-kept-gathered": partial(check_resume, kept_gathered),
    "fsdp2-offload": partial(check_resume, partial(fsdp_job, offload_policy=CPUOffloadPolicy(pin_memory=ON_CUDA))),
    "fsdp2-scaler": partial(check_resume, with_scaler),
    "fsdp2-frozen": frozen_parameters,
    "fsdp2-early-state": partial(check_early_state, fsdp_job),
    "fsdp2-written": what_is_written_reaches_the_next_forward,
    "fsdp2-copied-beside": a_snapshot_is_copied_while_the_next_step_runs,
    "fsdp2-replaced": views_follow_replaced_moments,
    "hsdp": hsdp_is_resumed,
    "tp": tensor_parallel_is_resumed,
    "tp-early-state": partial(check_early_state, TP),
    "ddp-no-sync": partial(check_resume, ddp_without_sync),
    "sharded-refused": refused,
    "sharded-offload": gathered_weights_are_no_activations,
    "sharded-ranks": ranks_of_other_meshes,
}
