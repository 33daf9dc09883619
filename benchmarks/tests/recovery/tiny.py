"""A workload that trains in a second; run as a script, the benchmark over it, to be killed."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpsr.benchmarks.recovery.grid import Selection
from cpsr.benchmarks.recovery.run import main
from cpsr.benchmarks.recovery.task import FINAL_CHUNKS, VALIDATION_CHUNKS, batch_generator
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS, Workload

INPUTS = 12
METHODS = ("recompute", "stale", "line", "line-8-1.5", "oracle")


class TinyTask:
    """A net that learns another net's outputs, through noise."""

    def __init__(self, noise: float = 0.1, batch_rows: int = 16) -> None:
        self._noise = noise
        self._batch_rows = batch_rows
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self._teacher = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, 1))
        self._validation = self._draw(VALIDATION_CHUNKS * 16, batch_generator(99, 0))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 1))

    def batch(self, seed: int, iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._draw(self._batch_rows, batch_generator(seed, iteration))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def validation_losses(self, model: nn.Module) -> torch.Tensor:
        device = next(model.parameters()).device
        inputs, targets = (part.to(device) for part in self._validation)
        losses = nn.functional.mse_loss(model(inputs), targets, reduction="none")
        return losses.view(VALIDATION_CHUNKS, -1).mean(1)

    def final_losses(self, model: nn.Module) -> torch.Tensor:
        inputs, targets = self._draw(FINAL_CHUNKS * 16, batch_generator(99, 0))
        losses = nn.functional.mse_loss(model(inputs), targets, reduction="none")
        return losses.view(FINAL_CHUNKS, -1).mean(1)

    def _draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, INPUTS, generator=generator)
        with torch.no_grad():
            targets = self._teacher(inputs)
        return inputs, targets + self._noise * torch.randn(count, 1, generator=generator)


TINY = Workload("tiny-cosine", TinyTask, "cosine", 1e-3, 1000)
# Its training losses fall steadily enough to show their slope.
QUIET = Workload("quiet-cosine", partial(TinyTask, noise=0.0, batch_rows=512), "cosine", 1e-3, 1000)
SELECTION = Selection("tiny", (TINY.name,), (20, 50), (0.5,), points=2, seeds=1, methods=METHODS)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fault_free(cache: Path, until: int, task: TinyTask | None = None) -> Trajectory:
    """The tiny run, trained so far."""
    run = Trajectory(TINY, task or TinyTask(), 0, cache)
    run.extend(until)
    return run


def measured(path: Path) -> Any:
    """Every figure of a call but the times and the place."""
    report = json.loads(path.read_text())

    def without_times(part: Any) -> Any:
        if isinstance(part, dict):
            return {
                key: without_times(value)
                for key, value in part.items()
                if not (key.startswith("recover_") or key.endswith("_seconds"))
            }
        return [without_times(value) for value in part] if isinstance(part, list) else part

    return without_times({key: report[key] for key in ("means", "cells", "worths", "failures")})


if __name__ == "__main__":
    torch.set_num_threads(1)
    WORKLOADS[TINY.name] = TINY
    main(SELECTION, Path(sys.argv[1]))
