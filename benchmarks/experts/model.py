"""A byte-level GPT in which every other feed-forward layer is a mixture of experts."""

from typing import cast

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from cpsr.benchmarks.experts.tasks import Mixture
from cpsr.benchmarks.recovery.task import SEED_STRIDE
from cpsr.demo.model import GPT

__all__ = ["MixtureGPT"]

BALANCE = 0.01  # of the auxiliary loss (pec, Table 1)
CAPACITY = 1.25
EVALUATION_CAPACITY = 2.0
INITIAL_DEVIATION = 0.02  # as in the dense model


class _Routed(nn.Module):
    def __init__(self, mixture: Mixture, dense: nn.Module) -> None:
        super().__init__()
        self.balance = torch.zeros(())
        self.moe = MoE(
            mixture.gpt.width,
            dense,
            mixture.experts,
            ep_size=mixture.expert_parallel,
            k=mixture.experts_per_token,
            capacity_factor=CAPACITY,
            eval_capacity_factor=EVALUATION_CAPACITY,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        routed: torch.Tensor
        routed, self.balance, _ = self.moe(hidden)
        return routed


class MixtureGPT(nn.Module):
    """The dense model with copies of every second feed-forward layer as experts, each initialised by itself.

    `forward(windows)` is the mean cross-entropy in nats a byte, in training with the loss that balances the experts.

    Args:
        mixture: its shape.
        rank: this process's place among those that share the experts.
        seed: of the experts' initial weights; those of the rest come from torch's default generator.
    """

    def __init__(self, mixture: Mixture, rank: int, seed: int) -> None:
        super().__init__()
        self.gpt = GPT(mixture.gpt)
        self._routed = []
        for place, block in enumerate(self.gpt.blocks):
            if place % 2:
                block.mlp = routed = _Routed(mixture, cast(nn.Module, block.mlp))
                self._routed.append(routed)
                _initialise(routed.moe, rank, seed, place)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Loss of int64 windows of shape `(batch, context + 1)`: a scalar."""
        loss = self.gpt.losses(windows).mean()
        if not self.training:
            return loss
        return loss + BALANCE * torch.stack([routed.balance for routed in self._routed]).sum()


def _initialise(moe: MoE, rank: int, seed: int, place: int) -> None:
    """Every expert as if all lay on one rank: DeepSpeed makes copies of one."""
    for index, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
        number = place * moe.num_experts + rank * moe.num_local_experts + index
        generator = torch.Generator().manual_seed((seed + 1) * SEED_STRIDE - 1 - number)  # no batch has it
        for module in expert.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION, generator=generator)
