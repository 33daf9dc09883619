"""The history that is predicted from: checkpoints of a GPT-2, with random weights, in a run directory."""

import math
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.demo.model import GPT, GPTConfig
from cpsr.errors import CPSRError
from cpsr.predictor.protocol import Target
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["BYTES_PER_VALUE", "GPT2_350M", "SPAN_ITERATIONS", "SyntheticHistory"]

# The paper's GPT2-0.35B: 24 layers, width 1024, with GPT-2's vocabulary and context.
GPT2_350M = GPTConfig(layers=24, heads=16, width=1024, context=1024, vocabulary=50257)
# A run in its middle, at a constant learning rate, with a history as long as its windows.
NEWEST_ITERATION = 10_000
SPAN_ITERATIONS = 294
LEARNING_RATE = 3e-4
FAILURE_SHARE_OF_INTERVAL = 0.8
WEIGHT_SIZE = 0.02
BYTES_PER_VALUE = 4
DISK_MARGIN = 1.05  # manifests, and what a file system keeps for itself
COMMIT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class SyntheticHistory:
    """Full-precision weights of one rank in a run's own files; no cost depends on the weights' values.

    Attributes:
        directory: the run directory.
        config: shape of the model.
        checkpoints: how many, 2 or more.
    """

    directory: Path
    config: GPTConfig
    checkpoints: int

    @property
    def iterations(self) -> list[int]:
        """Iterations of the checkpoints, ascending."""
        return [NEWEST_ITERATION - self._interval * place for place in reversed(range(self.checkpoints))]

    @property
    def target(self) -> Target:
        """A failure late in the interval after the newest checkpoint."""
        iteration = NEWEST_ITERATION + math.ceil(FAILURE_SHARE_OF_INTERVAL * self._interval)
        return Target(iteration, iteration * LEARNING_RATE, LEARNING_RATE)

    @property
    def parameters(self) -> int:
        """Values in each checkpoint."""
        return sum(math.prod(shape) for shape in _operator_shapes(self.config).values())

    def write(self, on_checkpoint: Callable[[], None]) -> None:
        """Write the checkpoints, which stay in the page cache.

        Raises:
            CPSRError: the disk has no room for them, or a checkpoint was not committed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        store = CheckpointStore(self.directory, rank=0, world_size=1, run_id="synthetic", life=1)
        store.prepare()
        self._check_room()
        shapes = _operator_shapes(self.config)
        for iteration in self.iterations:
            _write_one(store, shapes, iteration)
            on_checkpoint()

    @property
    def _interval(self) -> int:
        return max(1, SPAN_ITERATIONS // (self.checkpoints - 1))

    def _check_room(self) -> None:
        needed = int(self.checkpoints * self.parameters * BYTES_PER_VALUE * DISK_MARGIN)
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise CPSRError(
                f"{self.directory}: {self.checkpoints} checkpoints of {self.parameters:,} parameters take {needed:,} "
                f"bytes, {free:,} are free; name another --workdir"
            )


def _operator_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model, which is not built for it."""
    with torch.device("meta"):
        model = GPT(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _write_one(store: CheckpointStore, shapes: Mapping[str, tuple[int, ...]], iteration: int) -> None:
    generator = torch.Generator().manual_seed(iteration)
    operators = {}
    for name, shape in shapes.items():
        values = torch.randn(math.prod(shape), generator=generator).mul_(WEIGHT_SIZE)
        operators[name] = OperatorState(name, ParamSlice(values, shape), {}, iteration)
    scalars = {"cumulative_learning_rate": iteration * LEARNING_RATE, "learning_rate": LEARNING_RATE}
    store.write(Snapshot(iteration, Shard(operators), scalars))
    result = store.commit(iteration, COMMIT_TIMEOUT_SECONDS, threading.Event())
    if not result.committed:
        raise CPSRError(f"the synthetic checkpoint {iteration} was not committed: {result.reason}")
