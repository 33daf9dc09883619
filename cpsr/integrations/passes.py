"""Another package's data loader, whose place in the data CPSR keeps.

CPSR iterates over numbers in place of the batches. So it knows when the loop requests a batch, keeps and restores the
position, and captures the random states at the start of a pass. The batches come from the loader itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cpsr.state.loader import ResumableLoader
from cpsr.state.scalars import capture_host_rng, restore_host_rng

__all__ = ["Passes", "order_of_the_pass"]


class Passes:
    """Numbers in place of the batches of a loader, for `recovery.resume`.

    Args:
        length: numbers in a pass.
        generator: the loader's own, which may decide the order of a pass; None: it has none.
    """

    def __init__(self, length: int, generator: Any = None) -> None:
        self.generator = generator
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


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
