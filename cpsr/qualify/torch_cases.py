"""The conformance cases of `TorchAdapter`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cpsr.engines import TorchAdapter
from cpsr.engines.moe.torch import MixtureOfExperts
from tests.engines.conformance import (
    OVERFLOW,
    OVERFLOWING_STEPS,
    TinyConvNet,
    TinyLM,
    TinyMixture,
    TinyMixtures,
    image_batch,
    lay_out,
    token_batch,
)


class TorchJob:
    """The loop that `TorchAdapter` documents."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        grad_scaler: Any = None,
        micro_batches: int = 1,
        called: nn.Module | None = None,
        batch: Callable[[int, int, int], tuple[torch.Tensor, ...]] = token_batch,
        experts: MixtureOfExperts | None = None,
    ) -> None:
        self.module, self.optimizer, self.scheduler, self.scaler = module, optimizer, scheduler, grad_scaler
        self.called, self.micro_batches, self.batch = called or module, micro_batches, batch
        self.adapter = TorchAdapter(self.called, optimizer, scheduler, grad_scaler, micro_batches, experts)

    def train_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for micro in range(self.micro_batches):
            output = self.called(*self.batch(step, micro, self.adapter.rank))
            loss = output["loss"] if isinstance(output, dict) else output
            if self.scaler is not None:
                factor = OVERFLOW * OVERFLOW if step in OVERFLOWING_STEPS else 1.0
                self.scaler.scale(loss * factor).backward()
            else:
                (loss / self.micro_batches).backward()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if name == "amsgrad":
        return torch.optim.AdamW(module.parameters(), lr=0.01, amsgrad=True)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    if name == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, T_max=20)
    if name == "onecycle":
        return schedulers.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    if name == "sequential":
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.ExponentialLR(optimizer, 0.9)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[5])
    return None


def build(model: str, optimizer: str, scheduler: str, micro_batches: int = 1, scaler: bool = False) -> TorchJob:
    module: nn.Module
    if model == "conv":
        module = TinyConvNet()
        lay_out(module, torch.channels_last)
    else:
        module = TinyLM().to(torch.bfloat16 if model == "bf16" else torch.float32)
    tuned = optimizer_of(optimizer, module)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scaler else None
    batch = image_batch if model == "conv" else token_batch
    return TorchJob(module, tuned, scheduler_of(scheduler, tuned), grad_scaler, micro_batches, batch=batch)


def counts_of(layer: nn.Module) -> torch.Tensor:
    assert isinstance(layer, TinyMixture)
    return layer.counts


def build_mixture() -> TorchJob:
    module = TinyMixtures()
    optimizer = optimizer_of("adamw", module)
    return TorchJob(module, optimizer, scheduler_of("cosine", optimizer), experts=MixtureOfExperts(counts_of))


CASES: dict[str, Callable[[], TorchJob]] = {
    "fp32-sgd": lambda: build("fp32", "sgd", "none"),
    "fp32-adamw-cosine": lambda: build("fp32", "adamw", "cosine"),
    "fp32-amsgrad-sequential": lambda: build("fp32", "amsgrad", "sequential"),
    "bf16-sgd-cosine": lambda: build("bf16", "sgd", "cosine"),
    "bf16-adamw": lambda: build("bf16", "adamw", "none", micro_batches=2),
    "channels_last-sgd-onecycle": lambda: build("conv", "sgd", "onecycle"),
    "channels_last-adamw": lambda: build("conv", "adamw", "cosine"),
    "grad_scaler": lambda: build("fp32", "adamw", "none", scaler=True),
    "grad_scaler-cosine": lambda: build("fp32", "adamw", "cosine", scaler=True),
    "experts": build_mixture,
}


def build_ddp() -> TorchJob:
    module = TinyLM()
    ddp = nn.parallel.DistributedDataParallel(module)
    optimizer = optimizer_of("adamw", module)
    return TorchJob(module, optimizer, scheduler_of("cosine", optimizer), micro_batches=2, called=ddp)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
