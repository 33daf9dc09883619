"""The training job that writes the journal meanwhile: a byte-level GPT in one process, until it is asked to end."""

from pathlib import Path

import torch

from cpsr.benchmarks.overhead.jobs import ALONE_BATCH, torch_job
from cpsr.recovery import CPSRRecovery

__all__ = ["main"]


def main(run_dir: Path) -> None:
    """Train in the run directory; SIGTERM ends it at a step."""
    torch.set_num_threads(1)
    adapter, loader, step = torch_job(ALONE_BATCH)
    with CPSRRecovery(adapter, {"run_dir": str(run_dir)}) as recovery:
        for batch in recovery.resume(loader, repeat=True):
            step(batch)
