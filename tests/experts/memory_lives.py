"""A loop over four experts with known tokens, killed after an iteration; ranks share the batch, or each expert.

`python -m tests.experts.memory_lives <config> <iteration>` trains up to there with snapshots in memory, of one expert
each, and kills itself with SIGKILL; without an iteration it restores, and prints how it began as JSON.
"""

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tests.imported_later  # noqa: F401 - for what it imports
from cpsr import CPSRRecovery, MixtureOfExperts, TorchAdapter
from cpsr.experts.in_memory import InMemory
from tests.replay.lives import TOKENS, Routed


def main(config: dict[str, Any], kill_at: int | None = None) -> None:
    """One life, in which an iteration hides next to nothing."""
    setattr(InMemory, "wanted_bytes", lambda experts: 1.0)  # noqa: B010 - mypy refuses to assign to a method
    torch.manual_seed(0)
    model = nn.Sequential(Routed(8), nn.Linear(8, 1))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    called = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    adapter = TorchAdapter(
        called,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        experts=MixtureOfExperts(lambda layer: layer.counts),  # type: ignore[arg-type, return-value] # Routed's own
    )
    hashes: dict[int, dict[str, str]] = {}
    loader = DataLoader(TensorDataset(torch.randn(400, 8)), sum(TOKENS))
    with CPSRRecovery(adapter, config) as recovery:
        if kill_at is None:
            restored = recovery.restored
            began: dict[str, Any] = {"iteration": recovery.iteration, "method": restored.method}
            began |= {"ages": dict(restored.taken_at), "lost": restored.guard.get("lost_tokens")}
            sys.stdout.write(json.dumps(began | {"weights": hashed(model)}) + "\n")
            sys.stdout.flush()
            os._exit(0)
        for (batch,) in recovery.resume(loader, repeat=True):
            hashes[recovery.iteration] = hashed(model)
            if recovery.iteration == kill_at:
                recovery.life.saver.finish()
                recovery.life.saver.pool.settle()
                sys.stdout.write(json.dumps(hashes) + "\n")
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            adapter.optimizer.zero_grad()
            torch.autograd.backward(called(batch).square().mean())
            adapter.optimizer.step()


def hashed(model: nn.Module) -> dict[str, str]:
    return {name: hashlib.sha256(one.detach().numpy().tobytes()).hexdigest() for name, one in model.named_parameters()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
