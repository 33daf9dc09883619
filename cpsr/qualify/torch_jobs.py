"""Tiny jobs in plain torch, by cell: one process, DDP, FSDP2 and tensor parallelism; and their model and batches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from cpsr.engines import TorchAdapter
from cpsr.engines.moe.token_counts import MixtureOfExperts
from cpsr.qualify.cells import Cell
from cpsr.qualify.conformance import OVERFLOW, OVERFLOWING_STEPS

__all__ = ["BATCH", "HIDDEN", "LENGTH", "VOCABULARY", "WIDTH", "TinyLM", "TinySplitLM", "TorchJob", "adamw_of"]
__all__ += ["mesh_of", "optimizer_of", "scaler_on", "sharded", "token_batch"]
__all__ += ["torch_job"]

Device = torch.device | str
VOCABULARY, WIDTH, HIDDEN = 11, 7, 13  # odd, so that partitions straddle tensors and end in padding
EVEN_HIDDEN = 12  # torch's own layers of tensor parallelism divide activations in equal parts
BATCH, LENGTH = 2, 3
LARGEST_NORM = 0.5  # below those of the tiny models, so that each step is clipped


class TinyLM(nn.Module):
    """Tied embedding, dropout, a frozen layer, and a buffer that changes in training and matters for the loss."""

    drift: torch.Tensor

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, hidden)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("drift", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        """The loss of token sequences, times a factor with which a test can make it overflow."""
        hidden = self.embed(tokens)
        hidden = hidden + self.frozen(hidden) + self.drift.to(hidden.dtype)
        hidden = hidden + self.down(self.dropout(torch.relu(self.up(hidden))))
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.9).add_(hidden.float().mean((0, 1)).to(self.drift.dtype), alpha=0.1)
        loss = functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())
        return loss * loss_factor


class TinySplitLM(TinyLM):
    """One to be split over ranks: with a parameter of one element, so that all ranks but one hold nothing of it."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__(hidden)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        """As of `TinyLM`, times that parameter."""
        return super().forward(tokens, targets, loss_factor) * self.gain.squeeze()


def token_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one micro-batch, int64 of shape `(BATCH, LENGTH)`, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class TorchJob:
    """The loop that `TorchAdapter` documents; batches go to the device of the module.

    Args:
        module: whose parameters are trained.
        optimizer: of them; or several.
        scheduler: steps after the optimizer, if there is one.
        grad_scaler: scales losses, which overflow at given steps, if there is one.
        micro_batches: of an iteration.
        called: wrapper of the module, as for DDP; by default the module.
        experts: how layers of experts are read.

    Attributes:
        adapter: the engine, for `CPSRRecovery` too.
        batch: tokens and targets of a step, a micro-batch and a rank.
        autocast: dtype of forwards; None: no autocast.
        largest_norm: gradients are clipped to it; None: they are not.
        accumulating: gives what surrounds forward and backward of a micro-batch, by whether it is the step's last.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        grad_scaler: Any = None,
        micro_batches: int = 1,
        called: nn.Module | None = None,
        experts: MixtureOfExperts | None = None,
    ) -> None:
        self.optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self.module, self.optimizer = module, self.optimizers[-1]
        self.scheduler, self.scaler = scheduler, grad_scaler
        self.called, self.micro_batches = called or module, micro_batches
        self.batch: Callable[[int, int, int], tuple[torch.Tensor, ...]] = token_batch
        self.autocast: torch.dtype | None = None
        self.largest_norm: float | None = None
        self.accumulating: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext()
        self.adapter = TorchAdapter(self.called, self.optimizers, scheduler, grad_scaler, micro_batches, experts)

    def train_step(self, step: int) -> None:
        """Train one iteration on the batches of this step; with a scaler, some overflow."""
        batches = [self.batch(step, micro, self.adapter.rank) for micro in range(self.micro_batches)]
        overflows = self.scaler is not None and step in OVERFLOWING_STEPS
        self.train_on(batches, OVERFLOW * OVERFLOW if overflows else 1.0)

    def train_on(self, batches: Sequence[Sequence[torch.Tensor]], factor: float = 1.0) -> torch.Tensor:
        """Train one iteration, with scaled losses times a factor; returns the last micro-batch's loss."""
        device, loss = self.adapter.device, torch.zeros(())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for index, batch in enumerate(batches):
            with self.accumulating(index == len(batches) - 1):
                with nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast):
                    output = self.called(*(one.to(device) for one in batch))
                loss = output["loss"] if isinstance(output, dict) else output
                if self.scaler is not None:
                    self.scaler.scale(loss * factor).backward()
                else:
                    (loss / self.micro_batches).backward()
        if self.largest_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.largest_norm)
        for optimizer in self.optimizers:
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.detach()


def torch_job(
    cell: Cell,
    device: Device,
    ranks: int,
    micro_batches: int = 1,
    schedule: str = "cosine",
    mesh: DeviceMesh | None = None,
    **sharding: Any,
) -> TorchJob:
    """A rank of the job of a cell outside DeepSpeed.

    With FSDP2 gradients are clipped, and summed over the ranks at the last micro-batch. With tensor parallelism one
    layer is split by rows and one by columns, and all ranks train on the same batches.

    Args:
        cell: `bf16` is the precision of its weights where they are not split, and `fp16` means autocast with a scaler.
        device: of this rank.
        ranks: of the job.
        micro_batches: of an iteration.
        schedule: `cosine` or `none`.
        mesh: of FSDP2; by default all ranks in one dimension.
        sharding: more arguments of `fully_shard`.
    """
    module = TinySplitLM(EVEN_HIDDEN if cell.engine == "tp" else HIDDEN) if cell.is_split else TinyLM()
    is_narrow = cell.precision == "bf16" and not cell.is_split
    module = module.to(device, torch.bfloat16 if is_narrow else torch.float32)
    if cell.engine == "fsdp2":
        sharded(module, mesh or mesh_of(device, ranks), cell.precision, **sharding)
    elif cell.engine == "tp":
        parallelize_module(module, mesh_of(device, ranks), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = optimizer_of(cell.optimizer, module)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20) if schedule == "cosine" else None
    scaler = scaler_on(device) if cell.precision == "fp16" else None
    called = DistributedDataParallel(module) if ranks > 1 and cell.engine == "ddp" else module
    job = TorchJob(module, optimizer, scheduler, scaler, micro_batches, called)
    job.autocast = torch.float16 if cell.precision == "fp16" else None
    if isinstance(module, FSDPModule):
        synchronize = module.set_requires_gradient_sync
        job.accumulating = lambda last: nullcontext(synchronize(last))
        job.largest_norm = LARGEST_NORM
    if cell.engine == "tp":
        job.batch = lambda step, micro, rank: token_batch(step, micro, 0)
    return job


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over the module's parameters, frozen ones included.

    Args:
        name: `sgd`, `rmsprop`, or as for `adamw_of`, with two groups: one has no weight decay.
        module: on its device already.
    """
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if name == "rmsprop":
        return torch.optim.RMSprop(module.parameters(), lr=0.01)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() == 1]
    return adamw_of(name, [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}])


def adamw_of(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An implementation of AdamW: `adamw`; on CUDA also `adamw-fused`, and `fused`, DeepSpeed's."""
    if name == "fused":
        from deepspeed.ops.adam import FusedAdam

        optimizer: torch.optim.Optimizer = FusedAdam(groups, lr=0.01)
        return optimizer
    return torch.optim.AdamW(groups, lr=0.01, fused=name == "adamw-fused" or None)


def scaler_on(device: Device) -> torch.amp.GradScaler:
    """A scaler that grows soon."""
    return torch.amp.GradScaler(torch.device(device).type, init_scale=256.0, growth_interval=2)


def mesh_of(device: Device, *shape: int) -> DeviceMesh:
    """A mesh of all ranks; one dimension is for shards, the first of two for replicas."""
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh(torch.device(device).type, shape, mesh_dim_names=names)


def sharded(module: nn.Module, mesh: DeviceMesh, precision: str = "fp32", **more: Any) -> None:
    """Call `fully_shard` on the module and on one layer in it.

    Args:
        module: a `TinyLM`, on its device.
        mesh: of one dimension, or of two.
        precision: `fp32`, or `bf16` of forward and backward, with gradients summed in fp32.
        more: for `fully_shard`.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
    for one in (module.get_submodule("up"), module):
        fully_shard(one, mesh=mesh, mp_policy=policy, **more)
