"""The pipeline of `worker.py` with small pieces of snapshots; it notes when they were copied.

The splits of all snapshots are left as JSON, `.<rank>.splits` appended to the result's name.
"""

import json
from dataclasses import asdict
from typing import Any

from cpsr.checkpoint import copying
from cpsr.checkpoint.paced import CopyPace, Split
from tests.recovery import worker
from tests.recovery.worker import Options

__all__ = ["Options", "main"]

PIECE_BYTES = 256  # of the 2 kB that a stage of this model has


def main(options: Options, rank: int, ranks: int) -> None:
    splits: list[Any] = []
    record = CopyPace.record

    def recorded(pace: CopyPace, split: Split, *more: Any) -> None:
        splits.append(asdict(split))
        record(pace, split, *more)

    setattr(CopyPace, "record", recorded)  # noqa: B010 - mypy refuses to assign to a method
    copying.PIECE_BYTES = PIECE_BYTES
    worker.main(options, rank, ranks)
    options.result.with_suffix(f".{rank}.splits").write_text(json.dumps(splits))
