"""Another package's data loader, whose place in the data CPSR keeps.

CPSR iterates over numbers in place of the batches, with one stream for each pass: at the end of a pass loaders may draw
from their generators, which a stream over several passes would not see. So it knows when the loop requests a batch,
keeps and restores the position, and captures the random states at the start of a pass. The batches come from the loader
itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cpsr.state.loader import ResumableLoader
from cpsr.state.scalars import capture_host_rng, restore_host_rng

__all__ = ["Passes", "order_of_the_pass"]


class Passes:
    """Numbers in place of the batches of a loader, for `recovery.resume`.

    Args:
        length: numbers in a pass.
        loader: prepared by accelerate; the generator of its sampler, or its own, may decide the order of a pass. A
            sampler that seeds its generator anew at each pass keeps nothing in it.
    """

    def __init__(self, length: int, loader: Any) -> None:
        self.generator = _generator(loader)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


def _generator(loader: Any) -> torch.Generator | None:
    holders = [loader]
    for holder in holders:  # grows: accelerate puts a sampler around a batch sampler around a sampler
        parts = (getattr(holder, name, None) for name in ("batch_sampler", "sampler"))
        holders += [part for part in parts if part is not None and all(part is not other for other in holders)]
    found = [getattr(one, "generator", None) for one in reversed(holders) if not hasattr(one, "initial_seed")]
    return next((one for one in found if isinstance(one, torch.Generator)), None)


@contextmanager
def order_of_the_pass(stream: ResumableLoader) -> Iterator[None]:
    """Inside, the first batch of a continued pass is fetched: the loader draws its order as at the start of the pass.

    Afterwards the random states are those of training again.
    """
    states = stream.position.states
    if states is None or "host" not in states:  # a new run, or weights alone are left
        yield
        return
    training = capture_host_rng()
    restore_host_rng(states["host"])
    try:
        yield
    finally:
        restore_host_rng(training)
