"""Wait for checkpoints, as anybody can see them on the disk."""

import time
from pathlib import Path

from cpsr import CPSRRecovery
from cpsr.checkpoint.catalogue import scan

__all__ = ["keep_pace", "wait_until_committed"]

PATIENCE_SECONDS = 60.0


def wait_until_committed(run_dir: Path, iteration: int) -> None:
    """Or a busy disk would decide how many checkpoints there are; call it a step later, when the copy is complete."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while all(info.iteration != iteration for info in scan(run_dir / "checkpoints").checkpoints):
        assert time.monotonic() < deadline, iteration
        time.sleep(0.005)


def keep_pace(recovery: CPSRRecovery, seconds: float = 10.0) -> None:
    """Before a checkpoint is due, let the last be written: steps this short would outrun the disk, and skip it."""
    if recovery.life.saver.is_due(recovery.iteration + 1):
        recovery.life.saver.drain(seconds)
