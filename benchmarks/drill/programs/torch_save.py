"""`torch.save` every N steps, as PyTorch's tutorials have it: the script writes, and reads the newest file again."""

from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.drill.job import Rank

KEPT = 2


class Files:
    """Checkpoints of a rank: one file each, which is complete when it has its name.

    With DDP rank 0 writes for all; with FSDP2 every rank writes its own part.
    """

    def __init__(self, rank: Rank) -> None:
        self._module, self._optimizer = rank.module, rank.optimizer
        alike = rank.job.sharding == "ddp"
        self._writes = not alike or rank.number == 0
        self._mine = 0 if alike else rank.number
        self._ranks = 1 if alike else rank.job.ranks
        self._folder = rank.job.directory / "checkpoints"
        self._folder.mkdir(exist_ok=True)

    def load(self) -> int:
        """Bring the module and the optimizer to the newest checkpoint that all ranks have; its step."""
        steps = [self._steps(rank) for rank in range(self._ranks)]
        step = max(set(steps[0]).intersection(*steps[1:]), default=0)
        if step:
            state: Any = torch.load(self._path(self._mine, step), weights_only=False)
            self._module.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        return step

    def save(self, step: int) -> None:
        """Write a checkpoint, and remove the one before the last."""
        if not self._writes:
            return
        path = self._path(self._mine, step)
        state = {"model": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        for old in self._steps(self._mine)[:-KEPT]:
            self._path(self._mine, old).unlink()

    def _steps(self, rank: int) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self._folder.glob(f"{rank}-*.pt"))

    def _path(self, rank: int, step: int) -> Path:
        return self._folder / f"{rank}-{step}.pt"


def main() -> None:
    """Train from the newest checkpoint to the end."""
    rank = Rank()
    files = Files(rank)
    rank.train(files.load(), lambda step: files.save(step) if step % rank.job.interval_iterations == 0 else None)
    rank.end()


if __name__ == "__main__":
    main()
