"""A small job whose global batch stays on any number of machines; each rank leaves a line for each iteration.

Arguments: a folder that all machines share, and CPSR's configuration as JSON.
The folder gets `rows-<life>-<rank>.jsonl`, and `begins-<life>.json` of rank 0. The file `enough` there ends the job.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter

ITEMS, GLOBAL_BATCH = 48, 12
ITERATION_SECONDS = 0.1  # so that a test can come in between
ENOUGH = "enough"


def model_and_data() -> tuple[nn.Module, TensorDataset]:
    """The same everywhere: the model returns its loss, and the last tensor is each sample's index."""
    torch.manual_seed(7)
    inputs = torch.randn(ITEMS, 6)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(ITEMS))
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), data


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs).float(), targets)


class Training:
    """One update from micro-batches."""

    def __init__(self, micro_batches: int) -> None:
        model, self.data = model_and_data()
        dist.init_process_group("gloo")
        self._model = DistributedDataParallel(model)
        self._optimizer = optimizer_of(self._model)
        self._micro_batches, self._taken = micro_batches, 0
        self.adapter = TorchAdapter(self._model, self._optimizer, micro_batches_per_iteration=micro_batches)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(self._model, inputs, targets)
        torch.autograd.backward(loss / self._micro_batches)
        return loss.item()

    def step(self) -> None:
        """After each micro-batch."""
        self._taken += 1
        if self._taken % self._micro_batches == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()


def main(directory: Path, config: dict[str, Any]) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps = GLOBAL_BATCH // ranks
    training = Training(steps)
    batches = DataLoader(training.data, 1, sampler=DistributedSampler(training.data, ranks, rank, seed=3))
    with CPSRRecovery(training.adapter, config) as recovery:
        life, restored = recovery.life.job.journal.life, recovery.restored
        if rank == 0:
            begun = {"life": life, "ranks": ranks, "iteration": recovery.iteration, "method": restored.method}
            begun |= {"reason": restored.reason, "failure_iteration": restored.failure_iteration}
            leave(directory / f"begins-{life}.json", json.dumps(begun))
        with (directory / f"rows-{life}-{rank}.jsonl").open("w", buffering=1) as rows:
            samples: list[int] = []
            losses: list[float] = []
            for inputs, targets, indices in recovery.resume(batches, repeat=True):
                losses.append(training.backward(inputs, targets))
                samples += indices.tolist()
                if len(samples) == steps:  # before the update: a rank may be killed right after it
                    row = {"life": life, "ranks": ranks, "iteration": recovery.iteration + 1, "samples": samples}
                    rows.write(json.dumps(row | {"losses": losses, "machine": socket.gethostname()}) + "\n")
                training.step()
                if len(samples) < steps:
                    continue
                samples, losses = [], []
                if is_enough(directory):
                    break
                time.sleep(ITERATION_SECONDS)
    dist.destroy_process_group()


def is_enough(directory: Path) -> bool:
    """Whether the job is to end; the same on all ranks."""
    found = torch.tensor([int((directory / ENOUGH).exists())])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def leave(path: Path, content: str) -> None:
    """Write a file that nobody sees a part of."""
    path.with_suffix(".part").write_text(content)
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
