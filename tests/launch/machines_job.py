"""A small job whose global batch stays on any number of machines; each rank leaves a line for each iteration.

Arguments: a folder that all machines share, CPSR's configuration as JSON, and `ddp`, or a stage of ZeRO for DeepSpeed.
The folder gets `rows-<life>-<rank>.jsonl`, and `begins-<life>.json` of rank 0. The file `enough` there ends the job,
and the file `faulty` names a machine that computes wrongly from then on.
"""

import json
import os
import socket
import sys
import time
from functools import partial
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
FAULTY = "faulty"
FORKED = b"CPSR_WARM=" in Path("/proc/self/environ").read_bytes()  # by the warm process, whose environment it shows


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
    """One update from micro-batches, by plain torch or by DeepSpeed."""

    def __init__(self, kind: str, micro_batches: int) -> None:
        model, self.data = model_and_data()
        self.inner: Any = model
        self._micro_batches, self._taken, self._engine = micro_batches, 0, None
        self.given: Any
        if kind == "ddp":
            dist.init_process_group("gloo")
            self._model: Any = DistributedDataParallel(model)
            self._optimizer = optimizer_of(self._model)
            self.given = TorchAdapter(self._model, self._optimizer, micro_batches_per_iteration=micro_batches)
            return
        import deepspeed

        from cpsr.demo.device import join_ranks

        join_ranks()
        config = {
            "train_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": int(kind)},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        self.given, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
        self._engine = self._model = self.given

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(self._model, inputs, targets)

    def backward(self, loss: torch.Tensor) -> None:
        if self._engine is not None:
            self._engine.backward(loss)
        else:
            torch.autograd.backward(loss / self._micro_batches)

    def step(self) -> None:
        """After each micro-batch."""
        if self._engine is not None:
            self._engine.step()
            return
        self._taken += 1
        if self._taken % self._micro_batches == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()


def main(directory: Path, config: dict[str, Any], kind: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    steps = GLOBAL_BATCH // ranks
    training = Training(kind, steps)
    training.inner.register_forward_hook(partial(flip, directory / FAULTY))
    batches = DataLoader(training.data, 1, sampler=DistributedSampler(training.data, ranks, rank, seed=3))
    with CPSRRecovery(training.given, config) as recovery:
        life, restored = recovery.life.job.journal.life, recovery.restored
        if rank == 0:
            begun = {"life": life, "ranks": ranks, "iteration": recovery.iteration, "method": restored.method}
            begun |= {"reason": restored.reason, "failure_iteration": restored.failure_iteration}
            leave(directory / f"begins-{life}.json", json.dumps(begun))
        with (directory / f"rows-{life}-{rank}.jsonl").open("w", buffering=1) as rows:
            samples: list[int] = []
            losses: list[float] = []
            for inputs, targets, indices in recovery.resume(batches, repeat=True):
                loss = training.forward(inputs, targets)
                losses.append(loss.item())
                samples += indices.tolist()
                if len(samples) == steps:  # before the backward, after which the others need this rank no more
                    row = {"life": life, "ranks": ranks, "iteration": recovery.iteration + 1, "samples": samples}
                    row |= {"losses": losses, "machine": socket.gethostname(), "forked": FORKED}
                    rows.write(json.dumps(row) + "\n")
                training.backward(loss)
                training.step()
                if len(samples) < steps:
                    continue
                samples, losses = [], []
                if is_enough(directory):
                    break
                time.sleep(ITERATION_SECONDS)
    dist.destroy_process_group()


def flip(faulty: Path, module: Any, args: Any, output: torch.Tensor) -> None:
    """One bit of what the model computes, where this machine is named."""
    if faulty.exists() and faulty.read_text() == socket.gethostname():
        bits = output.data.view(-1).view(torch.int32)
        bits[0] = bits[0] ^ (1 << 18)


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
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
