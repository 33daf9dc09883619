"""The run that never fails, trained once and kept on disk, segment by segment."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.benchmarks.harness.files import open_tensors, read_json, write_json, write_tensors
from cpsr.benchmarks.recovery.trainer import State, Trainer
from cpsr.benchmarks.recovery.workload import Task, Workload
from cpsr.demo.device import CPU, describe_device
from cpsr.errors import CPSRError
from cpsr.predictor.protocol import HistoryEntry

__all__ = ["CachedHistory", "Trajectory"]

# Training resumes from the last whole segment, and any state is at most this many iterations away from one on disk.
SEGMENT_ITERATIONS = 50
FINGERPRINT_ITERATIONS = 3
KEY_CHARACTERS = 12


class Trajectory:
    """The fault-free run of one workload and seed.

    Its directory is named after what it depends on: the workload's numbers, torch's version and threads, the GPU where
    there is one, and the exact weights after the first three iterations. These stand for the model, the data and the
    arithmetic of this machine.

    Args:
        workload: what is trained.
        task: the workload's task.
        seed: of the initial weights and the batches.
        cache: the directory of all trajectories.
        device: `cpu` or `cuda`, which the run trains on.
    """

    def __init__(self, workload: Workload, task: Task, seed: int, cache: Path, device: str = CPU) -> None:
        self.workload = workload
        self.seed = seed
        self._task = task
        self._device = device
        identity = _identity(self.trainer(), workload, seed)
        if device != CPU:
            identity["device"] = describe_device(device)["name"]
        text = json.dumps(identity, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS]
        self.directory = cache / f"{workload.name}-seed{seed}-{key}"
        if read_json(self.directory / "identity.json") is None:
            write_json(self.directory / "identity.json", identity)

    def trainer(self) -> Trainer:
        """A new trainer at iteration 0."""
        return Trainer(self.workload, self._task, self.seed, self._device)

    def segments(self, until: int) -> range:
        """Ends of the segments that reach `until`, or the end of the training."""
        end = min(until, self.workload.iterations)
        return range(SEGMENT_ITERATIONS, end + SEGMENT_ITERATIONS, SEGMENT_ITERATIONS)

    def missing(self, until: int) -> int:
        """Segments that `extend` would have to train."""
        return sum(not self._path(end).exists() for end in self.segments(until))

    def extend(self, until: int, on_segment: Callable[[], None] = lambda: None) -> None:
        """Train the segments that are missing up to `until`; each is on disk before the next begins.

        Raises:
            CPSRError: a file of the cache is damaged.
        """
        trainer: Trainer | None = None
        for end in self.segments(until):
            if self._path(end).exists():
                trainer = None
                continue
            trainer = trainer or self._at_segment(end - SEGMENT_ITERATIONS)
            write_tensors(self._path(end), _train_segment(trainer, self.workload.snapshot_iterations))
            on_segment()

    def at(self, iteration: int) -> Trainer:
        """A trainer that stands at `iteration` as the fault-free run did, retrained from the segment before it.

        Raises:
            CPSRError: the retraining does not reproduce the cached weights bit by bit, so that nothing measured
                against them would be paired.
        """
        trainer = self._at_segment(iteration - iteration % SEGMENT_ITERATIONS)
        self.advance(trainer, iteration)
        return trainer

    def advance(self, trainer: Trainer, iteration: int) -> None:
        """Train on to `iteration`, comparing with every snapshot on the way.

        Raises:
            CPSRError: a snapshot differs.
        """
        while trainer.iteration < iteration:
            trainer.step()
            if trainer.iteration % self.workload.snapshot_iterations == 0:
                self._compare(trainer)

    def final_losses(self) -> NDArray[numpy.float64]:
        """Loss of each chunk of the data that the end of the training is judged on, in nats; the run is whole.

        Raises:
            CPSRError: the training diverged, or a file of the cache is damaged.
        """
        path = self.directory / "final.json"
        kept = read_json(path)
        if kept is None:
            losses = self.at(self.workload.iterations).final_losses()
            if not numpy.isfinite(losses).all():
                raise CPSRError(f"{self.workload.name}, seed {self.seed}: the training without a failure diverged")
            kept = losses.tolist()
            write_json(path, kept)
        return numpy.array(kept)

    def history(self, checkpoint: int, interval: int) -> "CachedHistory":
        """The checkpoints at the multiples of `interval` up to `checkpoint`; none is made before training."""
        return CachedHistory(self.workload, self.path_of, range(interval, checkpoint + 1, interval))

    def path_of(self, iteration: int) -> Path:
        """File that holds the snapshot of `iteration`."""
        return self._path(-(-iteration // SEGMENT_ITERATIONS) * SEGMENT_ITERATIONS)

    def _path(self, end: int) -> Path:
        return self.directory / f"segment-{end:05d}.safetensors"

    def _at_segment(self, end: int) -> Trainer:
        trainer = self.trainer()
        if end:
            with open_tensors(self._path(end)) as file:
                moments = {moment: _tensors(file, f"{moment}/") for moment in trainer.moments}
                weights = _tensors(file, f"weights/{end}/")
            trainer.load(State(end, weights, moments))
        return trainer

    def _compare(self, trainer: Trainer) -> None:
        at = trainer.iteration
        if not self.path_of(at).exists():
            return
        with open_tensors(self.path_of(at)) as file:
            kept = _tensors(file, f"weights/{at}/")
        for name, values in trainer.weights().items():
            if not torch.equal(values, kept[name]):
                raise CPSRError(
                    f"training again to iteration {at} gave other weights than the cached run in {self.directory} "
                    f"(first in '{name}'): the machine does not compute the same twice, nothing here is paired; "
                    "try one thread (OMP_NUM_THREADS=1), in a new --cache"
                )


class CachedHistory:
    """Checkpoints of a run, read from memory-mapped files (a `History`).

    Args:
        workload: whose schedule gives the times.
        path_of: the file that holds the snapshot of an iteration, as `weights/<iteration>/<operator>`.
        iterations: of the checkpoints, ascending.
    """

    def __init__(self, workload: Workload, path_of: Callable[[int], Path], iterations: Sequence[int]) -> None:
        self.entries = tuple(
            HistoryEntry(iteration, workload.times[iteration], workload.learning_rate(iteration))
            for iteration in iterations
        )
        paths = dict.fromkeys(path_of(iteration) for iteration in iterations)
        self._files = {path: open_tensors(path) for path in paths}
        self._path_of = path_of
        self.operators: tuple[str, ...] = ()
        if self.entries:
            newest = self.entries[-1].iteration
            prefix = f"weights/{newest}/"
            keys = self._files[self._path_of(newest)].keys()
            self.operators = tuple(sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix)))

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
        iteration = self.entries[entry].iteration
        return self._files[self._path_of(iteration)].get_slice(f"weights/{iteration}/{operator}")


def _train_segment(trainer: Trainer, snapshot_iterations: int) -> dict[str, torch.Tensor]:
    begin = trainer.iteration
    kept: dict[str, torch.Tensor] = {}
    while trainer.iteration < begin + SEGMENT_ITERATIONS:
        trainer.step()
        if trainer.iteration % snapshot_iterations == 0:
            kept |= {f"weights/{trainer.iteration}/{name}": values for name, values in trainer.weights().items()}
    for moment, tensors in trainer.state().moments.items():
        kept |= {f"{moment}/{name}": values for name, values in tensors.items()}
    return kept


def _tensors(file: Any, prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): file.get_tensor(key) for key in list(file.keys()) if key.startswith(prefix)}


def _identity(trainer: Trainer, workload: Workload, seed: int) -> dict[str, object]:
    initial = trainer.state().digest()
    trainer.train_to(FINGERPRINT_ITERATIONS)
    rates = json.dumps([workload.learning_rate(iteration) for iteration in range(workload.iterations)])
    return {
        "workload": workload.name,
        "seed": seed,
        "iterations": workload.iterations,
        "learning_rates": hashlib.sha256(rates.encode()).hexdigest(),
        "initial_state": initial,
        f"state_after_{FINGERPRINT_ITERATIONS}": trainer.state().digest(),
        "kept_every": [workload.snapshot_iterations, SEGMENT_ITERATIONS],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
