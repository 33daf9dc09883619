"""A map-style DataLoader without its first batches, which the sampler deals and nobody loads."""

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from cpsr.state.loader_parts import index_sampler, is_plain
from cpsr.state.scalars import DataPosition

__all__ = ["after_failure", "load_again", "skipped", "warn_of_other_length"]

logger = logging.getLogger(__name__)


def after_failure(loader: Iterable[Any], position: DataPosition, error: Exception) -> DataPosition:
    """The position where a loop goes on that catches an error of its loader.

    The sampler of a map-style loader has dealt the batch, which therefore counts as taken; not so where torch itself
    gives up waiting for a worker. Of other loaders it is not known whether they have gone on, and the log says so.

    Args:
        loader: has raised it.
        position: before the batch.
        error: what was raised.
    """
    if is_plain(loader):
        waits = isinstance(error, RuntimeError) and str(error).startswith("DataLoader ")
        return position if waits else position.after_a_batch()
    logger.warning(
        "the %s raised %s after batch %d. If your loop goes on without that batch, a restart may continue at another "
        "one: whether it counts is known of a DataLoader over a map-style dataset alone. Catch the error in the "
        "dataset instead",
        type(loader).__name__,
        type(error).__name__,
        position.batches,
    )
    return position


def warn_of_other_length(position: DataPosition, length: int | None) -> None:
    """Warn where a pass is to be continued whose batches were others: their number does not tell the samples.

    Args:
        position: as it was saved.
        length: batches of a pass now; None: not known.
    """
    before = position.batches_per_epoch
    if (
        position.batch
        and not position.resized
        and position.dealing is None
        and None not in (before, length)
        and before != length
    ):
        logger.warning(
            "a pass over the data has %s batches now, and had %s when this one began (another batch size, or other "
            "data). It goes on after %d batches, as it was left: some samples are repeated, or left out, until it ends",
            length,
            before,
            position.batch,
        )


def load_again(batches: Iterator[Any], count: int) -> None:
    """Load and drop batches, also those without which the loop has gone on because they raised an error."""
    for _ in range(count):
        try:
            next(batches)
        except StopIteration:
            return
        except Exception as error:  # of the user's dataset; the loop has had it before
            logger.debug("a batch that is loaded again raised %s", type(error).__name__, exc_info=True)


def skipped(loader: DataLoader[Any], skip: int, sampler: Iterable[Any] | None = None) -> Iterator[Any]:
    """Iterate over a plain loader without its first batches, every random draw in the loader's own order.

    Args:
        loader: to iterate over.
        skip: batches that are dealt and not loaded.
        sampler: deals the batches of this pass in the place of the loader's own.
    """
    skipping: Any = _Skipping(index_sampler(loader), skip, sampler)
    sampling: dict[str, Any] = (
        {"sampler": skipping, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": skipping}
    )
    rest: Any = DataLoader(
        loader.dataset,
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=getattr(loader, "in_order", True),
    )
    iterator: Any = iter(rest)
    skipping.deal()
    if loader.persistent_workers:
        loader._iterator = iterator  # its workers go on with the next pass, which skips nothing
    rest_of_pass: Iterator[Any] = iterator
    return rest_of_pass


class _Skipping:
    """A sampler without its first items, which it draws and drops; once.

    Args:
        sampler: of every pass but the first.
        skip: items of the first pass.
        first: sampler of the first pass; None: it is the same.
    """

    def __init__(self, sampler: Iterable[Any], skip: int, first: Iterable[Any] | None = None) -> None:
        self._sampler = sampler
        self._first = sampler if first is None else first
        self._skip = skip
        self._rest = _Rest(iter(()), 0)

    def __iter__(self) -> Iterator[Any]:
        # At once, as torch's loader asks: before it draws the seed of its workers, and for those once more after it.
        self._rest = _Rest(iter(self._first), self._skip)
        return self._rest

    def deal(self) -> None:
        """Draw and drop the items of this pass now; later passes skip none."""
        self._rest.deal()
        self._skip, self._first = 0, self._sampler


class _Rest(Iterator[Any]):
    def __init__(self, items: Iterator[Any], skip: int) -> None:
        self._items = items
        self._skip = skip

    def deal(self) -> None:
        next(islice(self._items, self._skip, self._skip), None)
        self._skip = 0

    def __next__(self) -> Any:
        if self._skip:
            self.deal()
        return next(self._items)
