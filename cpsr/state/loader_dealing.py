"""How a pass over the data is dealt to ranks, so that another number of ranks can go on within it.

A `DistributedSampler` draws one order of all samples, the same for any number of ranks, and deals it in turn: to rank r
every sample whose place leaves the remainder r. After b batches of B samples on N ranks the first b * B * N samples of
that order were trained on. M ranks go on with the rest of the order, dealt in turn again: each sample of a pass is
dealt once, but for those with which a sampler fills up the last round, and those that it drops there.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cpsr.errors import RecoveryError
from cpsr.state.loader_parts import is_plain
from cpsr.state.scalars import DataPosition

__all__ = ["Dealing", "GlobalBatches", "RestOfPass", "dealt"]


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
    def of(loader: Iterable[Any], epoch: int) -> "Dealing | None":
        """How a loader deals a whole pass; None where it is not known to deal one order, whichever the ranks.

        That is a `DistributedSampler`, or `GlobalBatches` of one order: they deal as to a single rank.
        """
        if isinstance(loader, GlobalBatches):
            return Dealing(1, loader.samples, epoch) if loader.samples and loader.one_order else None
        if not is_plain(loader) or not isinstance(loader.sampler, DistributedSampler):
            return None
        batches = type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None
        in_turn = type(loader.sampler).__iter__ is DistributedSampler.__iter__
        if not batches or not in_turn:
            return None
        return Dealing(loader.sampler.num_replicas, loader.batch_size or 1, epoch)

    @staticmethod
    def saved_in(position: DataPosition) -> "Dealing | None":
        """How its pass is dealt where the position was saved; a pass that has not begun is dealt as the one before."""
        if position.dealing is None:
            return None
        saved = Dealing(**position.dealing)
        return saved if saved.epoch == position.epoch else Dealing(saved.ranks, saved.batch_size, position.epoch)

    def to_tree(self) -> dict[str, int]:
        """Plain data."""
        return asdict(self)

    def samples_before(self, batch: int) -> int:
        """Samples of the pass that all ranks together were dealt before this batch."""
        return self.samples + (batch - self.first_batch) * self.ranks * self.batch_size

    def is_of(self, other: "Dealing") -> bool:
        """Whether both deal to as many ranks in batches of the same size."""
        return (self.ranks, self.batch_size) == (other.ranks, other.batch_size)


def dealt(position: DataPosition, loader: Iterable[Any], length: int | None) -> DataPosition:
    """The position for this loader: as it is, or dealt again where other ranks or other batches had saved it.

    Args:
        position: as restored.
        loader: of this job.
        length: batches of a whole pass on this rank.

    Raises:
        RecoveryError: this loader does not deal its samples in a known way, or did not where the position was saved.
    """
    before, now = Dealing.saved_in(position), Dealing.of(loader, position.epoch)
    other = before is not None and now is not None and not before.is_of(now)
    if not position.resized and not other:
        kept = now if now is None or before is None else before
        return replace(position, dealing=None if kept is None else kept.to_tree())
    settled = replace(position, resized=None, workers=None, loader=None)
    if position.batch == 0 and (before is None or not before.samples):
        return replace(settled, dealing=None if now is None else now.to_tree())
    if before is None or now is None or length is None:
        raise RecoveryError(
            f"the run continues on another number of ranks after batch {position.batch} of pass {position.epoch}, and "
            "the data loader does not say which samples the ranks were dealt, then or now: a DataLoader with torch's "
            "DistributedSampler does, and one of accelerate whose RandomSampler has a generator of its own or is "
            "seedable (use_seedable_sampler=True). Some samples would be repeated and others left out, so nothing was "
            "trained. Take such a loader from the run's start; or go on with as many ranks as the run had"
        )
    samples = before.samples_before(position.batch)
    if isinstance(loader, GlobalBatches):
        batch, rest = divmod(samples, now.batch_size)
        if rest:
            raise RecoveryError(
                f"the ranks were dealt {samples} samples of pass {position.epoch}, and a batch of all ranks has "
                f"{now.batch_size} now: the rest of the pass begins within a batch. Nothing was trained; choose "
                f"batches of all ranks that divide {samples}, or go on with as many ranks as the run had"
            )
        return replace(settled, batch=batch, dealing=now.to_tree())
    first_batch = length - RestOfPass.batches_left(loader, samples)
    dealing = replace(now, samples=samples, first_batch=first_batch)
    return replace(settled, batch=first_batch, dealing=dealing.to_tree())


class RestOfPass:
    """A sampler of batches for what is left of a pass that began on another number of ranks; once.

    Args:
        loader: for which `Dealing.of` is not None.
        samples: of the pass, that were dealt before.
    """

    def __init__(self, loader: DataLoader[Any], samples: int) -> None:
        self._loader = loader
        self._samples = samples

    @staticmethod
    def batches_left(loader: Iterable[Any], samples: int) -> int:
        """Batches of each rank, once so many samples of the pass were dealt."""
        assert isinstance(loader, DataLoader)
        assert isinstance(loader.sampler, DistributedSampler)
        own = _rounds(len(loader.sampler.dataset) - samples, loader.sampler)  # type: ignore[arg-type]
        batch_size = loader.batch_size or 1
        return own // batch_size if loader.drop_last else math.ceil(own / batch_size)

    def __iter__(self) -> Iterator[Any]:
        loader, sampler = self._loader, self._loader.sampler
        assert isinstance(sampler, DistributedSampler)
        order = _order(sampler)
        rest = order[self._samples :]
        rounds = _rounds(len(rest), sampler)
        wanted = rounds * sampler.num_replicas
        while order and len(rest) < wanted:  # filled up as the sampler fills up
            rest += order[: wanted - len(rest)]
        own = rest[sampler.rank : wanted : sampler.num_replicas]
        if loader.batch_sampler is None:
            return iter(own)
        return iter(BatchSampler(own, loader.batch_size or 1, loader.drop_last))


def _rounds(samples: int, sampler: DistributedSampler[Any]) -> int:
    """Samples of each rank of so many."""
    ranks = sampler.num_replicas
    return max(0, samples // ranks if sampler.drop_last else math.ceil(samples / ranks))


def _order(sampler: DistributedSampler[Any]) -> list[int]:
    """The order of the whole pass, before it is dealt."""
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(alone)
