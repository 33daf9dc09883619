"""The run that never fails: trained once, and kept in one file with the weights on its way."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.benchmarks.harness.files import open_tensors, write_tensors
from cpsr.benchmarks.recovery.tasks import Task
from cpsr.benchmarks.recovery.trainer import State, Trainer
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.demo.device import CPU, describe_device
from cpsr.errors import CPSRError
from cpsr.predictor.protocol import HistoryEntry

__all__ = ["CachedHistory", "Run", "Trajectory"]

STATE_ITERATIONS = 50  # any state is at most this many iterations away from one that is kept
FINGERPRINT_ITERATIONS = 3
KEY_CHARACTERS = 12


@dataclass(frozen=True)
class Run:
    """One training run, before it is trained; plain enough to be sent to another process.

    Attributes:
        workload: what is trained.
        seed: of the initial weights and the batches.
        cache: the directory of all trajectories.
        device: `cpu` or `cuda`.
    """

    workload: Workload
    seed: int
    cache: Path
    device: str = CPU

    def trajectory(self) -> "Trajectory":
        """The run in the cache, trained if it is not there."""
        return _trajectory(self)


@cache
def _trajectory(run: Run) -> "Trajectory":
    return Trajectory(run)  # kept for the run's next point: its name takes three iterations to find


@cache
def _task(workload: Workload) -> Task:
    return workload.task()


class Trajectory:
    """The fault-free run of one workload and seed.

    Its file is named after what it depends on: the workload's numbers, torch's version and threads, the GPU where
    there is one, and the exact weights after the first three iterations. These stand for the model, the data and the
    arithmetic of this machine.

    Args:
        run: what is trained.

    Raises:
        CPSRError: the training diverged.
    """

    def __init__(self, run: Run) -> None:
        self.workload, self.seed, self._run = run.workload, run.seed, run
        key = hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()[:KEY_CHARACTERS]
        self.directory = run.cache / f"{run.workload.name}-seed{run.seed}-{key}"
        self.path = self.directory / "run.safetensors"
        if not self.path.exists():
            write_tensors(self.path, self._trained())

    def trainer(self) -> Trainer:
        """A new trainer at iteration 0."""
        return Trainer(self.workload, _task(self.workload), self.seed, self._run.device)

    def at(self, iteration: int) -> Trainer:
        """A trainer that stands at `iteration` as the fault-free run did, retrained from the state kept before it.

        Raises:
            CPSRError: the retraining does not reproduce the kept weights bit by bit, so that nothing measured against
                them would be paired.
        """
        trainer, kept = self.trainer(), iteration - iteration % STATE_ITERATIONS
        if kept:
            with open_tensors(self.path) as file:
                moments = {moment: _tensors(file, f"{moment}/{kept}/") for moment in trainer.moments}
                trainer.load(State(kept, _tensors(file, f"weights/{kept}/"), moments))
        self.advance(trainer, iteration)
        return trainer

    def advance(self, trainer: Trainer, iteration: int) -> None:
        """Train on to `iteration`, comparing with all that is kept on the way.

        Raises:
            CPSRError: weights differ.
        """
        while trainer.iteration < iteration:
            trainer.step()
            at = trainer.iteration
            if at % self.workload.snapshot_iterations:
                continue
            with open_tensors(self.path) as file:
                kept = _tensors(file, f"weights/{at}/")
            for name, values in trainer.weights().items():
                if not torch.equal(values, kept[name]):
                    raise CPSRError(
                        f"training again to iteration {at} gave other weights than the cached run in {self.directory} "
                        f"(first in '{name}'): the machine does not compute the same twice, nothing here is paired; "
                        "try one thread (OMP_NUM_THREADS=1), in a new --cache"
                    )

    def final_losses(self) -> NDArray[numpy.float64]:
        """Loss of each chunk of the data that the end of the training is judged on, in nats."""
        with open_tensors(self.path) as file:
            losses: NDArray[numpy.float64] = file.get_tensor("final_losses").numpy()
        return losses

    def history(self, checkpoint: int, interval: int) -> "CachedHistory":
        """The checkpoints at the multiples of `interval` up to `checkpoint`; none is made before training."""
        return CachedHistory(self.workload, self.path, range(interval, checkpoint + 1, interval))

    def _trained(self) -> dict[str, torch.Tensor]:
        trainer, kept = self.trainer(), dict[str, torch.Tensor]()
        while trainer.iteration < self.workload.iterations:
            trainer.step()
            at = trainer.iteration
            if at % self.workload.snapshot_iterations == 0:
                kept |= {f"weights/{at}/{name}": values for name, values in trainer.weights().items()}
            if at % STATE_ITERATIONS == 0:
                for moment, tensors in trainer.state().moments.items():
                    kept |= {f"{moment}/{at}/{name}": values for name, values in tensors.items()}
        losses = trainer.final_losses()
        if not numpy.isfinite(losses).all():
            raise CPSRError(f"{self.workload.name}, seed {self.seed}: the training without a failure diverged")
        return kept | {"final_losses": torch.from_numpy(losses)}

    def _identity(self) -> dict[str, object]:
        trainer, workload = self.trainer(), self.workload
        initial = trainer.state().digest()
        trainer.train_to(FINGERPRINT_ITERATIONS)
        return {
            "workload": [workload.name, workload.iterations, workload.snapshot_iterations, self.seed],
            "learning_rates": [workload.learning_rate(iteration) for iteration in range(workload.iterations)],
            "states": [initial, trainer.state().digest()],
            "torch": [torch.__version__, torch.get_num_threads()],
            "device": self._run.device if self._run.device == CPU else describe_device(self._run.device)["name"],
        }


class CachedHistory:
    """Checkpoints of a run, read from its memory-mapped file (a `History`)."""

    def __init__(self, workload: Workload, path: Path, iterations: range) -> None:
        self.entries = tuple(HistoryEntry(at, workload.times[at], workload.learning_rate(at)) for at in iterations)
        self._file = open_tensors(path)
        prefix = f"weights/{iterations[-1]}/" if self.entries else "none"
        self.operators = tuple(sorted(_names(self._file, prefix)))

    def numel(self, operator: str) -> int:
        """Elements of the parameter."""
        return int(self._slice(operator, len(self.entries) - 1).get_shape()[0])

    def taken_at(self, operator: str, entry: int) -> int:
        """Every operator is taken with its checkpoint."""
        return self.entries[entry].iteration

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """Weights `[start, stop)` in that entry, 1-D float32."""
        piece: torch.Tensor = self._slice(operator, entry)[start:stop]
        return piece

    def _slice(self, operator: str, entry: int) -> Any:
        return self._file.get_slice(f"weights/{self.entries[entry].iteration}/{operator}")


def _names(file: Any, prefix: str) -> list[str]:
    return [key.removeprefix(prefix) for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 - no mapping


def _tensors(file: Any, prefix: str) -> dict[str, torch.Tensor]:
    return {name: file.get_tensor(prefix + name) for name in _names(file, prefix)}
