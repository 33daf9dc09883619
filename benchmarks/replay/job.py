"""A small mixture of experts in plain torch: its state is large beside what one step computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.replay.in_turn import ALONE, LIVE, in_turn

__all__ = ["Shape", "live_and_alone"]

SETTLED_BLOCKS = 3
ITEMS, BATCHES_OF_A_PASS = 512, 64


@dataclass(frozen=True)
class Shape:
    """Of the model and its batches.

    Attributes:
        width: of a token.
        layers: each with so many experts, of which a token passes one.
        experts: of a layer.
        tokens: of an iteration.
        dtype: of weights, moments and batches.
    """

    width: int = 256
    layers: int = 4
    experts: int = 12
    tokens: int = 512
    dtype: str = "float32"


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
    return nn.Sequential(*(_Layer(shape) for _ in range(shape.layers))).to(getattr(torch, shape.dtype))


def _batches(shape: Shape) -> DataLoader[Any]:
    values = torch.randn(ITEMS * 8, shape.width, generator=torch.Generator().manual_seed(6))
    values = values.to(getattr(torch, shape.dtype))
    return DataLoader(TensorDataset(values), shape.tokens, shuffle=True, drop_last=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss = (model(batch) - batch.roll(1, -1)).square().mean()
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def live_and_alone(
    run_dir: Path, settings: Mapping[str, Any], shape: Shape, steps: int, block: int
) -> tuple[dict[str, list[float]], int]:
    """Seconds of a step under CPSR and without it, by blocks in turn, and the bytes of weights and moments.

    Args:
        run_dir: of the run.
        settings: of CPSR.
        shape: of both models.
        steps: about so many are timed.
        block: steps of one.
    """
    torch.set_num_threads(1)
    model, other = _model(shape), _model(shape)
    optimizer, another = (torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model, other))
    alone = (batch for _ in count() for (batch,) in _batches(shape))
    # Mode `exact` refuses a loop with another optimizer.
    config = {"run_dir": str(run_dir), "mode": "auto", "learning": {"budget_fraction": 0.0}, **settings}
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        live = iter(recovery.resume(_batches(shape), repeat=True))
        kinds: dict[str, Callable[[], object]] = {
            ALONE: lambda: _step(other, another, next(alone)),
            LIVE: lambda: _step(model, optimizer, next(live)[0]),
        }
        for kind in kinds.values():
            kind()
        in_turn({LIVE: kinds[LIVE]}, 1, SETTLED_BLOCKS * block, 0)  # all files are filled once
        seconds = in_turn(kinds, max(1, steps // (2 * (block + 1))), block, 1)
        return seconds, recovery.life.job.shard.state_bytes
