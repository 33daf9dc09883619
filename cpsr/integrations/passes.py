"""Another package's data loader, whose place in the data CPSR keeps.

CPSR iterates over numbers in place of the batches, with one stream for each pass: at the end of a pass loaders may draw
from their generators, which a stream over several passes would not see. So it knows when the loop requests a batch,
keeps and restores the position, and captures the random states at the start of a pass. The batches come from the loader
itself.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from cpsr.state.loader import ResumableLoader
from cpsr.state.loader_passes import GlobalBatches
from cpsr.state.scalars import capture_host_rng, restore_host_rng

__all__ = ["Passes", "order_of_the_pass"]


class Passes(GlobalBatches):
    """Numbers in place of the batches of a loader, for `recovery.resume`.

    Args:
        length: numbers in a pass.
        loader: prepared by accelerate; the generator of its sampler, or its own, may decide the order of a pass. A
            sampler that seeds its generator anew at each pass keeps nothing in it.
        batches: of the loader, for each number.
    """

    def __init__(self, length: int, loader: Any, batches: int = 1) -> None:
        sampler = _batch_sampler(loader)
        samples = None if sampler is None else loader.total_batch_size * batches
        one_order = sampler is not None and type(loader) is DataLoaderShard and _draws_one_order(sampler.sampler)
        super().__init__(length, samples, one_order=one_order)
        self.generator = _generator(loader)
        self._base = weakref.ref(loader.base_dataloader)  # not followed in the search for generators

    @property
    def base(self) -> Any:
        """The torch loader that accelerate iterates over."""
        return self._base()


def _batch_sampler(loader: Any) -> BatchSampler | None:
    """What makes the batches that accelerate deals to the ranks in turn; None where it is not torch's own."""
    shard: Any = getattr(loader, "batch_sampler", None)
    sampler = shard.batch_sampler if type(shard) is BatchSamplerShard else shard
    return sampler if type(sampler) is BatchSampler and not isinstance(sampler.sampler, BatchSampler) else None


def _draws_one_order(sampler: Any) -> bool:
    """Whether it draws the same order on any number of ranks.

    On several ranks accelerate gives a `RandomSampler` a generator. On one it draws from the global random state.
    """
    if type(sampler) is RandomSampler:
        return sampler.generator is not None
    return type(sampler) in (SeedableRandomSampler, SequentialSampler)


def _generator(loader: Any) -> torch.Generator | None:
    holders = [loader]
    for holder in holders:  # grows: accelerate puts a sampler around a batch sampler around a sampler
        parts = (getattr(holder, name, None) for name in ("batch_sampler", "sampler"))
        holders += [part for part in parts if part is not None and all(part is not other for other in holders)]
    found = [getattr(one, "generator", None) for one in reversed(holders) if not hasattr(one, "initial_seed")]
    return next((one for one in found if isinstance(one, torch.Generator)), None)


@contextmanager
def order_of_the_pass(stream: ResumableLoader, *, continued: bool) -> Iterator[None]:
    """Inside, the first batch of a pass is fetched: the loader draws as at the start of the pass.

    Afterwards the random states of a continued pass are those of training again.
    """
    states = stream.position.states
    if not continued or states is None or "host" not in states:  # a new run, or weights alone are left
        with stream.seeding(continued=continued):
            yield
        return
    training = capture_host_rng()
    restore_host_rng(states["host"])
    try:
        with stream.seeding(continued=True):
            yield
    finally:
        restore_host_rng(training)
