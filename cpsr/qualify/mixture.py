"""Tiny DeepSpeed mixtures of experts: in one module, and as layers of a pipeline. Imports DeepSpeed."""

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional

from cpsr.qualify.deepspeed_jobs import PipelineLoss
from cpsr.qualify.models import HIDDEN, VOCABULARY, WIDTH

__all__ = ["EXPERTS", "MixtureLoss", "TinyMoE", "mixture_layers"]

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


# What the stages of a pipeline pass on: hidden states, and the sum of the gates' balances so far, `(1,)`.
_Passed = tuple[torch.Tensor, torch.Tensor]


class _Embed(nn.Module):
    """The first layer. The balance begins at 0, and has a gradient, which stages must send back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> _Passed:
        hidden = self.norm(self.embed(tokens))
        return hidden, 0 * hidden.sum().view(1)


class _Routed(nn.Module):
    """A layer of experts, with a buffer that training changes."""

    drift: torch.Tensor

    def __init__(self, expert_parallel: int, experts_per_token: int) -> None:
        super().__init__()
        self.experts = MoE(
            WIDTH, _Expert(), num_experts=EXPERTS, ep_size=expert_parallel, k=experts_per_token, min_capacity=0
        )
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("drift", torch.zeros(WIDTH))

    def forward(self, passed: _Passed) -> _Passed:
        hidden, balance = passed[0] + self.drift.to(passed[0].dtype), passed[1]
        routed, own_balance, _ = self.experts(hidden)
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.9).add_(hidden.float().mean((0, 1)).to(self.drift.dtype), alpha=0.1)
        return hidden + self.dropout(routed), balance + own_balance.to(balance.dtype)


class _Dense(nn.Module):
    """A layer without experts.

    Args:
        expert_parallel: sizes of the groups of experts of all stages, in the order in which all ranks create them.
    """

    def __init__(self, *expert_parallel: int) -> None:
        super().__init__()
        self._expert_parallel = expert_parallel
        self.linear = nn.Linear(WIDTH, WIDTH)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Create the groups of experts of all stages, as every rank must.

        DeepSpeed creates a group where a layer needs it, and torch names groups by counting them. If a stage creates
        another number of groups, the next common group hangs. If it creates groups of other ranks, two groups exchange
        addresses under one name: a rank then connects to a rank of the other group, or waits for it.
        """
        for size in self._expert_parallel:
            if f"ep_size_{size}" not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(
                    size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
                )

    def forward(self, passed: _Passed) -> _Passed:
        return passed[0] + torch.tanh(self.linear(passed[0])), passed[1]


class _Head(nn.Module):
    """The last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, passed: _Passed) -> _Passed:
        return self.linear(passed[0]), passed[1]


class MixtureLoss(PipelineLoss):
    """With the balance of the gates of all stages."""

    def __call__(self, passed: _Passed, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The loss of what the last stage gives."""
        balance: torch.Tensor = passed[1].float().sum()
        return super().__call__(passed[0], targets) + 0.01 * balance * self.factor


def mixture_layers(
    expert_parallel: int, of_stages: tuple[int, int] = (1, 2), expert_parallel_last: int | None = None
) -> list[LayerSpec]:
    """Six layers of a pipeline, to be cut in the middle.

    Args:
        expert_parallel: ranks of a stage that share its experts.
        of_stages: layers of experts in the first stage and in the second, at most two each.
        expert_parallel_last: ranks that share the experts of the second stage; None: as in the first. Where they
            differ, each stage needs a layer without experts.
    """
    first, last = of_stages[0], expert_parallel_last or expert_parallel
    routed = [
        LayerSpec(_Routed, expert_parallel if place < first else last, 1 + place % 2) for place in range(sum(of_stages))
    ]
    dense = [[LayerSpec(_Dense, expert_parallel, last)] * (2 - count) for count in of_stages]
    return [LayerSpec(_Embed), *routed[:first], *dense[0], *dense[1], *routed[first:], LayerSpec(_Head)]
