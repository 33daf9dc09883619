"""A tiny DeepSpeed mixture of experts. Imports DeepSpeed."""

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional

from cpsr.qualify.models import HIDDEN, VOCABULARY, WIDTH

__all__ = ["EXPERTS", "TinyMoE"]

EXPERTS = 4


class _Expert(nn.Module):
    """Also holds a frozen parameter and a buffer that training changes, of which each expert has its own."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The expert's output for its tokens."""
        if self.training:
            with torch.no_grad():
                self.seen.mul_(0.9).add_(hidden.float().flatten(0, -2).mean(0).to(self.seen.dtype), alpha=0.1)
        output: torch.Tensor = self.down(torch.relu(self.up(hidden * self.scale + self.seen.to(hidden.dtype))))
        return output


class TinyMoE(nn.Module):
    """Two layers of experts: one picks tokens at random where experts are full, one samples the second expert.

    Args:
        expert_parallel: ranks that share the experts.
        options: more arguments of DeepSpeed's `MoE`.
    """

    drift: torch.Tensor

    def __init__(self, expert_parallel: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        sizes: dict[str, Any] = {"num_experts": EXPERTS, "ep_size": expert_parallel, "min_capacity": 0}
        self.first = MoE(WIDTH, _Expert(), k=1, noisy_gate_policy="Jitter", **(sizes | options))
        self.second = MoE(WIDTH, _Expert(), k=2, **(sizes | options))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("drift", torch.zeros(WIDTH))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, loss_factor: float = 1.0) -> torch.Tensor:
        """The loss of token sequences with the balance of the gates, times a factor."""
        hidden, balance = self.embed(tokens) + self.drift.to(self.embed.weight.dtype), 0.0
        for layer in (self.first, self.second):
            routed, layer_balance, _ = layer(hidden)
            hidden, balance = hidden + self.dropout(routed), balance + layer_balance
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.9).add_(hidden.float().mean((0, 1)).to(self.drift.dtype), alpha=0.1)
        loss = functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())
        return (loss + 0.01 * balance) * loss_factor
