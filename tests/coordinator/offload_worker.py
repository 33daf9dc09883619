"""One rank that trains several runs one after the other, whose small activations are worth moving."""

from cpsr.coordinator import offload
from tests.coordinator import worker
from tests.coordinator.worker import Options

__all__ = ["Options", "main"]


def main(options: Options, rank: int, ranks: int) -> None:
    offload.MIN_BYTES = 1
    worker.main(options, rank, ranks)
