"""The demo's GPT cut into the layers of a pipeline."""

import torch
from torch import nn
from torch.nn import functional

from cpsr.demo.model import GPT, GPTConfig

__all__ = ["layers", "loss", "split"]


class _Embedding(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        embedded: torch.Tensor = self.token(inputs) + self.position(positions)
        return embedded


def layers(config: GPTConfig) -> list[nn.Module]:
    """Embedding, blocks and head; the head has weights of its own, as the first stage is on another rank."""
    model = GPT(config)
    head = nn.Sequential(model.norm, nn.Linear(config.width, config.vocabulary, bias=False))
    return [_Embedding(model), *model.blocks, head]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a byte: a scalar."""
    return functional.cross_entropy(logits.transpose(1, 2), targets)


def split(windows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate windows of `context + 1` bytes into inputs and targets, each `(batch, context)` int64."""
    stacked = torch.stack(windows)
    return stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
