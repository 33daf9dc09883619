"""The unit of prediction time: training iterations of the same model on the same machine."""

import time

import torch

from cpsr.benchmarks.harness.device import wait_for
from cpsr.demo.model import GPT, GPTConfig

__all__ = ["ITERATIONS", "training_seconds"]

ITERATIONS = 5
WARM_UP_ITERATIONS = 1  # makes the moments


def training_seconds(config: GPTConfig, tokens: int, device: str) -> list[float]:
    """Seconds of each of five iterations: forward, backward and AdamW in float32, one sequence a batch.

    Takes 16 bytes a parameter of the device's memory, and the activations.

    Args:
        config: shape of the model.
        tokens: length of the sequence, at most the context.
        device: `cpu` or `cuda`.
    """
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(WARM_UP_ITERATIONS + ITERATIONS):
        window = torch.randint(config.vocabulary, (1, tokens + 1)).to(device)
        wait_for(device)
        started = time.perf_counter()
        optimizer.zero_grad()
        model(window).backward()
        optimizer.step()
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP_ITERATIONS:]
