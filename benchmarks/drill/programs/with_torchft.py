"""torchft: a replica that is lost leaves the others training; the script's own checkpoints are for the loss of all.

A replica has one rank (DDP), or the ranks of a machine (FSDP2 between them).
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch._C._distributed_c10d import GradBucket
from torch.distributed.elastic.timer.api import configure, expires
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerClient
from torch.distributed.fsdp import FSDPModule
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ManagedProcessGroup

from cpsr.benchmarks.drill.job import Job, Record

KEPT = 2
GLOO_SECONDS = 5.0  # this and the next one as in torchft's example
TRANSPORT_SECONDS = 10.0


class DataParallel(torchft.DistributedDataParallel):  # type: ignore[misc]  # it has no types here
    """As torchft's own, whose hook ends a replica that goes on: see its pull request 294."""

    @staticmethod
    def _comm_hook(state: torchft.Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()  # of a failure, the manager knows, and then the step does not count
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


class Replica:
    """This rank's part of a replica: what it trains, and its checkpoints.

    Args:
        job: that it trains.
        number: of the replica.
        rank: in the replica.
    """

    def __init__(self, job: Job, number: int, rank: int) -> None:
        group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=GLOO_SECONDS))
        self.manager = torchft.Manager(
            pg=group,
            min_replica_size=1,
            load_state_dict=self._load_state_dict,
            state_dict=self._state_dict,
            replica_id=f"drill_{number}",
            timeout=job.timeout,
            checkpoint_transport=PGTransport(group, timedelta(seconds=TRANSPORT_SECONDS), torch.device("cpu")),
            init_sync=False,  # all replicas begin with the same weights
        )
        if job.sharding == "ddp":
            self.module: Any = DataParallel(self.manager, job.network())
        else:
            self.module = job.wrap(job.network())
            self._share_gradients()
        self.optimizer = torchft.Optimizer(self.manager, job.optimizer(self.module))
        # The manager asks for it in a thread of its own, while FSDP2 may have the weights gathered for a forward pass.
        self._weights = self.module.state_dict()
        self._rank, self._ranks = rank, dist.get_world_size()
        self._folder = job.directory / "checkpoints"
        self._folder.mkdir(exist_ok=True)

    def load(self) -> None:
        """Bring all to the newest checkpoint of which every rank's part is there."""
        steps = [self._steps(rank) for rank in range(self._ranks)]
        newest = torch.tensor(max(set(steps[0]).intersection(*steps[1:]), default=0))
        dist.all_reduce(newest, dist.ReduceOp.MIN)  # another replica may be writing the next one
        if step := int(newest):
            state = torch.load(self._path(self._rank, step), weights_only=False)
            self._load_state_dict(state["user"])
            self.manager.load_state_dict(state["manager"])

    def save(self) -> None:
        """Write a checkpoint, where this is the first replica of those that train; remove the one before the last."""
        if self.manager.participating_rank() != 0:
            return
        path = self._path(self._rank, self.manager.current_step())
        torch.save({"user": self._state_dict(), "manager": self.manager.state_dict()}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
        for old in self._steps(self._rank)[:-KEPT]:
            self._path(self._rank, old).unlink()

    def _share_gradients(self) -> None:
        """Let FSDP2 average each gradient over the replicas, after it has over the ranks of this one."""
        replicas = ManagedProcessGroup(self.manager)
        replicas.register("replicas")
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_all_reduce_hook(lambda output: dist.all_reduce(output, dist.ReduceOp.AVG, replicas))

    def _state_dict(self) -> dict[str, Any]:
        return {"model": self._weights, "optimizer": self.optimizer.state_dict()}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _steps(self, rank: int) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self._folder.glob(f"{rank}-*.pt"))

    def _path(self, rank: int, step: int) -> Path:
        return self._folder / f"{rank}-{step}.pt"


def main() -> None:
    """Train from the newest checkpoint, or from what the other replicas have, to the end."""
    job = Job.of_arguments()
    number, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    replica = Replica(job, number, job.join())
    manager, module, optimizer = replica.manager, replica.module, replica.optimizer
    rank = number * dist.get_world_size() + dist.get_rank()
    record = Record(job, rank)
    loader: Any = job.loader(rank)
    windows = list(loader.batch_sampler)  # of each step: the manager's steps may jump, or come twice
    replica.load()
    configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    while manager.current_step() < job.steps:
        batch = loader.collate_fn([loader.dataset[window] for window in windows[manager.current_step()]])
        with expires(after=job.hang_seconds):  # then torchrun kills the rank, and starts the replica again
            optimizer.zero_grad()
            loss = module(batch)
            loss.backward()
            share, before = manager.num_participants() / replicas, manager.current_step()
            optimizer.step()
        step = manager.current_step()
        if step == before:
            record.note("a step was not committed")
            continue
        record.step(step, loss, share)
        if job.interval_iterations and step % job.interval_iterations == 0:
            replica.save()
    record.finish(module)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
