"""Wait for a checkpoint as anybody can see it: on the disk."""

import time
from pathlib import Path

from cpsr.checkpoint.catalogue import scan

__all__ = ["wait_until_committed"]

PATIENCE_SECONDS = 60.0


def wait_until_committed(run_dir: Path, iteration: int) -> None:
    """Or a busy disk would decide how many checkpoints there are; call it a step later, when the copy is complete."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while all(info.iteration != iteration for info in scan(run_dir / "checkpoints").checkpoints):
        assert time.monotonic() < deadline, iteration
        time.sleep(0.005)
