"""Windows of the source code of Python's own standard library, shared out over ranks."""

import torch

from cpsr.benchmarks.experts.tasks import Mixture
from cpsr.benchmarks.recovery.task import VALIDATION_CHUNKS, batch_generator
from cpsr.demo.model import read_corpus

__all__ = ["CHUNK_WINDOWS", "Data"]

CHUNK_WINDOWS = 2


class Data:
    """What one rank trains on and is judged by; both `(windows, context + 1)` int64.

    Args:
        mixture: how many bytes the model sees, and of how many windows.
        rank: this process.
        ranks: that share every batch.
    """

    def __init__(self, mixture: Mixture, rank: int, ranks: int) -> None:
        self._context, self._batch_windows = mixture.gpt.context, mixture.batch_windows
        self._text, held_out = read_corpus()
        self._rank, self._ranks = rank, ranks
        starts = torch.linspace(0, held_out.numel() - self._context - 1, VALIDATION_CHUNKS * CHUNK_WINDOWS).long()
        own = starts.view(ranks, -1)[rank]
        self.validation = self._windows(held_out, own)

    def batch(self, seed: int, iteration: int) -> torch.Tensor:
        """This rank's part of the windows that take a run from `iteration` to the next."""
        last = self._text.numel() - self._context
        starts = torch.randint(last, (self._batch_windows,), generator=batch_generator(seed, iteration))
        return self._windows(self._text, starts[self._rank :: self._ranks])

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return text[starts[:, None] + torch.arange(self._context + 1)].long()
