"""Data that draws from every global generator in the loader's workers, so that their random states show in the loss."""

import random
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["ITEMS", "Drawing", "drawing_loader"]

ITEMS = 32


class Drawing(Dataset[Any]):
    """Four numbers and their sum, plus what torch, NumPy and `random` draw.

    Args:
        named: items are dictionaries, and nothing is drawn: under accelerate the random states of workers are lost.
    """

    def __init__(self, *, named: bool = False) -> None:
        self.x = torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(1))
        self.named = named

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        x, target = self.x[index], self.x[index].sum(0, keepdim=True)
        if self.named:
            return {"x": x, "labels": target}
        return x + torch.randn(4) + float(numpy.random.rand()) + random.random(), target


def drawing_loader(*, persistent: bool, own_generator: bool = False) -> DataLoader[Any]:
    """Eight batches in a pass, with two workers."""
    generator = torch.Generator().manual_seed(5) if own_generator else None
    return DataLoader(Drawing(), 4, shuffle=True, num_workers=2, persistent_workers=persistent, generator=generator)
