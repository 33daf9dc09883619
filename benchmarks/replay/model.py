"""A byte-level GPT in which every other feed-forward layer is a mixture of experts, under DeepSpeed."""

from typing import Any, cast

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from cpsr.benchmarks.recovery.tasks import SEED_STRIDE
from cpsr.benchmarks.replay.mixture import PEAK_LEARNING_RATE, Mixture
from cpsr.demo.model import GPT

__all__ = ["MixtureGPT", "engine_of"]

BALANCE = 0.01  # of the auxiliary loss (pec, Table 1)
CAPACITY, EVALUATION_CAPACITY = 1.25, 2.0
INITIAL_DEVIATION = 0.02  # as in the dense model
WEIGHT_DECAY, MAX_GRADIENT_NORM = 0.01, 1.0


class _Routed(nn.Module):
    def __init__(self, mixture: Mixture, ranks: int, dense: nn.Module) -> None:
        super().__init__()
        self.balance = torch.zeros(())
        self.moe = MoE(
            mixture.gpt.width,
            dense,
            mixture.experts,
            ep_size=ranks,
            k=1,
            capacity_factor=CAPACITY,
            eval_capacity_factor=EVALUATION_CAPACITY,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        routed: torch.Tensor
        routed, self.balance, _ = self.moe(hidden)
        return routed


class MixtureGPT(nn.Module):
    """The dense model with copies of every second feed-forward layer as experts, each initialised by itself.

    `seed` is of the experts' initial weights alone; those of the rest come from torch's default generator.
    `forward(windows)` is the mean cross-entropy in nats a byte, in training with the loss that balances the experts.
    """

    def __init__(self, mixture: Mixture, rank: int, ranks: int, seed: int) -> None:
        super().__init__()
        self.gpt = GPT(mixture.gpt)
        self._routed = []
        for place, block in enumerate(self.gpt.blocks):
            if place % 2:
                block.mlp = routed = _Routed(mixture, ranks, cast(nn.Module, block.mlp))
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


def engine_of(model: MixtureGPT, micro_batch: int) -> Any:
    """DeepSpeed at ZeRO 0 with AdamW, for so many windows a rank."""
    group = {"params": list(model.parameters()), "name": "all"}
    parameters = split_params_into_different_moe_groups_for_optimizer(group)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameters, lr=PEAK_LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True),
        config={
            "train_micro_batch_size_per_gpu": micro_batch,
            "zero_optimization": {"stage": 0},
            "gradient_clipping": MAX_GRADIENT_NORM,
            "steps_per_print": 10**9,
        },
    )
    return engine
