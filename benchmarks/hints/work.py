"""The two functions that are measured: a loop of 5 times 50 steps, and a network that learns digits."""

import functools
import hashlib
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

from cpsr.hints import hint

__all__ = ["WORK", "arguments", "digest", "times"]

WIDTH, HIDDEN, BATCH = 320, 512, 64


@functools.cache
def times() -> list[float]:
    """When each hint was reached; no checkpoint has it."""
    return []


def passed() -> None:
    """Note the time."""
    times().append(perf_counter())


def loop(parameters: NDArray[Any], outer: int, inner: int, products: int) -> Any:
    """The paper's figure 2: rounds of steps, with a hint after each step and each round."""
    for _ in range(outer):
        for _ in range(inner):
            for _ in range(products):
                parameters = numpy.tanh(parameters @ parameters.T / WIDTH + parameters)
            parameters += 1e-3 * numpy.random.standard_normal(parameters.shape)
            passed()
            hint()
        parameters -= parameters.mean()
        passed()
        hint()
    return [parameters]


def digits(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    epochs: int,
) -> Any:
    """A training with shuffled batches and dropout, with a hint after each step and each epoch."""
    losses = []
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for first in range(0, len(images), BATCH):
            chosen = order[first : first + BATCH]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            losses.append(loss.item())
            del loss
            passed()
            hint()
        passed()
        hint()
    return [losses, *(one.detach() for one in model.parameters())]


WORK: dict[str, Callable[..., Any]] = {"loop": loop, "digits": digits, "long loop": loop}


def arguments(name: str, rounds: int) -> dict[str, Any]:
    """What a function is given, the same in every process, with so many rounds or epochs."""
    numpy.random.seed(1)
    torch.manual_seed(2)
    if WORK[name] is loop:
        start = numpy.random.default_rng(3).standard_normal((WIDTH, WIDTH))
        return {"parameters": start, "outer": rounds, "inner": 50, "products": 12}
    data = load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    layers = [nn.Linear(64, HIDDEN), nn.ReLU(), nn.Dropout(0.2), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    labels = torch.tensor(data.target)
    return {"model": model, "optimizer": optimizer, "images": images, "labels": labels, "epochs": rounds}


def digest(result: Any) -> str:
    """Of every bit of what a function returned."""
    taken = hashlib.sha256()
    for one in result:
        taken.update(numpy.asarray(one).tobytes())
    return taken.hexdigest()
