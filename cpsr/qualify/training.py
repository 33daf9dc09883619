"""A small training of a cell that fails and returns: engine, data and loop, and the reference that nothing happens to.

The reference runs without CPSR: equality with it also shows that CPSR changes nothing in a training.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr.engines import EngineAdapter, adapt
from cpsr.qualify.cells import Cell
from cpsr.qualify.conformance import seed
from cpsr.qualify.models import BATCH, LENGTH, VOCABULARY, TinyLM
from cpsr.qualify.scene import Scene
from cpsr.qualify.torch_cases import TorchJob, small_job

__all__ = ["Reference", "Training", "digest_of"]

SEQUENCES = 24  # per rank


class Training:
    """Engine and data of one life, the same in every life.

    Args:
        cell: DDP or DeepSpeed, or plain torch in a job of one rank.
        scene: where it runs.

    Attributes:
        recoverable: what `CPSRRecovery` takes.
        loader: of this rank's batches.
    """

    def __init__(self, cell: Cell, scene: Scene) -> None:
        seed(1)
        self._device = scene.device
        self._job: TorchJob | None = None
        self._engine: Any = None
        if cell.is_split:
            from cpsr.qualify.sharded_jobs import split_job

            self._job = split_job(cell, scene.device, scene.ranks, 1, "none")
            self.recoverable: Any = self._job.adapter
        elif cell.zero is None:
            self._job = small_job(cell.precision, cell.optimizer, scene.device, scene.ranks, schedule="none")
            self.recoverable = self._job.adapter
        else:
            from cpsr.qualify.deepspeed_jobs import configuration, initialize

            config = configuration(cell.zero, cell.precision, 1, cell.offload, steps_per_print=10**9)
            self._engine = initialize(TinyLM(), config, cell.optimizer, schedule="none")
            self.recoverable = self._engine
        data = TensorDataset(torch.randint(VOCABULARY, (SEQUENCES * scene.ranks, LENGTH + 1)))
        # Ranks of tensor parallelism train on the same batches.
        parts, part = (1, 0) if cell.engine == "tp" else (scene.ranks, scene.rank)
        sampler: DistributedSampler[Any] = DistributedSampler(data, parts, part, seed=3)
        self.loader: DataLoader[Any] = DataLoader(data, BATCH, sampler=sampler, drop_last=True)

    def passes(self) -> Iterator[Any]:
        """Batches of one pass after the other, as without CPSR."""
        for epoch in itertools.count():
            assert isinstance(self.loader.sampler, DistributedSampler)
            self.loader.sampler.set_epoch(epoch)
            yield from self.loader

    def step(self, batch: Any) -> float:
        """Train one iteration; returns the loss of this rank's batch."""
        (sequences,) = batch
        tokens, targets = sequences[:, :-1].to(self._device), sequences[:, 1:].to(self._device)
        if self._job is not None:
            return self._job.train_on([(tokens, targets)]).item()
        loss = self._engine(tokens, targets=targets)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())


@dataclass(frozen=True)
class Reference:
    """What a training gives that nothing happens to.

    Attributes:
        losses: of the iterations, in order.
        digests: of the state after some iterations.
    """

    losses: list[float]
    digests: dict[str, str]

    @classmethod
    def of(cls, training: Training, iterations: int, digested: Iterable[int]) -> "Reference":
        """Train without CPSR.

        Args:
            training: new.
            iterations: to train.
            digested: iterations after which the state is digested.
        """
        losses, digests, wanted = [], {}, set(digested)
        adapter = adapt(training.recoverable)
        for batch in itertools.islice(training.passes(), iterations):
            losses.append(training.step(batch))
            if len(losses) in wanted:
                digests[str(len(losses))] = digest_of(adapter)
        return cls(losses, digests)


def digest_of(adapter: EngineAdapter) -> str:
    """SHA-256 of this rank's weights, optimizer state, buffers and frozen weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(adapter.shard().all_tensors(), key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
