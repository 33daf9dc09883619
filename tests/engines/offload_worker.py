"""One rank that trains several runs one after the other, whose small activations are worth moving."""

import time
from typing import Any

from cpsr.engines import offload
from tests.engines import several_runs
from tests.engines.several_runs import Options

__all__ = ["Options", "main"]


# By which rank 1 comes to its end after rank 0, who takes over what it says there.
LATE_SECONDS = 0.5


class _Late(offload.ActivationOffload):
    def __exit__(self, *raised: Any) -> None:
        time.sleep(LATE_SECONDS)
        super().__exit__(*raised)


def main(options: Options, rank: int, ranks: int) -> None:
    offload.MIN_BYTES = 1
    if rank == 1:
        offload.ActivationOffload = _Late  # type: ignore[misc] # for as long as this process lives
    several_runs.main(options, rank, ranks)
