"""The job that every program trains, and what its ranks write down for the drill."""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

from cpsr.demo.model import GPT, GPTConfig, Windows, read_corpus

__all__ = ["MACHINES", "Job", "Rank", "Record"]

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

    def join(self) -> int:
        """Join the other ranks over gloo; this one's rank."""
        dist.init_process_group("gloo", timeout=self.timeout)
        return dist.get_rank()

    def network(self) -> GPT:
        """The model with its first weights, the same on all ranks."""
        torch.manual_seed(0)
        return GPT(self.model)

    def wrap(self, network: GPT) -> nn.Module:
        """Let the ranks share their gradients, or their weights too."""
        if self.sharding == "ddp":
            return nn.parallel.DistributedDataParallel(network)
        from torch.distributed.fsdp import fully_shard  # a second and a half, which a job of DDP does not take

        for block in network.blocks:
            fully_shard(block)
        fully_shard(network)
        return network

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(module.parameters(), lr=3e-4)

    def loader(self, rank: int) -> DataLoader[torch.Tensor]:
        """A rank's batches, one for each step, in the order of the text."""
        windows = Windows(read_corpus()[0], self.model.context)
        data = Subset(windows, range(self.steps * self.batch))
        sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, self.ranks, rank, shuffle=False)
        return DataLoader(data, batch_size=self.batch // self.ranks, sampler=sampler)


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


class Rank:
    """What most programs have: a rank that has joined the others, with its record, its module and its optimizer.

    Attributes:
        job: that it trains.
        number: of the rank.
        record: what it writes down.
        module: wrapped for the ranks.
        optimizer: of the module.
    """

    def __init__(self) -> None:
        self.job = Job.of_arguments()
        self.number = self.job.join()
        self.record = Record(self.job, self.number)
        self.module = self.job.wrap(self.job.network())
        self.optimizer = self.job.optimizer(self.module)

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        """Train on a batch; its loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.module(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss

    def train(self, begin: int, after: Callable[[int], object]) -> None:
        """Train from a step on to the end.

        Args:
            begin: the step that is complete.
            after: is called after each step, with its number.
        """
        batches = islice(self.job.loader(self.number), begin, None)
        for number, batch in enumerate(batches, start=begin + 1):
            self.record.step(number, self.update(batch))
            after(number)

    def end(self) -> None:
        """The training is complete."""
        self.record.finish(self.module)
        dist.destroy_process_group()
