"""One rank of a small job whose parameters FSDP2 or tensor parallelism split, which can kill itself."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cpsr import CPSRRecovery, TorchAdapter
from tests.committed import keep_pace
from tests.device import DEVICE
from tests.recovery import worker
from tests.recovery.engines import Regression, dataset, loader
from tests.recovery.worker import SAVE_SECONDS, Faults, initialize_ranks, rng_digest, seed, state_digest

MICRO_BATCHES = 2
LARGEST_NORM = 0.5


@dataclass(frozen=True)
class Options(worker.Options):
    """What one life of the job does.

    Attributes:
        kind: `fsdp2`, `bf16` (FSDP2 with forwards in bf16), `hsdp` or `tp`.
        accumulating: gradients are summed over two batches, without the other ranks at the first.
    """

    kind: str = "fsdp2"
    accumulating: bool = False


def split(module: nn.Module, kind: str, ranks: int) -> None:
    """The second layer has one output: with FSDP2 the last rank has nothing of it."""
    if kind == "tp":
        mesh = init_device_mesh(DEVICE, (ranks,))
        parallelize_module(module, mesh, {"layers.0": ColwiseParallel(), "layers.3": RowwiseParallel()})
        return
    shape = (ranks, 1) if kind == "hsdp" else (ranks,)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "bf16" else MixedPrecisionPolicy()
    for one in (module.get_submodule("layers.0"), module):
        fully_shard(one, mesh=mesh, mp_policy=policy)


class Loop:
    """The model and its training."""

    def __init__(self, options: Options, ranks: int) -> None:
        self.module = Regression().to(DEVICE)
        split(self.module, options.kind, ranks)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=2e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
        self.schedule = schedule
        self.parts = MICRO_BATCHES if options.accumulating else 1
        self.adapter = TorchAdapter(self.module, self.optimizer, schedule, micro_batches_per_iteration=self.parts)
        self.synchronize: Callable[[bool], object] = getattr(
            self.module, "set_requires_gradient_sync", lambda last: None
        )
        self.clips = options.kind != "tp"  # torch cannot clip plain and split gradients together
        self.taken = 0

    def train_on(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.taken += 1
        last = self.taken % self.parts == 0
        self.synchronize(last)
        (self.module(inputs.to(DEVICE), targets.to(DEVICE)) / self.parts).backward()
        if not last:
            return
        if self.clips:
            nn.utils.clip_grad_norm_(self.module.parameters(), LARGEST_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def main(options: Options, rank: int, ranks: int) -> None:
    faults = Faults(options, rank)
    initialize_ranks(options.result)
    seed()
    loop = Loop(options, ranks)
    data = loader(dataset(), *((1, 0) if options.kind == "tp" else (ranks, rank)))
    dealt: list[list[int]] = []
    with CPSRRecovery(loop.adapter, options.config) as recovery:
        started = {"iteration": recovery.iteration, "method": recovery.restored.method}
        state_at_start = state_digest(recovery)
        replicas_at_start = replicas_digest(recovery)
        for inputs, targets, indices in recovery.resume(data, repeat=True):
            faults.at_batch(recovery.iteration, loop.taken % loop.parts)
            loop.train_on(inputs, targets)
            keep_pace(recovery, SAVE_SECONDS)
            dealt.append([recovery.iteration, *indices.tolist()])
            if recovery.iteration >= options.iterations:
                break
        final = {"iteration": recovery.iteration, "state": state_digest(recovery), "rng": rng_digest()}
        final |= {"rates": loop.schedule.get_last_lr()}
    started |= {"state": state_at_start, "replicas": replicas_at_start}
    options.leave(rank, {"started": started, "batches": dealt, "final": final})
    torch.distributed.destroy_process_group()  # or gloo's threads may abort the exit


def replicas_digest(recovery: CPSRRecovery) -> str:
    """The weights of which this rank holds all."""
    operators = recovery.life.job.adapter.shard().operators.items()
    whole = {name: one.parameter.values.tolist() for name, one in operators if one.parameter.block is None}
    shapes = {name: one.parameter.global_shape for name, one in operators}
    return json.dumps({name: one for name, one in whole.items() if len(one) == torch.Size(shapes[name]).numel()})
