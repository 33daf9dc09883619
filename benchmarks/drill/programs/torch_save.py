"""`torch.save` every N steps, as PyTorch's tutorials have it: the script writes, and reads the newest file again."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cpsr.benchmarks.drill.job import Job, Record

KEPT = 2


class Files:
    """Checkpoints of a rank: one file each, which is complete when it has its name.

    With DDP rank 0 writes for all; with FSDP2 every rank writes its own part.
    """

    def __init__(self, job: Job, rank: int, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._writes = job.sharding != "ddp" or rank == 0
        self._mine = 0 if job.sharding == "ddp" else rank
        self._ranks = 1 if job.sharding == "ddp" else job.ranks
        self._folder = job.directory / "checkpoints"
        self._folder.mkdir(exist_ok=True)

    def load(self) -> int:
        """Bring the module and the optimizer to the newest checkpoint that all ranks have; its step."""
        steps = [self._steps(rank) for rank in range(self._ranks)]
        step = max(set(steps[0]).intersection(*steps[1:]), default=0)
        if step:
            state: Any = torch.load(self._path(self._mine, step), weights_only=False)
            set_state_dict(
                self._module, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        return step

    def save(self, step: int) -> None:
        """Write a checkpoint, and remove the one before the last."""
        if not self._writes:
            return
        model, optimizer = get_state_dict(self._module, self._optimizer)
        path = self._path(self._mine, step)
        torch.save({"model": model, "optimizer": optimizer}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        for old in self._steps(self._mine)[:-KEPT]:
            self._path(self._mine, old).unlink()

    def _steps(self, rank: int) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self._folder.glob(f"{rank}-*.pt"))

    def _path(self, rank: int, step: int) -> Path:
        return self._folder / f"{rank}-{step}.pt"


def main() -> None:
    """Train from the newest checkpoint to the end."""
    job = Job.of_arguments()
    rank = job.join()
    record = Record(job, rank)
    module = job.wrap(job.network())
    optimizer = job.optimizer(module)
    files = Files(job, rank, module, optimizer)
    begin = files.load()
    for step, batch in enumerate(job.batches(rank, job.ranks, begin), start=begin + 1):
        optimizer.zero_grad()
        loss = module(batch)
        loss.backward()
        optimizer.step()
        record.step(step, loss)
        if step % job.interval_iterations == 0:
            files.save(step)
    record.finish(module)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
