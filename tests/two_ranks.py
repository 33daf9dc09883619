"""A script run as two gloo ranks; each leaves its findings as JSON in the file named by its argument and its rank."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.rank_processes import become_rank, found_by, start_ranks

RANKS = 2
LIMIT_SECONDS = 400.0  # for what takes seconds; the machine may be busy


def run(script: str, directory: Path) -> tuple[Any, Any]:
    """What the two ranks found, once both have ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first, second = found_by(start_ranks(_rank, (script, directory, port), RANKS), directory, LIMIT_SECONDS, "found.{}")
    return first, second


def _rank(job: tuple[str, Path, int], rank: int, ranks: int) -> None:
    script, directory, port = job
    become_rank(directory / f"{rank}.log", rank, ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = ["rank", str(directory / "found")]
    exec(compile(script, "rank", "exec"), {"__name__": "__main__"})
