"""The job that every program trains, and what its ranks write down for the drill."""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset

from cpsr.demo.model import GPT, GPTConfig, Windows, read_corpus

__all__ = ["Job", "Record"]

JOB_FILE = "job.json"
MACHINES = 2
END_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    """A GPT that is trained for some steps.

    Attributes:
        directory: on the disk that all machines share.
        ranks: in the job, on two machines.
        sharding: `ddp`, or `fsdp2`.
        steps: to the end of the training.
        batch: windows of a step, over all ranks.
        model: its shape.
        interval_iterations: between two saves, where the program decides; 0: never.
        hang_seconds: after which a rank that does not answer counts as failed, where that is a setting.
        mtbf_seconds: mean time between failures, where that is a setting.
    """

    directory: Path
    ranks: int
    sharding: str
    steps: int
    batch: int
    model: GPTConfig
    interval_iterations: int
    hang_seconds: float
    mtbf_seconds: float

    @classmethod
    def of_arguments(cls) -> Self:
        """The job in the directory that is the program's argument."""
        directory = Path(sys.argv[1])
        plain = json.loads((directory / JOB_FILE).read_text(encoding="utf-8"))
        return cls(**plain | {"directory": directory, "model": GPTConfig(**plain["model"])})

    def write(self) -> None:
        """Leave it for the programs."""
        text = json.dumps(asdict(self) | {"directory": str(self.directory)})
        (self.directory / JOB_FILE).write_text(text, encoding="utf-8")

    @property
    def timeout(self) -> timedelta:
        """For collectives."""
        return timedelta(seconds=self.hang_seconds)

    @property
    def local_disk(self) -> Path:
        """A folder on the disk of this machine alone; it survives a loss of memory."""
        path = self.directory / "disks" / socket.gethostname()
        path.mkdir(parents=True, exist_ok=True)
        return path

    def join(self) -> int:
        """Join the other ranks over gloo; this one's rank."""
        dist.init_process_group("gloo", timeout=self.timeout)
        return dist.get_rank()

    def network(self) -> GPT:
        """The model with its first weights, the same on all ranks."""
        torch.manual_seed(0)
        return GPT(self.model)

    def wrap(self, network: GPT, mesh: Any = None) -> nn.Module:
        """Let the ranks share their gradients, or their weights too."""
        if self.sharding == "ddp":
            return nn.parallel.DistributedDataParallel(network)
        for block in network.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        return network

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(module.parameters(), lr=3e-4)

    def loader(self, rank: int, ranks: int) -> DataLoader[torch.Tensor]:
        """A rank's batches, one for each step, in the order of the text."""
        windows = Windows(read_corpus()[0], self.model.context)
        data = Subset(windows, range(self.steps * self.batch))
        sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
            data, num_replicas=ranks, rank=rank, shuffle=False
        )
        return DataLoader(data, batch_size=self.batch // ranks, sampler=sampler)

    def batches(self, rank: int, ranks: int, step: int) -> Iterable[torch.Tensor]:
        """A rank's batches from a step on."""
        return islice(self.loader(rank, ranks), step, None)


class Record:
    """What a rank has done, line by line: when its process began, when each step was complete, and its last weights.

    Args:
        job: that it belongs to.
        rank: whose record this is.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        (job.directory / "records").mkdir(exist_ok=True)
        self._file = os.open(job.directory / "records" / f"rank-{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        self._write("process", os.getpid(), socket.gethostname())

    def step(self, step: int, loss: torch.Tensor, share: float = 1.0) -> None:
        """A step's update is complete.

        Args:
            step: its number, from 1.
            loss: of this rank's batch.
            share: of the step's batch that was trained: less than 1 where ranks were missing.
        """
        self._write("step", step, float(loss.detach()).hex(), share)

    def note(self, text: str) -> None:
        """Something that the report quotes."""
        self._write("note", text)

    def finish(self, module: nn.Module) -> None:
        """The training is complete."""
        digest = hashlib.sha256()
        for tensor in module.state_dict().values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(local.detach().contiguous().numpy().tobytes())
        self._write("end", digest.hexdigest())
        # torch 2.13 hangs if a small job frees DDP while gloo's thread still waits for the interpreter's lock.
        time.sleep(END_SECONDS)

    def _write(self, *words: object) -> None:
        os.write(self._file, (json.dumps([time.time(), os.getpid(), *words]) + "\n").encode())
