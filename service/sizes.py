"""The numbers of ranks that a run has had."""

from typing import Any

from pydantic import BaseModel, Field

from cpsr.journal import JournalReader, sizes
from cpsr.service.rows import answered

__all__ = ["SIZES_EXAMPLE", "RunSize", "sizes_of"]

SIZES_EXAMPLE: list[dict[str, Any]] = [
    {"ranks": 4, "since_iteration": 0, "life": 0, "since_unix_seconds": 1763990000.0},
    {"ranks": 3, "since_iteration": 2600, "life": 2, "since_unix_seconds": 1763996000.0},
]


class RunSize(BaseModel):
    """A number of ranks, and since when the run trains with them."""

    ranks: int
    since_iteration: int = Field(description="The checkpoint, or other state, that they went on from.")
    life: int = Field(description="The first one with them.")
    since_unix_seconds: float = Field(description="The start of that life.")


def sizes_of(reader: JournalReader) -> list[RunSize]:
    """Every size in turn, oldest first; only of lives whose size is recorded.

    Raises:
        JournalError: the journal cannot be read.
    """
    return [answered(RunSize, one) for one in sizes(reader)]
