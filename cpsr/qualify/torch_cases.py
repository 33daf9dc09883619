"""The conformance cases of `TorchAdapter`, on a device that is a parameter."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from cpsr.engines import TorchAdapter
from cpsr.engines.moe.token_counts import MixtureOfExperts
from cpsr.qualify.cells import OF_TORCH
from cpsr.qualify.conformance import OVERFLOW, OVERFLOWING_STEPS
from cpsr.qualify.models import (
    TinyConvNet,
    TinyLM,
    TinyMixture,
    TinyMixtures,
    image_batch,
    lay_out,
    token_batch,
)

__all__ = [
    "CASES",
    "TorchJob",
    "adapted_job",
    "build",
    "build_ddp",
    "one_thread",
    "optimizer_of",
    "scaler_on",
    "scheduler_of",
    "small_job",
    "two_optimizers",
]

Device = torch.device | str
EIGHT_BIT_ELEMENTS = 64  # of a parameter whose moments have 8 bits


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


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of that name over the module's parameters; AdamW has two groups, one without weight decay.

    Args:
        name: `sgd`, `amsgrad`, `adafactor`, `adamw`, those of `OF_TORCH`; on CUDA also `adamw-fused`,
            `adamw-capturable` and `fused`, DeepSpeed's; `lion`, `adamw-8bit` and `adamw-schedulefree` of the packages
            lion-pytorch, bitsandbytes and schedulefree.
        module: on its device already.
    """
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if name == "amsgrad":
        return torch.optim.AdamW(module.parameters(), lr=0.01, amsgrad=True)
    if name == "adafactor":
        return torch.optim.Adafactor(module.parameters(), lr=0.01)
    if name in OF_TORCH:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, OF_TORCH[name])(module.parameters(), lr=0.01)
        return optimizer
    if name in OF_PACKAGES:
        return OF_PACKAGES[name](module)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() == 1]
    return adamw_of(name, [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}])


def _lion(module: nn.Module) -> torch.optim.Optimizer:
    from lion_pytorch import Lion

    optimizer: torch.optim.Optimizer = Lion(module.parameters(), lr=1e-3, weight_decay=0.1)
    return optimizer


def _eight_bits(module: nn.Module) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    # By default it keeps moments of small parameters, as all of these are, in 32 bits.
    optimizer: torch.optim.Optimizer = AdamW8bit(module.parameters(), lr=0.01, min_8bit_size=EIGHT_BIT_ELEMENTS)
    return optimizer


def _schedule_free(module: nn.Module) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(module.parameters(), lr=0.01)
    optimizer.train()  # else it refuses to step
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


OF_PACKAGES = {"lion": _lion, "adamw-8bit": _eight_bits, "adamw-schedulefree": _schedule_free}


def adamw_of(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An implementation of AdamW; `name` as for `optimizer_of`."""
    if name == "fused":
        from deepspeed.ops.adam import FusedAdam

        optimizer: torch.optim.Optimizer = FusedAdam(groups, lr=0.01)
        return optimizer
    return torch.optim.AdamW(groups, lr=0.01, fused=name == "adamw-fused" or None, capturable="capturable" in name)


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A scheduler of that name, or None for `none`."""
    schedulers = torch.optim.lr_scheduler
    if name == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, T_max=20)
    if name == "onecycle":
        return schedulers.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    if name == "sequential":
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.ExponentialLR(optimizer, 0.9)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[5])
    return None


def build(
    model: str,
    optimizer: str,
    scheduler: str,
    micro_batches: int = 1,
    scaler: bool = False,
    device: Device = "cpu",
) -> TorchJob:
    """A job of one process: `model` is `conv`, or the precision of `TinyLM`'s weights, `fp32` or `bf16`."""
    module: nn.Module
    if model == "conv":
        module = TinyConvNet().to(device)
        lay_out(module, torch.channels_last)
    else:
        module = TinyLM().to(device, torch.bfloat16 if model == "bf16" else torch.float32)
    tuned = optimizer_of(optimizer, module)
    job = TorchJob(module, tuned, scheduler_of(scheduler, tuned), scaler_on(device) if scaler else None, micro_batches)
    if model == "conv":
        job.batch = image_batch
    return job


def scaler_on(device: Device) -> torch.amp.GradScaler:
    """A scaler that grows soon."""
    return torch.amp.GradScaler(torch.device(device).type, init_scale=256.0, growth_interval=2)


def counts_of(layer: nn.Module) -> torch.Tensor:
    """Tokens by expert, in the last forward."""
    assert isinstance(layer, TinyMixture)
    return layer.counts


def build_mixture(device: Device = "cpu") -> TorchJob:
    """A mixture of experts in one process."""
    module = TinyMixtures().to(device)
    optimizer = optimizer_of("adamw", module)
    return TorchJob(module, optimizer, scheduler_of("cosine", optimizer), experts=MixtureOfExperts(counts_of))


def build_ddp(device: Device = "cpu") -> TorchJob:
    """A rank of a DDP job."""
    return small_job("fp32", "adamw", device, ranks=2, micro_batches=2)


def two_optimizers(device: Device = "cpu") -> TorchJob:
    """Torch's Muon for matrices beside AdamW."""
    module = TinyLM().to(device)
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]
    return TorchJob(module, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)])


class LowRank(nn.Module):
    """A frozen layer with an adapter of rank 2 beside it, which trains."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.inside = nn.Linear(base.in_features, 2, bias=False)
        self.outside = nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What both give together."""
        given: torch.Tensor = self.base(hidden) + self.outside(self.inside(hidden))
        return given


def adapted_job(device: Device, ranks: int) -> TorchJob:
    """A rank of a DDP job in which adapters alone train."""
    module = TinyLM().requires_grad_(False)
    for name in ("up", "down"):
        base = module.get_submodule(name)
        assert isinstance(base, nn.Linear)
        setattr(module, name, LowRank(base))
    module = module.to(device)
    called = nn.parallel.DistributedDataParallel(module) if ranks > 1 else module
    tuned = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    return TorchJob(module, tuned, scheduler_of("cosine", tuned), called=called)


def small_job(
    precision: str, optimizer: str, device: Device, ranks: int, micro_batches: int = 1, schedule: str = "cosine"
) -> TorchJob:
    """A job of `TinyLM`, under DDP where it has several ranks.

    Args:
        precision: `fp32`; `bf16`, of the weights; or `fp16`, by autocast with a gradient scaler.
        optimizer: as for `optimizer_of`.
        device: of this rank.
        ranks: of the job.
        micro_batches: of an iteration.
        schedule: as of `scheduler_of`.
    """
    module = TinyLM().to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    called = nn.parallel.DistributedDataParallel(module) if ranks > 1 else module
    tuned = optimizer_of(optimizer, module)
    scaler = scaler_on(device) if precision == "fp16" else None
    job = TorchJob(module, tuned, scheduler_of(schedule, tuned), scaler, micro_batches, called)
    job.autocast = torch.float16 if precision == "fp16" else None
    return job


CASES: dict[str, Callable[..., TorchJob]] = {
    "fp32-sgd": partial(build, "fp32", "sgd", "none"),
    "fp32-adamw-cosine": partial(build, "fp32", "adamw", "cosine"),
    "fp32-amsgrad-sequential": partial(build, "fp32", "amsgrad", "sequential"),
    "bf16-sgd-cosine": partial(build, "bf16", "sgd", "cosine"),
    "bf16-adamw": partial(build, "bf16", "adamw", "none", micro_batches=2),
    "channels_last-sgd-onecycle": partial(build, "conv", "sgd", "onecycle"),
    "channels_last-adamw": partial(build, "conv", "adamw", "cosine"),
    "grad_scaler": partial(build, "fp32", "adamw", "none", scaler=True),
    "grad_scaler-cosine": partial(build, "fp32", "adamw", "cosine", scaler=True),
    "experts": build_mixture,
    "two-optimizers": two_optimizers,
    "frozen-weights": partial(adapted_job, ranks=1),
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that sums are in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
