"""A job whose ranks share their copies, or copy all: what a snapshot of each copies, and how long training waits."""

import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.store import DIFFERING
from cpsr.journal import JournalReader

__all__ = ["main"]

WIDTH, LAYERS, EXPERTS, BATCH = 512, 16, 8, 32
ITERATIONS, INTERVAL = 60, 10  # compared at the first checkpoint, and shared from the second on
WARM_UP = 10


class _Routed(nn.Module):
    def __init__(self, expert_parallel: int) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, ep_size=expert_parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        routed: torch.Tensor = self.moe(hidden)[0]
        return hidden + routed


def main(run_dir: Path, expert_parallel: int, shared: bool) -> dict[str, Any]:
    """Train a little.

    Args:
        run_dir: of the run.
        expert_parallel: ranks that share the experts of two layers; 0: none are experts, and the ranks are DDP's.
        shared: whether the ranks share their copies; they do not where they have differed.
    """
    join_ranks(run_dir)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not shared and dist.get_rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / DIFFERING).write_text("for the comparison")
    dist.barrier()
    engine, step = _mixture(expert_parallel) if expert_parallel else _dense()
    config = {
        "run_dir": str(run_dir),
        "mode": "exact",
        "checkpoint": {"interval_iterations": INTERVAL, "disk_limit_bytes": 1},
        "memory": {"interval_iterations": 1},
        "service": {"enabled": False},
    }
    ends = []
    with CPSRRecovery(engine, config) as recovery:
        for batch in recovery.resume(torch.randn(ITERATIONS, BATCH, WIDTH)):
            step(batch)
            ends.append(time.perf_counter())
        job, memory = recovery.life.job, recovery.life.saver.memory
        states = Arena(job.run.run_id).list(job.group.rank)
        newest = max((one for one in states if one.kind == "snapshot"), key=lambda one: one.iteration)
        held = [one for key, one in newest.tensors.items() if not key.startswith("small")]
        found = {
            "copied_bytes": sum(one.end - one.first for one in held),
            "state_bytes": job.shard.state_bytes,
            "stall_seconds": statistics.median([*memory.stalls_seconds][ITERATIONS // 2 :]),
            "step_seconds": statistics.median(after - before for before, after in pairwise(ends[WARM_UP:])),
        }
    if dist.get_rank() == 0:
        with JournalReader(run_dir / "journal.db") as journal:
            stalls = [row.stall_seconds for row in journal.checkpoints() if row.stall_seconds is not None]
        found["checkpoint_stall_seconds"] = statistics.median(stalls)
    return found


def _dense() -> tuple[Any, Any]:
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()

    return TorchAdapter(parallel, optimizer), step


def _mixture(expert_parallel: int) -> tuple[Any, Any]:
    layers = [layer for _ in range(LAYERS - 2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, _Routed(expert_parallel), _Routed(expert_parallel))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-4), config=config)

    def step(batch: torch.Tensor) -> None:
        engine.backward(engine(batch).square().mean())
        engine.step()

    return engine, step
