"""The global batch: samples of all ranks together in an iteration. It stays when the number of ranks changes."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import RecoveryError
from cpsr.state.loader_passes import GlobalBatches

__all__ = ["GlobalBatch"]


class GlobalBatch:
    """Compares the global batch of this life with that of the run.

    Args:
        adapter: the engine.
        asked: of the configuration; None: not given.

    Attributes:
        size: samples of an iteration of this run; None where that is not known (yet).
    """

    def __init__(self, adapter: EngineAdapter, asked: int | None) -> None:
        self._adapter = adapter
        self._asked = asked
        self._resized = False
        self.size: int | None = None

    def continue_from(self, size: int | None, *, resized: bool) -> None:
        """Continue the run with what a checkpoint says.

        Args:
            size: of the run then.
            resized: whether another number of ranks saved it: then this life must have the same.
        """
        self._resized = resized
        self.size = size

    def require(self, loader: Iterable[Any]) -> None:
        """Check what this loader gives, and note it.

        Raises:
            RecoveryError: the global batch is another one than asked for, or than the run had on other ranks; the
                message names batches and accumulation that fit. Nothing was trained.
        """
        ranks, steps = len(self._adapter.data_parallel_ranks), self._adapter.micro_batches_per_iteration
        if isinstance(loader, GlobalBatches):
            batch_size = None if loader.samples is None else loader.samples // ranks
        else:
            batch_size = loader.batch_size if isinstance(loader, DataLoader) else None
        if batch_size is None:
            return
        found = batch_size * ranks * steps
        wanted = self._asked or (self.size if self._resized else None)
        if wanted is not None and found != wanted:
            raise RecoveryError(
                f"an iteration would train on {found} samples ({ranks} ranks x batches of {batch_size} x {steps} "
                f"accumulated), the run trains on {wanted}: another global batch is another training. Nothing was "
                f"trained. {_way_out(wanted, ranks, batch_size)}"
            )
        self.size = found


def _way_out(wanted: int, ranks: int, batch_size: int) -> str:
    if wanted % ranks:
        return f"{wanted} samples do not divide by {ranks} ranks: start with another number"
    own = wanted // ranks
    fitting_batch = max(number for number in range(1, min(batch_size, own) + 1) if own % number == 0)
    return f"On {ranks} ranks take batches of {fitting_batch} and {own // fitting_batch} accumulation steps"
