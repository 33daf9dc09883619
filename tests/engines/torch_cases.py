"""Jobs of one process that only the tests of `TorchAdapter` have: convolutions, mixtures, a scaler without autocast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cpsr.engines.moe.token_counts import MixtureOfExperts
from cpsr.qualify.cells import Cell
from cpsr.qualify.torch_jobs import VOCABULARY, WIDTH, TinyLM, TorchJob, optimizer_of, scaler_on, torch_job
from tests.device import DEVICE

__all__ = ["CASES", "NO_MUON", "TinyConvNet", "build", "counts_of", "ddp_job", "image_batch", "lay_out", "one_thread"]

NO_MUON = "" if hasattr(torch.optim, "Muon") else f"torch {torch.__version__} has no Muon"

schedulers = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "cosine": partial(schedulers.CosineAnnealingLR, T_max=20),
    "onecycle": partial(schedulers.OneCycleLR, max_lr=0.05, total_steps=20),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.ExponentialLR(optimizer, 0.9)],
        milestones=[5],
    ),
}


class TinyMixture(nn.Module):
    """Experts beside a shared one, of which each token takes the best; `counts` says how many took which."""

    counts: torch.Tensor

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, places = self.gate(hidden).softmax(-1).max(-1)
        self.counts = torch.bincount(places.flatten(), minlength=len(self.experts))
        every = torch.stack([expert(hidden) for expert in self.experts], -2)
        taken = every.gather(-2, places[..., None, None].expand(*places.shape, 1, WIDTH)).squeeze(-2)
        output: torch.Tensor = hidden + self.shared(hidden) + weights.unsqueeze(-1) * taken
        return output


class TinyMixtures(nn.Module):
    """Two layers of experts, not equally many."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = TinyMixture(4), TinyMixture(3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.second(self.first(self.embed(tokens))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TinyConvNet(nn.Module):
    """Convolutions in channels_last memory with batch norm; returns its loss in a dictionary, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(5, VOCABULARY, 3)
        )

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(images).mean((2, 3))
        return {"loss": functional.cross_entropy(logits.float(), targets)}


def lay_out(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Give the four-dimensional parameters a memory format."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)


def image_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in channels_last memory, of shape `(4, 3, 6, 6)`, and int64 targets, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    images = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return images, torch.randint(VOCABULARY, (4,), generator=generator)


def counts_of(layer: nn.Module) -> torch.Tensor:
    """Tokens by expert, in the last forward."""
    assert isinstance(layer, TinyMixture)
    return layer.counts


def build(model: str, optimizer: str, scheduler: str, micro_batches: int = 1, scaler: bool = False) -> TorchJob:
    """A job of one process: `model` is `conv`, or the precision of `TinyLM`'s weights, `fp32` or `bf16`."""
    module: nn.Module
    if model == "conv":
        module = TinyConvNet().to(DEVICE)
        lay_out(module, torch.channels_last)
    else:
        module = TinyLM().to(DEVICE, torch.bfloat16 if model == "bf16" else torch.float32)
    if optimizer == "amsgrad":
        tuned: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, amsgrad=True)
    else:
        tuned = optimizer_of(optimizer, module)
    job = TorchJob(module, tuned, SCHEDULERS[scheduler](tuned), scaler_on(DEVICE) if scaler else None, micro_batches)
    if model == "conv":
        job.batch = image_batch
    return job


def mixture_job() -> TorchJob:
    module = TinyMixtures().to(DEVICE)
    optimizer = optimizer_of("adamw", module)
    return TorchJob(module, optimizer, SCHEDULERS["cosine"](optimizer), experts=MixtureOfExperts(counts_of))


class LowRank(nn.Module):
    """A frozen layer with an adapter of rank 2 beside it, which trains."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.inside = nn.Linear(base.in_features, 2, bias=False)
        self.outside = nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(hidden) + self.outside(self.inside(hidden))
        return output


def adapter_job() -> TorchJob:
    module = TinyLM().requires_grad_(False)
    module.up, module.down = LowRank(module.up), LowRank(module.down)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW([one for one in module.to(DEVICE).parameters() if one.requires_grad], lr=0.01)
    return TorchJob(module, optimizer, SCHEDULERS["cosine"](optimizer))


def muon_beside_adamw() -> TorchJob:
    module = TinyLM().to(DEVICE)
    trained = [one for one in module.parameters() if one.requires_grad]
    matrices, others = [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]
    return TorchJob(module, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)])


def ddp_job() -> TorchJob:
    return torch_job(Cell("ddp", None, "fp32", "adamw"), DEVICE, ranks=2, micro_batches=2)


CASES: dict[str, Callable[[], TorchJob]] = {
    "fp32-sgd": partial(build, "fp32", "sgd", "none"),
    "fp32-adamw-cosine": partial(build, "fp32", "adamw", "cosine"),
    "fp32-amsgrad-sequential": partial(build, "fp32", "amsgrad", "sequential"),
    "bf16-sgd-cosine": partial(build, "bf16", "sgd", "cosine"),
    "bf16-adamw": partial(build, "bf16", "adamw", "none", micro_batches=2),
    "channels_last-sgd-onecycle": partial(build, "conv", "sgd", "onecycle"),
    "channels_last-adamw": partial(build, "conv", "adamw", "cosine"),
    "grad_scaler": partial(build, "fp32", "adamw", "none", scaler=True),
    "grad_scaler-cosine": partial(build, "fp32", "adamw", "cosine", scaler=True),
    "experts": mixture_job,
    "two-optimizers": muon_beside_adamw,
    "frozen-weights": adapter_job,
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
