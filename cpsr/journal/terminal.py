"""One line for each important event, unless the user has configured logging."""

import logging
import os
import sys

from cpsr.ranks.link import VERBOSE

__all__ = ["log_to_terminal"]


def log_to_terminal(rank: int) -> None:
    """Show one line for each important event, unless the user has configured logging."""
    package = logging.getLogger("cpsr")
    if package.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[%(asctime)s] [CPSR] [rank {rank}] %(message)s", "%H:%M:%S"))
    package.addHandler(handler)
    level = logging.DEBUG if os.environ.get(VERBOSE) else logging.INFO
    package.setLevel(level if rank == 0 else logging.WARNING)
    package.propagate = False
