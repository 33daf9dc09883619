"""`torch.distributed.checkpoint.async_save` every N steps, as its documentation has it."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from cpsr.benchmarks.drill.job import Rank

KEPT = 2
METADATA = ".metadata"  # which DCP writes last


class Checkpoints:
    """Checkpoints that are written while training goes on; a save first waits for the one before."""

    def __init__(self, rank: Rank) -> None:
        self._module, self._optimizer, self._rank = rank.module, rank.optimizer, rank.number
        self._folder = rank.job.directory / "checkpoints"
        self._folder.mkdir(exist_ok=True)
        self._pending: Future[Any] | None = None
        # Its thread's collectives would meet those of the training in the one group of gloo.
        self._group = dist.new_group(backend="gloo", timeout=rank.job.timeout)

    def load(self) -> int:
        """Bring the module and the optimizer to the newest complete checkpoint; its step."""
        step = max(self._steps(), default=0)
        if step:
            model, optimizer = get_state_dict(self._module, self._optimizer)
            state = {"model": model, "optimizer": optimizer}
            load(state, checkpoint_id=self._path(step))
            set_state_dict(self._module, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        return step

    def save(self, step: int) -> None:
        """Begin to write a checkpoint."""
        self.wait()
        if self._rank == 0:
            for old in self._steps()[:-KEPT]:
                shutil.rmtree(self._path(old))
            shutil.rmtree(self._path(step), ignore_errors=True)  # of an earlier life that did not complete it
        model, optimizer = get_state_dict(self._module, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        pending = async_save(state, checkpoint_id=self._path(step), process_group=self._group)
        assert isinstance(pending, Future)
        self._pending = pending

    def wait(self) -> None:
        """For the save that is under way."""
        if self._pending is not None:
            self._pending.result()

    def _steps(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self._folder.glob(f"*/{METADATA}"))

    def _path(self, step: int) -> Path:
        return self._folder / str(step)


def main() -> None:
    """Train from the newest checkpoint to the end."""
    rank = Rank()
    checkpoints = Checkpoints(rank)
    rank.train(
        checkpoints.load(), lambda step: checkpoints.save(step) if step % rank.job.interval_iterations == 0 else None
    )
    checkpoints.wait()
    rank.end()


if __name__ == "__main__":
    main()
