"""What loops change between steps: buffers, as they were at the last boundary, and weights that are being copied."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy
import torch

from cpsr.errors import SaveError
from cpsr.state.device_values import Arrival, Deadline
from cpsr.state.frozen_parameters import FrozenWeights, hash_of
from cpsr.state.shard import OperatorState, Shard, integers_of

__all__ = ["DISTURBED", "BoundaryBuffers", "EarlierStep", "WriteWatch"]

# Running statistics and counters are copied at every boundary: torch changes them without a new version. Larger ones
# (attention masks) are copied when their version has changed; or always, once they were found to change without one,
# as codebooks do that a forward writes to through `.data`. That is looked for at the boundaries 1, 2, 4, 8 and so on.
SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class EarlierStep:
    """The last step that a device has completed, while the host has launched later ones.

    Attributes:
        iteration: of the step.
        boundary: number of its boundary, counted by `BoundaryBuffers`.
        scalars: the small state before the next update, with `DeviceNumber`s.
        overtaken: whether the device has begun the next update, so that the state on it is this one no more.
    """

    iteration: int
    boundary: int
    scalars: Any
    overtaken: Callable[[], bool]

    def views(self, newest: Shard) -> Shard:
        """The engine's views as those of this step.

        Raises:
            SaveError: weights or moments are on the host, and so they are of a later step.
        """
        for key, tensor in Shard(newest.operators).tensors():
            if not tensor.is_cuda:
                raise SaveError(f"{key} is on the host, and of a later step than the device has completed")
        operators = {name: replace(one, iteration=self.iteration) for name, one in newest.operators.items()}
        return Shard(operators, newest.others)


class BoundaryBuffers:
    """Copies of the buffers outside the optimizer, as they were at the last step boundary.

    Those on a device are copied in its order: while it has not come to a boundary, it has the copies of the one before.

    Args:
        others: the engine's own tensors by name, which are changed in place.
    """

    def __init__(self, others: Mapping[str, torch.Tensor]) -> None:
        self._others = {name: tensor.detach() for name, tensor in others.items()}  # also if `.data` is exchanged
        small = [name for name, tensor in others.items() if tensor.numel() * tensor.element_size() <= SMALL_BYTES]
        self._small = {name: (self._others[name], self._others[name].clone()) for name in small}
        self._small_sources = [source for source, _ in self._small.values()]
        self._small_copies = [copy for _, copy in self._small.values()]
        self._large = {name: tensor for name, tensor in self._others.items() if name not in self._small}
        self._versions = {name: _version(tensor) for name, tensor in self._large.items()}
        self._at_first = FrozenWeights(dict(self._large).copy)
        self._at_first.settle()
        self._uncounted: frozenset[str] = frozenset()  # replaced, as dumps are made by other threads
        self._watched_since: set[str] = set()  # since the last boundary
        self._copies: dict[str, torch.Tensor] = {}
        self._boundary = 0
        self._copied: dict[str, tuple[int, int]] = {}  # boundaries at which a large one was first and last copied

    def keep(self) -> None:
        """Copy at a step boundary: one call for all small buffers, and one version check for each large one."""
        self._boundary += 1
        if not self._others:
            return
        with torch.no_grad():
            if self._small:
                torch._foreach_copy_(self._small_copies, self._small_sources)
            if self._boundary & (self._boundary - 1) == 0:
                for name in self._large.keys() - self._uncounted:
                    self._notice(name)
            always, self._watched_since = self._uncounted | self._watched_since, set()
            for name, tensor in self._large.items():
                version = _version(tensor)
                if version == self._versions[name] and name not in always:
                    continue
                self._versions[name] = version
                self._copied[name] = self._copied.get(name, (self._boundary, 0))[0], self._boundary
                if name in self._copies:
                    self._copies[name].copy_(tensor, non_blocking=True)
                else:
                    self._copies[name] = tensor.detach().clone()

    def watch(self, changing: Mapping[str, torch.Tensor]) -> None:
        """From now on also copy these tensors whenever they have changed at a boundary."""
        for name, tensor in changing.items():
            if name not in self._others:
                self._others[name] = self._large[name] = tensor.detach()
                self._versions[name] = _version(tensor)
                self._watched_since.add(name)

    def at_boundary(
        self, others: Mapping[str, torch.Tensor], earlier: EarlierStep | None = None
    ) -> dict[str, torch.Tensor]:
        """The values that these tensors had at the last boundary, or at an earlier one of a device that is behind.

        Raises:
            SaveError: a tensor was replaced; a large one has changed for the first time and has no copy; or one on the
                host has the value of a later step, or was written to where torch does not count it.
        """
        return {name: self._value(name, tensor, earlier) for name, tensor in others.items()}

    def _value(self, name: str, tensor: torch.Tensor, earlier: EarlierStep | None) -> torch.Tensor:
        known = self._others.get(name)
        if known is None or known.data_ptr() != tensor.data_ptr():  # a view may be a new one every time
            raise SaveError(f"the buffer '{name}' was replaced since the start of this life")
        boundary = self._boundary if earlier is None else earlier.boundary
        first, last = self._copied.get(name, (0, 0))
        if boundary < (self._boundary if name in self._small else last) and not tensor.is_cuda:
            raise SaveError(f"the buffer '{name}' is on the host, and of a later step than the device has completed")
        if name in self._small:
            return self._small[name][1]
        if boundary >= last and _version(tensor) == self._versions[name] and name not in self._uncounted:
            if not tensor.is_cuda and self._notice(name):  # a device that hangs must not be waited for
                raise SaveError(
                    f"the buffer '{name}' was written to where torch does not count it, through .data: its value at "
                    "the step is not known; change it inside torch.no_grad() instead"
                )
            return tensor
        if name not in self._copies or boundary < first:
            raise SaveError(f"the buffer '{name}' has changed in the step that was interrupted, for the first time")
        return self._copies[name]

    def _notice(self, name: str) -> bool:
        """Whether a large one has other bytes than at the last change that torch has counted; reads all of it."""
        tensor, kept = self._large[name], self._copies.get(name)
        if _version(tensor) != self._versions[name]:
            return False
        found = bool(self._at_first.altered([name])) if kept is None else hash_of(kept) != hash_of(tensor)
        if found:
            self._uncounted |= {name}
        return found


def _version(tensor: torch.Tensor) -> int:
    """Torch's count of changes in place; 0 for a tensor made in inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


DISTURBED = (
    "the loop changes weights between a step and the next update, as weight noise, adversarial weights and the weights "
    "of an evaluation do. From now on it waits at each snapshot until all is copied"
)
THOROUGH_SNAPSHOTS = 3  # of a life; later ones for host memory alone are watched by single elements
ROWS_MAX = 1 << 16  # of a tensor that are looked at
_VERSION = attrgetter("_version")


class WriteWatch:
    """Compares the weights at the begin of a copy with those at each forward until the next update.

    Snapshots and windows share one: their copies begin between the same two steps, and end before the next update.

    Torch counts writes in place, also to moments. It does not count those through `.data`: one element of each tensor
    shows them, and in a thorough watch one of each row, as adversarial changes of an embedding touch few rows.

    Attributes:
        disturbed: whether the loop has ever changed weights there, and what was under way is taken back: from now on it
            must wait for each copy.
        trusted: whether enough snapshots were watched thoroughly, and nothing changed.
        mark: what the weights are compared with; None: nothing is being copied.
    """

    def __init__(self) -> None:
        self.disturbed = False
        self._copies: dict[object, Callable[[], None]] = {}  # under way, and what a change leads to
        self._looking = threading.RLock()  # a handler of a signal may dump while its thread looks
        self._watched = 0
        self._operators: dict[str, OperatorState] = {}
        self._counted: list[torch.Tensor] = []
        self._elements: list[Any] = []
        self._rows: list[Any] = []
        self._on_device: list[torch.Tensor] = []
        self.mark: tuple[list[int], bytes, list[int] | None] | None = None
        self._sent: list[tuple[torch.Tensor, Arrival]] = []

    @property
    def trusted(self) -> bool:
        """See the class."""
        return not self.disturbed and self._watched >= THOROUGH_SNAPSHOTS

    def begin(self, copy: object, shard: Shard, *, thorough: bool, on_change: Callable[[], None]) -> None:
        """A copy of this state begins; not once the loop has disturbed one.

        Args:
            copy: by which `end` knows it.
            shard: its sources.
            thorough: look at each row, also later in this life.
            on_change: called in the thread of `look`, if the copy is not of one state; perhaps again.
        """
        thorough = thorough or self._watched < THOROUGH_SNAPSHOTS
        first = not self._copies
        self._copies[copy] = on_change
        if not first and not thorough:
            return  # since the begin of the other
        self._prepare(shard)
        self._watched += thorough
        self.mark = self._versions(), b"".join(self._elements), self._sums() if thorough else None
        self._sent = []
        self._send()

    def look(self, *, forward: bool = True, deadline: Deadline | None = None, wait: bool = True) -> bool:
        """Whether anything has changed since `begin`; remembers that in `disturbed`.

        When it returns True all these copies are taken back, also where another thread has found the change.

        Args:
            forward: a forward begins; False: the copies must be complete now, from any thread.
            deadline: for a device, which may hang.
            wait: for a device; False: compare what is here of it.

        Raises:
            SaveError: the device hangs, and the deadline has passed.
        """
        with self._looking:
            if self.mark is None or self.disturbed:
                return self.mark is not None
            changed = self._differs(self.mark, forward=forward, deadline=deadline, wait=wait)
            if changed:
                with ExitStack() as every:
                    for take_back in list(self._copies.values()):
                        every.callback(take_back)  # one that fails keeps no other from being taken back
                self.disturbed = True
            return changed

    def _differs(
        self, mark: tuple[list[int], bytes, list[int] | None], *, forward: bool, deadline: Deadline | None, wait: bool
    ) -> bool:
        versions, elements, sums = mark
        changed = b"".join(self._elements) != elements
        if not forward and not changed:  # versions only grow: they are looked at once
            changed = self._versions() != versions
        if not changed and sums is not None:
            changed = self._sums() != sums
        if forward:
            self._send()
        elif not changed:
            changed = self._differs_on_device(deadline, wait=wait)
        return changed

    def end(self, copy: object) -> None:
        """The copy is over; without `begin` nothing happens."""
        self._copies.pop(copy, None)
        if not self._copies:
            self.mark, self._sent = None, []

    def _versions(self) -> list[int]:
        return [*map(_VERSION, self._counted)]

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

    def _differs_on_device(self, deadline: Deadline | None, *, wait: bool) -> bool:
        """Of those sent; waits for that of the first forward, before which the device had little to do."""
        for place, (_, arrival) in enumerate(self._sent[: 2 if wait else 0]):
            arrival.wait(f"sample {place} of the weights", deadline)
        here = [host for host, arrival in self._sent if arrival.here]
        return any(not torch.equal(host, here[0]) for host in here[1:])

    def _prepare(self, shard: Shard) -> None:
        """Make views of what is looked at, where tensors were replaced."""
        if shard.operators is self._operators:
            return
        self._operators = shard.operators
        sources = [one.parameter.values for one in shard.operators.values()]
        moments = [values for one in shard.operators.values() for values in one.moments.values()]
        self._counted = [one for one in (*sources, *moments) if not one.is_inference()]
        held = [one.parameter for one in shard.operators.values() if one.parameter.numel]
        middles = [one.values[one.numel // 2 :] for one in held if one.values.is_cuda]
        self._on_device = [one.as_strided((1,), (1,)) for one in middles]  # a stride would forbid to see them as bytes
        self._elements, self._rows = [], []
        for one in held:
            if not one.values.is_cuda:
                integers = integers_of(one.values).numpy()
                row = one.global_shape[-1] if len(one.global_shape) > 1 else 1
                self._elements.append(integers[len(integers) // 2 :][:1].data)
                self._rows.append(integers[:: max(1, row, len(integers) // ROWS_MAX)])
