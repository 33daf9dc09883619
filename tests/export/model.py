"""A model with everything that a state dict can trip over; imports no engine."""

import torch
from torch import nn

FEATURES, WIDTH = 6, 16


class Model(nn.Module):
    """Returns its loss. Tied and frozen weights, buffers of both kinds, and sizes that ZeRO splits in the middle."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        self.tied = self.layers[0]
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        inputs = (x * self.scale.float().mean()).to(next(self.layers.parameters()).dtype)
        return nn.functional.mse_loss(self.layers(inputs).float(), y)
