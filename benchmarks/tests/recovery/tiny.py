"""A workload that trains in a second, and how tests measure it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpsr.benchmarks.recovery.selection import Selection
from cpsr.benchmarks.recovery.tasks import FINAL_CHUNKS, batch_generator
from cpsr.benchmarks.recovery.workload import Workload

INPUTS = 12
METHODS = ("auto", "recompute", "stale", "predicted", "oracle")


class TinyTask:
    """A net that learns another net's outputs, through noise."""

    def __init__(self, noise: float = 0.1) -> None:
        self._noise = noise
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self._teacher = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 1))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1))

    def batch(self, seed: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._draw(16, batch_generator(seed, iteration))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        device = next(model.parameters()).device
        inputs, targets = (part.to(device) for part in self._draw(FINAL_CHUNKS * 16, batch_generator(99, 0)))
        losses = nn.functional.mse_loss(model(inputs), targets, reduction="none")
        return losses.view(FINAL_CHUNKS, -1).mean(1)

    def _draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, INPUTS, generator=generator)
        with torch.no_grad():
            targets = self._teacher(inputs)
        return inputs, targets + self._noise * torch.randn(count, 1, generator=generator)


TINY = Workload("tiny-cosine", TinyTask, "cosine", 1e-3, 1000)
SELECTION = Selection("tiny", (TINY.name,), (20, 50), (0.5,), points=2, seeds=1, methods=METHODS)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def called_here(work: Callable[..., Any], *arguments: Any) -> Any:
    """In place of `in_own_process`, which takes seconds to import what this process has."""
    return work(*arguments)


def measured(path: Path) -> Any:
    """Every figure of a call."""
    report = json.loads(path.read_text())
    return {key: report[key] for key in ("costs", "worths", "failures")}
