"""Host buffers that hold one rank's shard each: their layout, the fewest copies that fill one, and those of a pool.

Weights, moments and other tensors lie as they do in their files: each kind from the start of a block on, without gaps.
So a file is written from the buffer as it is.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from cpsr.checkpoint.direct_file import BLOCK_BYTES
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import SlabSize
from cpsr.checkpoint.parts import Held, Parts
from cpsr.checkpoint.running_copy import Piece
from cpsr.checkpoint.tensor_file import PlacedTensor, in_file_order, in_memory_order, placed_after
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state.device_values import Arrival, Deadline, in_time
from cpsr.state.shard import PRESENT, OperatorState, Shard

__all__ = ["HostBuffer", "close_buffers", "make_buffers", "slab_size"]

_KINDS = ("param", "moment", "other")  # what the keys of `Shard.tensors` begin with; each has a file


class HostBuffer:
    """Host memory for one shard: touched, so that the training thread meets no page fault, and pinned for a GPU.

    Args:
        template: names, shapes and dtypes.
        pinned: for copies from a GPU; `memory` is pinned by its owner.
        memory: shared memory of `slab_size` for the buffer; by default the process's own memory.
        units: operator -> its part, see `Parts`.

    Attributes:
        content: all its bytes.
        held: what it holds of each part.
        memory: as given.
        views: of all tensors in it, of whichever iteration.
    """

    def __init__(
        self,
        template: Shard,
        *,
        pinned: bool,
        memory: MemoryFile | None = None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        self.memory = memory
        size = slab_size(template).buffer_bytes
        self.content = _own_memory(size, pinned=pinned) if memory is None else memory.bytes
        by_kind = _layout(template)
        self._placed = {one.name: one for ones in by_kind for one in ones}
        placed = [(key, one.first, one.end - one.first) for key, one in self._placed.items()]
        begins = [ones[0].first for ones in by_kind if ones]
        self.held = Held(Parts(placed, len(self.content), units, begins), self.content)
        self._views = {key: one.view(self.content) for key, one in self._placed.items()}
        self._operators = {
            name: OperatorState(
                name,
                replace(one.parameter, values=self._views[f"param/{name}"]),
                {moment: self._views[f"moment/{moment}/{name}"] for moment in one.moments},
                PRESENT,
            )
            for name, one in template.operators.items()
        }
        self._others = {name: self._views[f"other/{name}"] for name in template.others}
        self.views = Shard(self._operators, self._others)

    def shard_of_parts(self, taken_at: Mapping[str, int]) -> Shard:
        """Views of these parts with the template's names and shapes, each operator at the iteration of its part."""
        parts = {name: self.held.parts.of(name) for name in self._operators}
        operators = {
            name: replace(one, iteration=taken_at[parts[name]])
            for name, one in self._operators.items()
            if parts[name] in taken_at
        }
        return Shard(operators, dict(self._others))

    def shard_at(self, iteration: int) -> Shard:
        """`shard_of_parts` with all operators at one iteration."""
        return self.shard_of_parts(dict.fromkeys(self.held.parts.names, iteration))

    def unseal(self) -> None:
        """The state in it counts no more."""
        if self.memory is not None:
            self.memory.unseal()

    def copy_others(self, shard: Shard) -> None:
        """Copy the buffers that the next forward changes; on a GPU in the order of the current stream."""
        if differing := shard.others.keys() ^ self._others.keys():
            raise _changed(f"the module's buffer {min(differing)} was added or removed")
        with torch.no_grad():
            for name, values in shard.others.items():
                _require_same(f"other/{name}", self._others[name], values)
                self._others[name].copy_(values, non_blocking=True)

    def pairs(self, shard: Shard) -> list[Piece]:
        """The fewest copies that bring weights and moments into the buffer, each within one segment of it.

        ZeRO's flat partitions become one copy each, and not one a parameter.

        Args:
            shard: the sources.

        Raises:
            UnsupportedEngineError: a tensor differs from the template; the message names it.
        """
        tensors = dict(Shard(shard.operators).tensors())
        if gone := [key for key in self._views if not key.startswith("other/") and key not in tensors]:
            raise _changed(f"{gone[0]} is gone")
        begins = {segment.begin for segment in self.held.parts.segments}
        found: list[Piece] = []
        if new := [key for key in tensors if key not in self._views]:
            raise _changed(f"{new[0]} is new")
        for key in sorted(tensors, key=lambda key: self._placed[key].first):
            target, source = self._views[key], tensors[key].detach()
            _require_same(key, target, source)
            if found and self._placed[key].first not in begins and all(map(_follows, (target, source), found[-1])):
                target, source = (_with_more(one, source.numel()) for one in found.pop())
            if source.numel():
                found.append((target, source))
        return found


def slab_size(template: Shard) -> SlabSize:
    """The size of one buffer's file in shared memory, without its small state.

    The same in every process, wherever the tensors lie.
    """
    sizes = Counter[str]()
    for key, tensor in template.tensors():
        sizes[_kind_of(key)] += tensor.nbytes
    return SlabSize.for_tensors((key for key, _ in template.tensors()), sum(map(_in_blocks, sizes.values())))


def _follows(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether it lies right behind the other one, as more of the same tensor would."""
    return (
        tensor.dtype == before.dtype
        and tensor.is_contiguous()
        and before.is_contiguous()
        and tensor.data_ptr() == before.data_ptr() + before.nbytes
        and tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    )


def _with_more(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The tensor, longer by that many elements of the same storage."""
    return tensor.as_strided((tensor.numel() + elements,), (1,), tensor.storage_offset())


def _layout(template: Shard) -> list[list[PlacedTensor]]:
    """Where every tensor lies: by kind, then as in a file by the size of its elements, then as in the source."""
    found: list[list[PlacedTensor]] = []
    end = 0
    for kind in _KINDS:
        tensors = {key: tensor for key, tensor in template.tensors() if _kind_of(key) == kind}
        found.append(placed_after(_in_blocks(end), in_file_order(in_memory_order(tensors))))
        end = found[-1][-1].end if found[-1] else end
    return found


def _kind_of(key: str) -> str:
    return key.partition("/")[0]


def _in_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _own_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Memory of this process, from the start of a block on."""
    whole = torch.empty(size + BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned).zero_()
    start = -whole.data_ptr() % BLOCK_BYTES
    return whole[start : start + size]


def _changed(what: str) -> UnsupportedEngineError:
    return UnsupportedEngineError(
        f"the set of trained tensors has changed since the start of this life: {what}. CPSR saves the tensors with "
        "which the job began; to train others, start the job with them and another run_dir"
    )


def _require_same(key: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        before, now = (f"{tuple(one.shape)} {one.dtype}" for one in (expected, found))
        raise _changed(f"{key} was {before} and is {now}")


logger = logging.getLogger(__name__)

# At the end of a life a device that does not finish its work within this time hangs.
IDLE_SECONDS = 5.0
# Memory that a device may still write to stays mapped, registered and locked until the process ends.
_left_alone: list[object] = []


def make_buffers(
    template: Shard,
    count: int,
    memory: SharedMemory | None,
    device: torch.device | None,
    units: Mapping[str, str],
) -> tuple[list[HostBuffer], str | None]:
    """The buffers of a pool, and why they are not in shared memory; None where they are, or were not meant to be.

    Where CUDA refuses to pin shared memory, they are in pinned memory of the process: they do not survive it, which is
    reported, but no training step waits for copies through a staging buffer.

    Args:
        template: the shard that each holds.
        count: of buffers.
        memory: shared memory for them; None: the process's own.
        device: that copies into them; None: the host.
        units: operator -> its part, see `Parts`.
    """
    problem, files = None, list[MemoryFile]()
    try:
        if memory is not None:
            files = memory.files([*map(str, range(count))], slab_size(template))
            for file in files:
                file.pin(device)
            return [HostBuffer(template, pinned=False, memory=file, units=units) for file in files], None
    except (OSError, SaveError) as error:
        problem = str(error)
        for file in files:
            file.close(remove=file.iteration < 0)  # a restart can still use the state of an earlier process
    return [HostBuffer(template, pinned=device is not None, units=units) for _ in range(count)], problem


def close_buffers(
    buffers: Sequence[HostBuffer], device: torch.device | None, in_flight: Collection[int], *, remove: bool
) -> None:
    """Unpin and close the buffers of a pool.

    Args:
        buffers: of `make_buffers`.
        device: that copies into them.
        in_flight: indices of those into which a copy may still be under way: they are left alone, with their locks.
        remove: remove all from shared memory; else it stays for the next life.
    """
    files = {index: buffer.memory for index, buffer in enumerate(buffers) if buffer.memory is not None}
    hangs = bool(in_flight) or (bool(files) and not _is_idle(device))
    if hangs:
        # Unregistering waits for the device; and the address of a registered mapping must not be used again.
        logger.warning(
            "the device has not finished its work: host memory of this rank stays pinned until the process ends, "
            "and %d of %d buffers stay locked because a copy into them may be under way",
            len(in_flight),
            len(buffers),
        )
        _left_alone.append(buffers)
    for index, file in files.items():
        if index not in in_flight:
            file.close(remove=remove, unpin=not hangs)


def _is_idle(device: torch.device | None) -> bool:
    return device is None or in_time(lambda: Arrival(device).wait("its work", Deadline(IDLE_SECONDS)))
