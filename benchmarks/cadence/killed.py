"""One rank of a ZeRO-1 job that is killed: it trains a small model, and notes the hash of its state at every step."""

import json
from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.harness.ranks import join_ranks, state_digest
from cpsr.demo.model import zero_engine
from cpsr.engines import adapt
from cpsr.recovery import CPSRRecovery

__all__ = ["HASHES", "main"]

HASHES = "hashes.jsonl"  # in the job's directory, by rank 0
WIDTH, BATCH = 256, 32


def main(
    run_dir: Path, run: str, interval_iterations: int | None, checkpoint_iterations: int, iterations: int
) -> dict[str, Any] | None:
    """Train to the end, or until somebody kills this process; rank 0 returns how its life began.

    Args:
        run_dir: in the directory of this life.
        run: CPSR's run directory, the same in every life.
        interval_iterations: between snapshots to host memory; None: there are none.
        checkpoint_iterations: between checkpoints.
        iterations: after which the life ends; 0 ends it once it is restored.
    """
    join_ranks(run_dir)
    torch.manual_seed(0)
    model = _Model()
    engine = zero_engine(model, torch.optim.AdamW(model.parameters(), 1e-3))
    adapter = adapt(engine)
    config: dict[str, Any] = {
        "run_dir": run,
        "mode": "exact",
        "checkpoint": {"interval_iterations": checkpoint_iterations},
        # Longer than the run: no snapshot falls between two checkpoints.
        "memory": {"interval_iterations": 2**30 if interval_iterations is None else interval_iterations},
    }
    data = torch.randn(4096, BATCH, WIDTH, generator=torch.Generator().manual_seed(adapter.rank))
    with CPSRRecovery(adapter, config) as recovery, (run_dir.parent / HASHES).open("w") as hashes:
        restored = recovery.restored
        began: dict[str, Any] = {"failure": restored.failure_iteration, "restored": restored.restored_iteration}
        began |= {"tiers": sorted({source.tier for source in restored.sources}), "hash": state_digest(adapter)}
        for batch in recovery.resume(data):
            if recovery.iteration >= iterations:
                break
            engine.backward(engine(batch))
            engine.step()
            if adapter.rank == 0:
                hashes.write(json.dumps([recovery.iteration, state_digest(adapter)]) + "\n")
                hashes.flush()
    return began if adapter.rank == 0 else None


class _Model(torch.nn.Module):
    """Returns its loss; its dropout draws random numbers, which an exact restart must continue."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch) - batch.flip(-1)).square().mean()
        return loss
