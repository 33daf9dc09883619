"""The byte-level GPT on source code that every machine has."""

from typing import Any, cast

import torch
from torch import nn

from cpsr.benchmarks.recovery.corpora import CORPORA
from cpsr.benchmarks.recovery.task import FINAL_CHUNKS, VALIDATION_CHUNKS, batch_generator
from cpsr.demo.model import GPT, GPTConfig

__all__ = ["SIZES", "GPTTask"]

# Two sizes, since the paper saves more on its smaller model. A context of 64 keeps a step at 20 and 40 ms on one core.
# The last has the shape of the paper's GPT2-0.35B but for the vocabulary: bytes like the others, of which no row lies
# idle, in place of 50257 tokens; that leaves 303.6 million parameters.
SIZES = {
    "gpt-0.1M": GPTConfig(layers=2, heads=4, width=64, context=64),  # for the prior: four times the recoveries an hour
    "gpt-0.4M": GPTConfig(layers=3, heads=4, width=96, context=64),
    "gpt-0.8M": GPTConfig(layers=4, heads=4, width=128, context=64),
    "gpt-350M": GPTConfig(layers=24, heads=16, width=1024, context=1024),
}
BATCH_WINDOWS = 8
CHUNK_WINDOWS = 4
FINAL_CHUNK_WINDOWS = 8


class GPTTask:
    """Next-byte prediction (a `Task`); a batch is `(8, context + 1)` int64 windows at random places.

    Args:
        config: of the model.
        corpus: a name of `CORPORA`.
    """

    def __init__(self, config: GPTConfig, corpus: str = "library") -> None:
        self._config = config
        self._text, self._held_out = CORPORA[corpus]()
        self._validation = self._spread(VALIDATION_CHUNKS * CHUNK_WINDOWS)

    def model(self) -> nn.Module:
        """A new model, initialised from torch's default generator."""
        return GPT(self._config)

    def batch(self, seed: int, iteration: int) -> torch.Tensor:
        """Windows that begin anywhere in the training text."""
        last = self._text.numel() - self._config.context
        starts = torch.randint(last, (BATCH_WINDOWS,), generator=batch_generator(seed, iteration))
        return self._windows(self._text, starts)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean cross-entropy in nats a byte."""
        loss: torch.Tensor = model(batch)
        return loss

    def validation_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of four held-out windows."""
        device = next(model.parameters()).device
        losses = cast(GPT, model).losses(self._validation.to(device))
        return losses.view(VALIDATION_CHUNKS, CHUNK_WINDOWS).mean(1)

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of each chunk of eight held-out windows."""
        device = next(model.parameters()).device
        chunks = self._spread(FINAL_CHUNKS * FINAL_CHUNK_WINDOWS).view(FINAL_CHUNKS, FINAL_CHUNK_WINDOWS, -1)
        return torch.stack([cast(GPT, model).losses(chunk.to(device)).mean() for chunk in chunks])

    def _spread(self, count: int) -> torch.Tensor:
        """The same windows in all runs, spread over the held-out files, which no training window touches."""
        starts = torch.linspace(0, self._held_out.numel() - self._config.context - 1, count).long()
        return self._windows(self._held_out, starts)

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return text[starts[:, None] + torch.arange(self._config.context + 1)].long()
