"""One rank of a small job whose global batch stays when the number of ranks changes, or whose ranks split its tensors.

The state at the start and at the end is left as whole parameters and moments, put together from all ranks' slices, and
as digests of each rank's own.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.engines.adapter import EngineAdapter
from cpsr.state.frozen_parameters import FrozenPlace
from tests.committed import keep_pace
from tests.device import DEVICE
from tests.recovery.engines import (
    EXPERTS,
    FEATURES,
    ITEMS,
    WIDTH,
    Mixture,
    Regression,
    configuration,
    dataset,
    initialize,
    pipeline,
)
from tests.recovery.worker import (
    SAVE_SECONDS,
    Faults,
    always_predict,
    initialize_ranks,
    seed,
    state_digest,
    train_pipeline,
)
from tests.recovery.worker import Options as WorkerOptions

GLOBAL_BATCH = 12
SPLIT = 2  # ranks that share the tensors of `tp`; others hold the same


@dataclass(frozen=True)
class Options(WorkerOptions):
    """What one life of the job does.

    Attributes:
        kind: `ddp`, `fsdp2`, `hsdp` (replicas), `tp` (tensor parallelism, the same batches for all), or with the stage
            `zero` `deepspeed`, `mixture`, of which several ranks share the experts, or `pipeline` of so many `stages`.
        batch_size: of a rank; the accumulation follows from it.
        dropout: of the model; with it the random states of each rank matter.
        base: seed of frozen weights that the script loads; 0: the model has none.
        moving: whether the loop writes to some of them in each step.
    """

    kind: str = "deepspeed"
    batch_size: int = 1
    dropout: float = 0.0
    base: int = 0
    moving: bool = False


class Adapted(torch.nn.Linear):
    """A trained layer beside a frozen one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(FEATURES, WIDTH)
        self.base = torch.nn.Parameter(torch.randn(WIDTH, FEATURES, generator=generator), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.nn.functional.linear(x, self.base)


class AdaptedRegression(Regression):
    """With frozen weights, and a frozen matrix of odd sizes that a loop may write to."""

    def __init__(self, base: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base)
        self.layers[0] = Adapted(generator)
        self.teacher = torch.nn.Parameter(torch.randn(5, 3, generator=generator), requires_grad=False)


def model(options: Options, ranks: int) -> Any:
    if options.stages:
        return pipeline(options.stages, options.expert_parallel, options.routed)
    if options.kind == "mixture":
        return Mixture(math.gcd(ranks, EXPERTS))
    return (AdaptedRegression(options.base) if options.base else Regression()).to(DEVICE)


class Loop:
    """The engine and one step of it on a micro-batch."""

    def __init__(self, options: Options, ranks: int) -> None:
        bare = model(options, ranks)
        for one in bare.modules():
            if isinstance(one, torch.nn.Dropout):
                one.p = options.dropout
        self.module: Any = bare
        self.parts = 1 if options.kind == "tp" else ranks // max(options.stages, 1)  # data-parallel
        self.steps, self.taken = GLOBAL_BATCH // (self.parts * options.batch_size), 0
        self.engine: Any = None
        if options.kind in ("deepspeed", "mixture", "pipeline"):
            config = configuration(options.zero, options.precision, self.steps)
            self.engine = initialize(self.module, config | {"train_micro_batch_size_per_gpu": options.batch_size})
            return
        if options.kind == "ddp":
            self.module = DistributedDataParallel(self.module)
        elif options.kind == "tp":
            split = {"layers.0": ColwiseParallel(), "layers.3": RowwiseParallel()}
            mesh = init_device_mesh(DEVICE, (ranks // SPLIT, SPLIT), mesh_dim_names=("replicate", "split"))
            parallelize_module(self.module, mesh["split"], split)
        else:  # the last layer has one output, of which the last rank has nothing
            shape = (ranks, 1) if options.kind == "hsdp" else (ranks,)
            mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for one in (self.module.layers[0], self.module):
                fully_shard(one, mesh=mesh)
        trained = [one for one in self.module.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=2e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
        self.adapter = TorchAdapter(self.module, self.optimizer, self.schedule, micro_batches_per_iteration=self.steps)

    @property
    def given(self) -> Any:
        return self.adapter if self.engine is None else self.engine

    def train_on(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs, targets = inputs.to(DEVICE), targets.to(DEVICE)
        if self.engine is not None:
            loss: torch.Tensor = self.engine(inputs, targets)
            self.engine.backward(loss)
            self.engine.step()
            return loss.detach()
        loss = self.module(inputs, targets)
        torch.autograd.backward(loss / self.steps)
        self.taken += 1
        if self.taken % self.steps == 0:
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return loss.detach()


def main(options: Options, rank: int, ranks: int) -> None:
    faults = Faults(options, rank)
    if options.config.get("mode") == "predict":
        always_predict()
    initialize_ranks(options.result)
    seed()
    data = dataset()
    loop = Loop(options, ranks)
    part = loop.engine.grid.get_data_parallel_id() if options.stages else rank % loop.parts
    sampler: DistributedSampler[Any] = DistributedSampler(data, loop.parts, part, seed=3)
    batches: DataLoader[Any] = DataLoader(data, options.batch_size, sampler=sampler)
    dealt: list[list[int]] = []
    losses: dict[int, float] = {}
    recovery = CPSRRecovery(loop.given, options.config)
    events: list[Any] = []
    recovery.on_event(events.append)
    with recovery:
        restored = recovery.restored
        started: dict[str, Any] = {"iteration": recovery.iteration, "method": restored.method}
        started["failure_iteration"] = restored.failure_iteration
        started["ranks"] = [events[0].previous_ranks, events[0].ranks]
        started["whole"] = whole(recovery.life.job.adapter, rank)
        started |= {"state": state_digest(recovery), "replicas": replicas(recovery.life.job.adapter)}
        started["scalars"] = {key: str(value) for key, value in small(recovery).items()}
        if options.stages:
            dealt = train_pipeline(recovery, loop.engine, batches, options, faults)
        for inputs, targets, indices in recovery.resume(batches, repeat=True) if not options.stages else ():
            faults.at_batch(recovery.iteration, loop.taken % loop.steps)
            iteration = recovery.iteration + 1
            if options.moving and loop.taken % loop.steps == 0:  # within the step: a dump is of its end
                with torch.no_grad():
                    recovery.life.job.adapter.frozen()["teacher"].add_(iteration)
            loss = float(loop.train_on(inputs, targets)) * len(indices) / GLOBAL_BATCH
            losses[iteration] = losses.get(iteration, 0.0) + loss
            dealt.append([iteration, *indices.tolist()])
            keep_pace(recovery, SAVE_SECONDS)
            if recovery.iteration >= options.iterations:
                break
        ended: dict[str, Any] = {"whole": whole(recovery.life.job.adapter, rank), "draw": torch.rand(()).item()}
        ended["scalars"] = {key: str(value) for key, value in small(recovery).items()}
        ended["state"] = state_digest(recovery)
    options.leave(rank, {"started": started, "ended": ended, "batches": dealt, "losses": losses})
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def small(recovery: CPSRRecovery) -> dict[str, Any]:
    """What of the engine's small state does not depend on the number of ranks."""
    scalars = recovery.life.job.adapter.scalars()
    counters = {key: value for key, value in scalars.get("counters", {}).items() if key != "micro_steps"}
    return {"counters": counters, "schedule": scalars["schedule"], "steps": steps(scalars["optimizer_steps"])}


def steps(numbers: list[dict[str, Any]]) -> list[float]:
    return sorted({float(value) for one in numbers for value in one.values()})


def whole(adapter: EngineAdapter, rank: int) -> dict[str, list[float]]:
    """Weights, moments and frozen weights of all ranks' slices, but blocks; rank 0 has them, a collective."""
    found: list[Any] = [None] * torch.distributed.get_world_size()
    own, shard, places = [], adapter.shard(), adapter.frozen_places()
    for name, tensor in adapter.frozen().items():
        place = places.get(name, FrozenPlace(tuple(tensor.shape)))
        own.append((f"frozen/{name}", place.global_shape, place.offset, tensor.flatten().tolist()))
    for key, tensor in shard.tensors():
        kind, _, name = key.rpartition("/")
        if kind != "other" and (piece := shard.operators[name].parameter).block is None:
            own.append((key, piece.global_shape, piece.offset, tensor.tolist()))
    torch.distributed.all_gather_object(found, own)
    wholes: dict[str, list[float]] = {}
    for key, shape, offset, values in (part for parts in found for part in parts) if rank == 0 else ():
        numel = int(torch.Size(shape).numel())
        wholes.setdefault(key, [float("nan")] * numel)[offset : offset + len(values)] = values
    return wholes


def replicas(adapter: EngineAdapter) -> dict[str, list[float]]:
    """The weights of which this rank holds all."""
    parameters = {name: one.parameter for name, one in adapter.shard().operators.items()}
    return {
        name: one.values.tolist()
        for name, one in parameters.items()
        if one.block is None and one.values.numel() == torch.Size(one.global_shape).numel()
    }


assert ITEMS % GLOBAL_BATCH == 0
