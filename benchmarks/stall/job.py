"""The training job that is interrupted by checkpoints: a byte-level MLP under AdamW, step by step."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import nn
from torch.nn import functional

from cpsr.benchmarks.harness.processes import wait_for
from cpsr.demo.device import CPU
from cpsr.engines.torch import TorchAdapter

__all__ = ["SIZES", "Job", "Size"]

VOCABULARY = 256
BATCHES = 8


@dataclass(frozen=True)
class Size:
    """A model, its batch and its device, such that state and step time are what they should be.

    Attributes:
        name: as in the tables.
        width: of the hidden layers.
        layers: hidden layers.
        batch: tokens per step.
        device: `cpu` or `cuda`.
    """

    name: str
    width: int
    layers: int
    batch: int
    device: str = CPU


# Weights and both moments in fp32 take 64.2 and 512.2 million bytes. The batches give a step of 0.1 to 1 s on two
# cores: a copy of the state has something to run beside, as it would on a real job. A GPU's steps are far shorter.
SIZES = (Size("64 MB", 984, 5, 1024), Size("512 MB", 2040, 10, 64))


class _ByteMLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = [part for _ in range(size.layers) for part in (nn.Linear(size.width, size.width), nn.GELU())]
        embedding, head = nn.Embedding(VOCABULARY, size.width), nn.Linear(size.width, VOCABULARY)
        self.layers = nn.Sequential(embedding, *hidden, head)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss of int64 tokens and targets, both `(batch,)`: a scalar."""
        return functional.cross_entropy(self.layers(tokens), targets)


class Job:
    """A model, its optimizer, its adapter, and a step that is timed.

    Attributes:
        device: `cpu` or `cuda`.
        adapter: what CPSR wraps.
        updated_unix_seconds: when the last update was through, before anybody's checkpoint of it began.
    """

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self.device = size.device
        self._model = _ByteMLP(size).to(self.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self.updated_unix_seconds = 0.0
        # Registered before CPSR's hook, so that it runs before it.
        self._optimizer.register_step_post_hook(self._note_update)
        self.adapter = TorchAdapter(self._model, self._optimizer)
        tokens = torch.randint(VOCABULARY, (BATCHES, 2, size.batch)).to(self.device)
        self._batches = cycle([(batch[0], batch[1]) for batch in tokens])

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Weights and moments: the same tensors for every method."""
        return dict(self.adapter.shard().tensors())

    def step(self, then: Callable[[], None] | None = None) -> float:
        """One step of training.

        Args:
            then: called after the update, as a loop would that saves there.

        Returns:
            Seconds of this thread, from before the forward until `then` returned and the device had computed the step;
            copies of a checkpoint on other streams may go on.
        """
        tokens, targets = next(self._batches)
        started = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(tokens, targets).backward()
        self._optimizer.step()
        if then is not None:
            then()
        wait_for(self.device)
        return time.perf_counter() - started

    def _note_update(self, *_: object) -> None:
        self.updated_unix_seconds = time.time()
