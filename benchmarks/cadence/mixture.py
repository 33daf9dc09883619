"""One process that trains a mixture of experts in plain torch: its state is large beside what a step computes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr.benchmarks.overhead.jobs import Job
from cpsr.engines.moe.token_counts import MixtureOfExperts
from cpsr.engines.torch import TorchAdapter

__all__ = ["mixture_job"]

WIDTH, LAYERS, EXPERTS, TOKENS, BATCHES = 128, 4, 16, 256, 64
POPULARITY = 1.5  # spread of the gates' biases: a few experts get most of the tokens


class _Layer(nn.Module):
    """Sends each token to one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        nn.init.normal_(self.gate.bias, std=POPULARITY)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.counts = torch.zeros(EXPERTS, dtype=torch.int64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(hidden).softmax(1).max(1)
        self.counts = torch.bincount(chosen, minlength=EXPERTS)
        parts = torch.split(hidden[torch.argsort(chosen)], self.counts.tolist())
        routed = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        back = torch.argsort(torch.argsort(chosen))
        mixed: torch.Tensor = hidden + weights.unsqueeze(1) * routed[back]
        return mixed


def _counts_of(layer: nn.Module) -> torch.Tensor:
    assert isinstance(layer, _Layer)
    return layer.counts


def mixture_job() -> Job:
    """The engine, its batches, and what trains on one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        torch.autograd.backward((model(batch[0]) - batch[0].flip(1)).square().mean())
        optimizer.step()

    adapter = TorchAdapter(model, optimizer, experts=MixtureOfExperts(_counts_of))
    return adapter, DataLoader(TensorDataset(torch.randn(BATCHES * TOKENS, WIDTH)), TOKENS), step
