"""The function that is measured: a network that learns digits, and notes when it came to each hint."""

import functools
import hashlib
import math
import os
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy
import torch
import torch._dynamo  # the first optimizer does, in seconds; a process of this module has it
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

from cpsr.hints import hint, resumable
from cpsr.hints.resumable_checkpoints import KeptCheckpoints, Written

__all__ = ["LOOPS", "Life", "Shape", "run"]

HIDDEN = 128
PATH = "CPSR_BENCH_HINTS"


@dataclass(frozen=True)
class Shape:
    """The loops of the function.

    Attributes:
        epochs: repetitions of the outer loop.
        rows: of the batch of each step of the inner one.
    """

    epochs: int
    rows: tuple[int, ...]

    @property
    def hints(self) -> int:
        """One after each step, and one after each epoch."""
        return self.epochs * (len(self.rows) + 1)


LOOPS = {
    "5 epochs of 200 steps": Shape(5, (640,) * 200),  # the paper's figure 2, and its training
    "400 longer and longer steps": Shape(1, tuple(range(8, 3208, 8))),
    "1000 equal steps": Shape(1, (640,) * 1000),
}


class Life:
    """What one process notes, in a file that outlives it.

    Args:
        path: of the file.

    Attributes:
        before: seconds of the clock at each hint; 0: not reached.
        after: where the function went on behind it; number 0: where it began.
        saved: whether it was a checkpoint.
        written: when that was written; 0: never.
        processor: its seconds of the processor, of the thread that wrote it.
    """

    def __init__(self, path: str) -> None:
        table: NDArray[Any] = numpy.memmap(path, numpy.float64, "r+").reshape(5, -1)
        self.before, self.after, self.saved, self.written, self.processor = table
        self.path, self._hint = Path(path), 0

    @staticmethod
    def new(path: Path, hints: int) -> "Life":
        """That of a process to come."""
        numpy.zeros((5, hints + 1)).tofile(path)
        return Life(str(path))

    def digest(self) -> str:
        """Hash of every bit that came out."""
        return Path(f"{self.path}.digest").read_text()

    def reach(self, number: int) -> None:
        """A hint comes."""
        self._hint, self.before[number] = number, perf_counter()

    def save(self, save: "Callable[..., Future[Written]]", *content: Any) -> "Future[Written]":
        """Keep a checkpoint at this hint."""
        number, writing = self._hint, save(*content)
        self.saved[number] = 1

        def note(done: "Future[Written]") -> None:
            self.written[number], self.processor[number] = perf_counter(), done.result().processor_seconds

        writing.add_done_callback(note)
        return writing

    @property
    def own_seconds(self) -> NDArray[Any]:
        """The function's own seconds before each hint that it reached, from the first one on."""
        return numpy.where((self.before[1:] > 0) & (self.after[:-1] > 0), self.before[1:] - self.after[:-1], 0.0)

    @property
    def resumed_at(self) -> int:
        """The hint that the process has gone on from; 0: it began anew."""
        return int(numpy.flatnonzero(self.after)[0])

    def seconds_since(self, hint: int, end_seconds: float) -> float:
        """The function's own seconds between a hint and a time of the clock, at which it was killed."""
        newest = int(numpy.flatnonzero(self.after)[-1])
        inside = 0.0 if self.before[newest + 1] else end_seconds - self.after[newest]
        return float(self.own_seconds[hint:].sum() + inside)


@functools.cache
def life() -> Life:
    """That of this process; no checkpoint has it."""
    return Life(os.environ[PATH])


def reached(number: int) -> None:
    """Note that a hint comes."""
    life().reach(number)


def passed(number: int) -> None:
    """Note that it has passed."""
    life().after[number] = perf_counter()


def is_even(number: int, hints: int, evenly: int) -> bool:
    """Whether a hint is one of so many at even distances."""
    return number * (evenly + 1) // hints > (number - 1) * (evenly + 1) // hints and number < hints


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: list[torch.Tensor],
    epochs: int,
    rows: tuple[int, ...],
    evenly: int,
) -> list[float]:
    """Train; `evenly`: so many hints at even distances are hints, 0: all are."""
    losses, number, hints = [], 0, epochs * (len(rows) + 1)
    for _ in range(epochs):
        for count in rows:
            chosen = torch.randint(len(digits[0]), (count,))
            loss = nn.functional.cross_entropy(model(digits[0][chosen]), digits[1][chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            optimizer.step()
            losses.append(loss.item())
            del loss
            number += 1
            reached(number)
            if not evenly or is_even(number, hints, evenly):
                hint()
            passed(number)
        number += 1
        reached(number)
        if not evenly or is_even(number, hints, evenly):
            hint()
        passed(number)
    return losses


def run(path: str, name: str, run_dir: str, allowance: float, evenly: int) -> None:
    """One process: call the function, and write the hash of every bit that came out beside the file of its life."""
    os.environ[PATH] = path
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(1)  # a fork seeds it otherwise
    numpy.random.seed(1)
    save = KeptCheckpoints.save
    setattr(KeptCheckpoints, "save", lambda *given: life().save(save, *given))  # noqa: B010 - mypy: it is a method
    data, shape = load_digits(), LOOPS[name]
    digits = [torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)]
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Dropout(0.2), nn.Linear(HIDDEN, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    call = resumable(run_dir, math.inf if evenly else allowance)(train)
    life().after[0] = perf_counter()
    losses = call(model, optimizer, digits, shape.epochs, shape.rows, evenly)
    taken = hashlib.sha256(repr(losses).encode())
    for one in model.parameters():
        taken.update(one.detach().numpy().tobytes())
    Path(f"{path}.digest").write_text(taken.hexdigest())
