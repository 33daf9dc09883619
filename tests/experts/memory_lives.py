"""A loop over four experts with known tokens, killed after an iteration.

`python -m tests.experts.memory_lives <config> [<iteration>]` trains up to there with a snapshot in memory of each
iteration, prints the hashes of its weights by iteration, and kills itself with SIGKILL. Without an iteration it
restores, prints how it began, and leaves. Where `CPSR_NODE` is set, each rank has experts and a machine of its own,
with a link that takes next to nothing; else ranks share the batch, and iterations hide next to nothing.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.imported_later  # noqa: F401 - for what it imports
from cpsr import CPSRRecovery, MixtureOfExperts, TorchAdapter
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.run_directory import run_id
from cpsr.engines.moe.operators import ExpertParallel
from cpsr.experts.in_memory import InMemory
from tests.replay.lives import TOKENS, Routed

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
APART = "CPSR_NODE" in os.environ


class Own(nn.Module):
    """This rank's part of the experts, by their numbers over all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        each = len(TOKENS) // RANKS
        self.experts = nn.ModuleDict({str(RANK * each + one): nn.Linear(width, width) for one in range(each)})
        self.counts = torch.tensor(TOKENS)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([expert(values) for expert in self.experts.values()])


def main(config: dict[str, Any], kill_at: int | None = None) -> None:
    """One life."""
    if APART:
        setattr(InMemory, "period_seconds", property(lambda experts: 0.0))  # noqa: B010 - mypy refuses to assign
    setattr(InMemory, "wanted_bytes", lambda experts: 1e9 if APART else 1.0)  # noqa: B010 - likewise
    torch.manual_seed(RANK if APART else 0)
    model = nn.Sequential(Own(8) if APART else Routed(8))
    called: nn.Module = model
    if RANKS > 1:
        dist.init_process_group("gloo")
        called = model if APART else nn.parallel.DistributedDataParallel(model)
    parallel = ExpertParallel(RANKS, RANK) if APART else ExpertParallel()
    experts = MixtureOfExperts(lambda layer: layer.counts, expert_parallel=parallel)  # type: ignore[arg-type, return-value] # of both
    adapter = TorchAdapter(called, torch.optim.AdamW(model.parameters(), lr=1e-2), experts=experts)
    hashes: dict[int, dict[str, str]] = {}
    loader = DataLoader(TensorDataset(torch.randn(400, 8)), sum(TOKENS))
    with CPSRRecovery(adapter, config) as recovery:
        if kill_at is None:
            restored = recovery.restored
            began: dict[str, Any] = {"iteration": recovery.iteration, "method": restored.method}
            began |= {"ages": dict(restored.taken_at), "lost": restored.guard.get("lost_tokens")}
            leave(began | {"weights": hashed(model)})
            os._exit(0)
        for (batch,) in recovery.resume(loader, repeat=True):
            hashes[recovery.iteration] = hashed(model)
            if APART and recovery.iteration > 2:
                wait_for_replica(Path(config["run_dir"]), recovery.iteration - 2)
            if APART:
                dist.barrier()
            if recovery.iteration == kill_at:
                recovery.life.saver.finish()
                recovery.life.saver.pool.settle()
                leave(hashes)
                if RANKS > 1:
                    dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            adapter.optimizer.zero_grad()
            torch.autograd.backward(called(batch).square().mean())
            adapter.optimizer.step()


def wait_for_replica(run_dir: Path, iteration: int) -> None:
    """Until another machine has this rank's state of that iteration, or a later one."""
    deadline = time.monotonic() + 60
    while max(replicas(run_dir), default=-1) < iteration:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def replicas(run_dir: Path) -> Iterator[int]:
    for machine in Path(os.environ["CPSR_SHARED_MEMORY"]).parent.iterdir():
        for state in Arena(run_id(run_dir), machine).list(RANK):
            if state.place == "replica":
                yield state.iteration


def leave(found: Any) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def hashed(model: nn.Module) -> dict[str, str]:
    return {name: hashlib.sha256(one.detach().numpy().tobytes()).hexdigest() for name, one in model.named_parameters()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
