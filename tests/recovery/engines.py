"""The engines of `worker.py`'s job: two models that return their loss, and two in pipeline stages that do not."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.device import ON_CUDA

ITEMS, BATCH, FEATURES, WIDTH = 48, 4, 6, 16
EXPERTS = 4
SEED = 7
# DeepSpeed's own take gigabytes of GPU memory for each engine.
SMALL_BUCKETS = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


class Regression(nn.Module):
    """Returns its loss; the dropout makes random states matter, the buffer is state outside the optimizer."""

    seen: torch.Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        parameter = next(self.layers.parameters())
        return nn.functional.mse_loss(self.layers(x.to(parameter.dtype)).float(), y)


class Mixture(nn.Module):
    """Returns its loss; experts take one item of a batch each, and which of several is drawn at random."""

    def __init__(self, expert_parallel: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, FEATURES), nn.Tanh(), nn.Linear(FEATURES, WIDTH))
        self.up, self.down = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.experts = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=expert_parallel, min_capacity=0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x.to(self.up.weight.dtype)))
        routed, balance, _ = self.experts(hidden)
        loss: torch.Tensor = nn.functional.mse_loss(self.down(hidden + routed).float(), y) + 0.01 * balance
        return loss


class First(nn.Module):
    """The first layer of a pipeline with experts: hidden states, and the gates' balance, which has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.up(x.to(self.up.weight.dtype)))
        return hidden, 0 * hidden.sum().view(1)


class Routed(nn.Module):
    """A layer of experts, which draws at random, with a buffer that training changes."""

    seen: torch.Tensor

    def __init__(self, expert_parallel: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, FEATURES), nn.Tanh(), nn.Linear(FEATURES, WIDTH))
        self.experts = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=expert_parallel, min_capacity=0)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            self.seen += 1
        routed, balance, _ = self.experts(passed[0])
        return passed[0] + routed, passed[1] + balance.to(passed[1].dtype)


class Plain(nn.Module):
    """Takes the place of a layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return passed[0] + self.layers(passed[0]), passed[1]


class Last(nn.Module):
    """The last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 1)

    def forward(self, passed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(passed[0]), passed[1]


def balanced_loss(passed: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.mse_loss(passed[0].float(), targets) + 0.01 * passed[1].float().sum()
    return loss


def dataset() -> TensorDataset:
    """Inputs, targets, and each item's index, by which a batch is known."""
    x = torch.randn(ITEMS, FEATURES)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(ITEMS, 1), torch.arange(ITEMS))


def loader(data: TensorDataset, parts: int, part: int, **more: Any) -> "DataLoader[Any]":
    """Shuffled by a seeded sampler, one part of it for each data-parallel rank."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=parts, rank=part, seed=3)
    return DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True, **more)


def initialize(module: nn.Module, config: Any) -> Any:
    """A DeepSpeed engine with AdamW and a falling learning rate, or with what the configuration alone asks for."""
    parameters: Any = [one for one in module.parameters() if one.requires_grad]
    if "optimizer" in config:
        engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
        return engine
    if any(isinstance(one, MoE) for one in module.modules()):
        group = {"params": parameters, "name": "dense"}
        parameters = split_params_into_different_moe_groups_for_optimizer(group)
    optimizer = torch.optim.AdamW(parameters, lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def configuration(zero: int, precision: str, micro_batches: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": zero, **(SMALL_BUCKETS if ON_CUDA else {})},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    return config | ({precision: {"enabled": True}} if precision != "fp32" else {})


def pipeline(stages: int, expert_parallel: int = 0, routed: Sequence[int] = ()) -> PipelineModule:
    """Its layers do not depend on the number of stages.

    Args:
        stages: of the pipeline.
        expert_parallel: ranks of a stage that share its experts; 0: there are none.
        routed: layers of experts in the first half and in the second, at most two.
    """
    if expert_parallel:
        first, second = ([Routed] * count + [Plain] * (2 - count) for count in routed)
        layers = [LayerSpec(one, *([expert_parallel] if one is Routed else [])) for one in first + second]
        return PipelineModule(
            [LayerSpec(First), *layers, LayerSpec(Last)],
            num_stages=stages,
            loss_fn=balanced_loss,
            partition_method="uniform",
        )
    layers = [
        LayerSpec(nn.Linear, FEATURES, WIDTH),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Dropout, 0.1),
        LayerSpec(nn.Linear, WIDTH, 1),
    ]
    return PipelineModule(layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")
