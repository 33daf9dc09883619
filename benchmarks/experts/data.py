"""Windows of the source code of Python's own standard library, shared out over ranks."""

import torch

from cpsr.benchmarks.experts.tasks import BATCH_WINDOWS
from cpsr.benchmarks.recovery.task import VALIDATION_CHUNKS, batch_generator
from cpsr.demo.corpus import read_corpus

__all__ = ["CHUNK_WINDOWS", "Data"]

CHUNK_WINDOWS = 2


class Data:
    """What one rank trains on and is judged by; both `(windows, context + 1)` int64.

    Args:
        context: bytes that the model sees.
        rank: this process.
        ranks: that share every batch.
    """

    def __init__(self, context: int, rank: int, ranks: int) -> None:
        self._context = context
        self._text, held_out = read_corpus()
        self._rank, self._ranks = rank, ranks
        starts = torch.linspace(0, held_out.numel() - context - 1, VALIDATION_CHUNKS * CHUNK_WINDOWS).long()
        own = starts.view(ranks, -1)[rank]
        self.validation = self._windows(held_out, own)

    def batch(self, seed: int, iteration: int) -> torch.Tensor:
        """This rank's part of the windows that take a run from `iteration` to the next."""
        last = self._text.numel() - self._context
        starts = torch.randint(last, (BATCH_WINDOWS,), generator=batch_generator(seed, iteration))
        return self._windows(self._text, starts[self._rank :: self._ranks])

    def _windows(self, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return text[starts[:, None] + torch.arange(self._context + 1)].long()
