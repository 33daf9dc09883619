"""Whether a loop changes weights while they are copied: between a step and the next update."""

from operator import is_
from typing import Any

import numpy
import torch

from cpsr.state.device_values import Arrival
from cpsr.state.shard import Shard

__all__ = ["DISTURBED", "WriteWatch"]

DISTURBED = (
    "the loop changes weights between a step and the next update, as weight noise, adversarial weights and the weights "
    "of an evaluation do. From now on it waits at each snapshot until all is copied"
)
THOROUGH_SNAPSHOTS = 3  # of a life; later ones for host memory alone are watched by single elements
ROWS_MAX = 1 << 16  # of a tensor that are looked at
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class WriteWatch:
    """Compares the weights at the begin of a copy with those at each forward until the next update.

    Snapshots and windows share one: their copies begin between the same two steps, and end before the next update.

    Torch counts writes in place, also to moments. It does not count those through `.data`: one element of each tensor
    shows them, and in a thorough watch one of each row, as adversarial changes of an embedding touch few rows.

    Attributes:
        disturbed: whether the loop has ever changed weights there: it must then wait for each copy.
        trusted: whether enough snapshots were watched thoroughly, and nothing changed.
        changed: whether a look has found a change since the begin of the copies that are under way.
    """

    def __init__(self) -> None:
        self.disturbed = self.changed = False
        self._copies: set[object] = set()  # under way
        self._watched = 0
        self._sources: list[torch.Tensor] = []
        self._counted: list[torch.Tensor] = []
        self._elements: list[Any] = []
        self._rows: list[Any] = []
        self._on_device: list[torch.Tensor] = []
        self._mark: tuple[list[int], bytes, list[int] | None] | None = None
        self._sent: list[tuple[torch.Tensor, Arrival]] = []

    @property
    def trusted(self) -> bool:
        """See the class."""
        return not self.disturbed and self._watched >= THOROUGH_SNAPSHOTS

    def begin(self, copy: object, shard: Shard, *, thorough: bool) -> None:
        """A copy of this state begins.

        Args:
            copy: by which `end` knows it.
            shard: its sources.
            thorough: look at each row, also later in this life.
        """
        thorough = thorough or self._watched < THOROUGH_SNAPSHOTS
        first = not self._copies
        self._copies.add(copy)
        if not first and not thorough:
            return  # since the begin of the other
        self._prepare(shard)
        self._watched += thorough
        self._mark = self._versions(), b"".join(self._elements), self._sums() if thorough else None
        self.changed, self._sent = self.changed and not first, []
        self._send()

    def look(self, *, forward: bool = True) -> bool:
        """Whether anything has changed since `begin`; remembers that in `disturbed`.

        Args:
            forward: a forward begins; False: the copy must be complete now, from any thread.
        """
        if self._mark is None:
            return False
        versions, elements, sums = self._mark
        changed = self.changed or self._versions() != versions or b"".join(self._elements) != elements
        if not changed and sums is not None:
            changed = self._sums() != sums
        if forward:
            self._send()
        elif not changed:
            changed = self._differs_on_device()
        self.changed = changed
        self.disturbed = self.disturbed or changed
        return changed

    def end(self, copy: object) -> None:
        """The copy is over; without `begin` nothing happens."""
        self._copies.discard(copy)
        if not self._copies:
            self._mark, self._sent, self.changed = None, [], False

    def _versions(self) -> list[int]:
        return [one._version for one in self._counted]

    def _sums(self) -> list[int]:
        return [int(numpy.add.reduce(rows)) for rows in self._rows]

    def _send(self) -> None:
        """On a GPU: one element of each tensor, in the order of the current stream; nobody waits."""
        if not self._on_device:
            return
        with torch.no_grad():
            packed = torch.cat([one.view(torch.uint8) for one in self._on_device])
            host = torch.empty(packed.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            host.copy_(packed, non_blocking=True)
        self._sent.append((host, Arrival(packed.device)))

    def _differs_on_device(self) -> bool:
        """Of those sent; waits for that of the first forward, before which the device had little to do."""
        for place, (_, arrival) in enumerate(self._sent[:2]):
            arrival.wait(f"sample {place} of the weights")
        here = [host for host, arrival in self._sent if arrival.here]
        return any(not torch.equal(host, here[0]) for host in here[1:])

    def _prepare(self, shard: Shard) -> None:
        """Make views of what is looked at, where tensors were replaced."""
        sources = [one.parameter.values for one in shard.operators.values()]
        if len(sources) == len(self._sources) and all(map(is_, sources, self._sources)):
            return
        self._sources = sources
        moments = [values for one in shard.operators.values() for values in one.moments.values()]
        self._counted = [one for one in (*sources, *moments) if not one.is_inference()]
        held = [one.parameter for one in shard.operators.values() if one.parameter.numel]
        self._on_device = [one.values[one.numel // 2 :][:1] for one in held if one.values.is_cuda]
        self._elements, self._rows = [], []
        for one in held:
            if not one.values.is_cuda:
                integers, row = _as_integers(one.values), one.global_shape[-1] if len(one.global_shape) > 1 else 1
                self._elements.append(integers[len(integers) // 2 :][:1].data)
                self._rows.append(integers[:: max(1, row, len(integers) // ROWS_MAX)])


def _as_integers(values: torch.Tensor) -> Any:
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    return values.view(_INTEGERS[values.element_size()]).numpy()
