"""What is trained: a model, its batches, and the validation data that every run is judged on."""

from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["FINAL_CHUNKS", "VALIDATION_CHUNKS", "Task", "batch_generator"]

VALIDATION_CHUNKS = 16  # the standard error of one lag is a jackknife over these
FINAL_CHUNKS = 64  # at the end of a training, where a gap of one iteration is some 0.0002 nats
SEED_STRIDE = 1_000_003  # a prime far above any iteration: no two (seed, iteration) share a generator's seed


class Task(Protocol):
    """A model and its data; nothing in it depends on what was drawn before."""

    def model(self) -> nn.Module:
        """A new model, initialised from torch's default generator."""

    def batch(self, seed: int, iteration: int) -> Any:
        """The batch that takes a run from `iteration` to the next: a pure function of its arguments."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean loss of the batch in nats, a scalar."""

    def validation_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each validation chunk, `(VALIDATION_CHUNKS,)`, in nats; the same data every time."""

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of more validation data, `(FINAL_CHUNKS,)`: for the end of a training."""


def batch_generator(seed: int, iteration: int) -> torch.Generator:
    """Random numbers for one batch, whatever was drawn before."""
    return torch.Generator().manual_seed(seed * SEED_STRIDE + iteration)
