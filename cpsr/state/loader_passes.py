"""A pass over a map-style DataLoader that is continued: without its first batches, and dealt to any number of ranks.

A `DistributedSampler` draws one order of all samples, the same for any number of ranks, and deals it in turn: to rank r
every sample whose place leaves the remainder r. After b batches of B samples on N ranks the first b * B * N samples of
that order were trained on. M ranks go on with the rest of the order, dealt in turn again: each sample of a pass is
dealt once, but for those with which a sampler fills up the last round, and those that it drops there.
"""

import copy
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cpsr.errors import RecoveryError
from cpsr.state.loader_kinds import index_sampler, is_plain, rebuilt
from cpsr.state.small_state import DataPosition

__all__ = [
    "Dealing",
    "GlobalBatches",
    "dealt",
    "rest_of_pass",
    "skipped",
    "warn_of_other_length",
]

logger = logging.getLogger(__name__)


def skipped(
    loader: DataLoader[Any], skip: int, sampler: Iterable[Any] | None = None, *, goes_on: bool = False
) -> Iterator[Any]:
    """Iterate over a plain loader without its first batches, every random draw in the loader's own order.

    Args:
        loader: to iterate over.
        skip: batches that are dealt and not loaded.
        sampler: deals the batches of this pass in the place of the loader's own.
        goes_on: workers of earlier passes had begun this one: they ask the sampler once, and new ones twice.
    """
    skipping: Any = _Skipping(index_sampler(loader), skip, sampler, goes_on=goes_on)
    iterator: Any = iter(rebuilt(loader, skipping))
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
        goes_on: the first request is not passed on.
    """

    def __init__(self, sampler: Iterable[Any], skip: int, first: Iterable[Any] | None, *, goes_on: bool) -> None:
        self._sampler, self._skip, self._goes_on = sampler, skip, goes_on
        self._first = sampler if first is None else first
        self._items: Iterator[Any] = iter(())
        self._left = 0

    def __iter__(self) -> Iterator[Any]:
        if self._goes_on:
            self._goes_on = False
            return iter(())
        # At once, as torch's loader asks: before it draws the seed of its workers, and for those once more after it.
        self._items, self._left = iter(self._first), self._skip
        return self._rest(self._items)

    def _rest(self, items: Iterator[Any]) -> Iterator[Any]:
        self._drop()
        yield from items

    def _drop(self) -> None:
        next(islice(self._items, self._left, self._left), None)
        self._left = 0

    def deal(self) -> None:
        """Draw and drop the items of this pass now; later passes skip none."""
        self._drop()
        self._skip, self._first = 0, self._sampler


def warn_of_other_length(position: DataPosition, length: int | None) -> None:
    """Warn where a pass is to be continued whose batches were others: their number does not tell the samples.

    Args:
        position: as it was saved.
        length: batches of a pass now; None: not known.
    """
    before = position.batches_per_epoch
    followed = position.batch and not position.resized and position.dealing is None
    if followed and None not in (before, length) and before != length:
        logger.warning(
            "a pass over the data has %s batches now, and had %s when this one began (another batch size, or other "
            "data). It goes on after %d batches, as it was left: some samples are repeated, or left out, until it ends",
            length,
            before,
            position.batch,
        )


class GlobalBatches(Iterable[int]):
    """Numbers of a pass in place of a loader's batches, each of which all ranks train on together.

    Args:
        length: numbers in a pass.
        samples: of all ranks together, for each number; None where that is not known.
        one_order: whether they cut one order of the pass into pieces, the same for any number of ranks.
    """

    def __init__(self, length: int, samples: int | None, *, one_order: bool) -> None:
        self._length = length
        self.samples, self.one_order = samples, one_order

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


@dataclass(frozen=True)
class Dealing:
    """How the samples of the current pass are dealt.

    Attributes:
        ranks: among which.
        batch_size: samples of a batch of one rank.
        epoch: the pass.
        samples: of the pass, dealt before `first_batch` to another number of ranks.
        first_batch: of the pass, that this number of ranks dealt; numbered so that the pass ends with its last one.
    """

    ranks: int
    batch_size: int
    epoch: int
    samples: int = 0
    first_batch: int = 0

    @staticmethod
    def of_loader(loader: Iterable[Any], epoch: int) -> "Dealing | None":
        """How a loader deals a whole pass; None where it is not known to deal one order, whichever the ranks.

        That is a `DistributedSampler`, or `GlobalBatches` of one order: they deal as to a single rank.
        """
        if isinstance(loader, GlobalBatches):
            return Dealing(1, loader.samples, epoch) if loader.samples and loader.one_order else None
        if not is_plain(loader) or not isinstance(loader.sampler, DistributedSampler):
            return None
        batches = type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None
        in_turn = type(loader.sampler).__iter__ is DistributedSampler.__iter__
        return Dealing(loader.sampler.num_replicas, loader.batch_size or 1, epoch) if batches and in_turn else None

    @staticmethod
    def saved_in(position: DataPosition) -> "Dealing | None":
        """How its pass is dealt where the position was saved; a pass that has not begun is dealt as the one before."""
        if position.dealing is None:
            return None
        saved = Dealing(**position.dealing)
        return saved if saved.epoch == position.epoch else Dealing(saved.ranks, saved.batch_size, position.epoch)


def dealt(position: DataPosition, loader: Iterable[Any], length: int | None) -> DataPosition:
    """The position for this loader: as it is, or dealt again where other ranks or other batches had saved it.

    Args:
        position: as restored.
        loader: of this job.
        length: batches of a whole pass on this rank.

    Raises:
        RecoveryError: this loader does not deal its samples in a known way, or did not where the position was saved.
    """
    before, now = Dealing.saved_in(position), Dealing.of_loader(loader, position.epoch)
    alike = before is None or now is None or (before.ranks, before.batch_size) == (now.ranks, now.batch_size)
    if alike and not position.resized:
        kept = now if now is None or before is None else before
        return replace(position, dealing=None if kept is None else asdict(kept))
    settled = replace(position, resized=None, workers=None, loader=None)
    if position.batch == 0 and (before is None or not before.samples):
        return replace(settled, dealing=None if now is None else asdict(now))
    if before is None or now is None or length is None:
        raise RecoveryError(
            f"the run continues on another number of ranks after batch {position.batch} of pass {position.epoch}, and "
            "the data loader does not say which samples the ranks were dealt, then or now: a DataLoader with torch's "
            "DistributedSampler does, and one of accelerate whose RandomSampler has a generator of its own or is "
            "seedable (use_seedable_sampler=True). Some samples would be repeated and others left out, so nothing was "
            "trained. Take such a loader from the run's start; or go on with as many ranks as the run had"
        )
    samples = before.samples + (position.batch - before.first_batch) * before.ranks * before.batch_size
    if isinstance(loader, GlobalBatches):
        batch, rest = divmod(samples, now.batch_size)
        if rest:
            raise RecoveryError(
                f"the ranks were dealt {samples} samples of pass {position.epoch}, and a batch of all ranks has "
                f"{now.batch_size} now: the rest of the pass begins within a batch. Nothing was trained; choose "
                f"batches of all ranks that divide {samples}, or go on with as many ranks as the run had"
            )
        return replace(settled, batch=batch, dealing=asdict(now))
    first_batch = length - _batches_left(loader, samples)
    return replace(settled, batch=first_batch, dealing=asdict(replace(now, samples=samples, first_batch=first_batch)))


def rest_of_pass(loader: DataLoader[Any], samples: int) -> Iterable[Any]:
    """The batches of this rank in what is left of a pass that began on another number of ranks.

    Args:
        loader: for which `Dealing.of_loader` is not None.
        samples: of the pass, that were dealt before.
    """
    sampler: Any = loader.sampler
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    order = list(alone)  # of the whole pass, before it is dealt
    rest = order[samples:]
    wanted = _rounds(len(rest), sampler) * sampler.num_replicas
    while order and len(rest) < wanted:  # filled up as the sampler fills up
        rest += order[: wanted - len(rest)]
    own = rest[sampler.rank : wanted : sampler.num_replicas]
    return own if loader.batch_sampler is None else BatchSampler(own, loader.batch_size or 1, loader.drop_last)


def _batches_left(loader: Any, samples: int) -> int:
    """Batches of each rank, once so many samples of the pass were dealt."""
    own = _rounds(len(loader.sampler.dataset) - samples, loader.sampler)
    batch_size = loader.batch_size or 1
    return own // batch_size if loader.drop_last else math.ceil(own / batch_size)


def _rounds(samples: int, sampler: DistributedSampler[Any]) -> int:
    """Samples of each rank of so many."""
    ranks = sampler.num_replicas
    return max(0, samples // ranks if sampler.drop_last else math.ceil(samples / ranks))
