"""A small mixture of experts in plain torch: its state is large beside what one step computes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter

__all__ = ["Shape", "live", "train_alone"]

ITEMS, BATCHES_OF_A_PASS = 512, 64


@dataclass(frozen=True)
class Shape:
    """Of the model and its batches.

    Attributes:
        width: of a token.
        layers: each with so many experts, of which a token passes one.
        experts: of a layer.
        tokens: of an iteration.
    """

    width: int = 256
    layers: int = 4
    experts: int = 12
    tokens: int = 512


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, shape.experts)
        experts = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(shape.experts)
        )
        self.experts = nn.ModuleList(experts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.norm(tokens)
        weights, chosen = torch.softmax(self.gate(normed), -1).max(-1)
        added = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            places = (chosen == index).nonzero().squeeze(-1)
            added = added.index_add(0, places, weights[places, None] * expert(normed[places]))
        return tokens + added


def _model(shape: Shape) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(_Layer(shape) for _ in range(shape.layers)))


def _batches(shape: Shape) -> DataLoader[Any]:
    values = torch.randn(ITEMS * 8, shape.width, generator=torch.Generator().manual_seed(6))
    return DataLoader(TensorDataset(values), shape.tokens, shuffle=True, drop_last=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss = (model(batch) - batch.roll(1, -1)).square().mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def train_alone(shape: Shape, iterations: int) -> list[float]:
    """Seconds of each step without CPSR."""
    torch.set_num_threads(1)
    model = _model(shape)
    seconds: list[float] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while len(seconds) < iterations:
        for (batch,) in _batches(shape):
            begun = time.perf_counter()
            _step(model, optimizer, batch)
            seconds.append(time.perf_counter() - begun)
    return seconds[:iterations]


def live(run_dir: Path, settings: Mapping[str, Any], shape: Shape, until: int) -> tuple[list[float], int]:
    """Seconds of each step of a run under CPSR, and the bytes of its weights and moments."""
    torch.set_num_threads(1)
    model, seconds = _model(shape), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"run_dir": str(run_dir), "mode": "exact", "learning": {"budget_fraction": 0.0}, **settings}
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        begun = time.perf_counter()
        for (batch,) in recovery.resume(_batches(shape), repeat=True):
            _step(model, optimizer, batch)
            now = time.perf_counter()
            seconds.append(now - begun)
            begun = now
            if recovery.iteration >= until:
                break
        state_bytes = recovery.life.job.shard.state_bytes
    return seconds, state_bytes
