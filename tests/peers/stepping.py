"""A rank of a job on two machines that counts the collectives of CPSR's that its training thread takes part in."""

import json
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rank_processes import become_rank

CHECKPOINT_ITERATIONS = 40
COMPLETE = 3  # replicas that both holders have, after which the job ends


@dataclass(frozen=True)
class Job:
    """What the ranks of a test do.

    Attributes:
        folder: where they leave what they found, with the run and the memory of each machine.
        port: of the store.
        snapshot_iterations: between snapshots in memory.
        iterations: at least, even where replicas are complete before.
    """

    folder: Path
    port: int
    snapshot_iterations: int
    iterations: int = 3 * CHECKPOINT_ITERATIONS


def main(job: Job, rank: int, ranks: int) -> None:
    """For `start_ranks`: train until replicas were complete, and write down what each iteration has taken part in."""
    become_rank(job.folder / f"{rank}.log", rank, ranks, job.folder / "memory" / f"machine-{rank}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
    import torch
    import torch.distributed as dist
    from torch import nn

    from cpsr import CPSRRecovery, TorchAdapter
    from cpsr.ranks.group import SideGroup

    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    model = nn.Linear(300, 300)  # of its own, so that all of its state travels
    optimizer = torch.optim.AdamW(model.parameters())
    config = {
        "run_dir": str(job.folder / "run"),
        "mode": "exact",
        "checkpoint": {"interval_iterations": CHECKPOINT_ITERATIONS, "shared_memory": True},
        "memory": {"interval_iterations": job.snapshot_iterations},
        "peers": {"replicas": 1},
        "verification": {"budget_fraction": 0.0},  # has collectives in the step after a checkpoint
    }
    taken: Counter[int] = Counter()
    trains = threading.get_ident()
    arrived: list[float] = []
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:

        def counted(name: str) -> None:
            original = getattr(SideGroup, name)

            def count(group: SideGroup, *args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == trains:
                    taken[recovery.iteration] += 1
                return original(group, *args, **kwargs)

            setattr(SideGroup, name, count)

        for name in ("all_reduce", "all_gather", "barrier", "broadcast"):
            counted(name)
        for link in recovery.life.memory.links:
            link.on_replica = arrived.append
        for batch in recovery.resume([torch.randn(8, 300) for _ in range(8)], repeat=True):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            done = torch.tensor([int(len(arrived) >= COMPLETE and recovery.iteration >= job.iterations)])
            dist.all_reduce(done, dist.ReduceOp.MIN)
            if done.item():
                break
        found = {"iterations": recovery.iteration, "taken": sorted(taken), "arrived": len(arrived)}
    (job.folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
