"""Host buffers that hold one rank's shard each: their layout, the fewest copies that fill one, and those of a pool.

Weights, moments and other tensors lie as they do in their files: each kind from the start of a block on, without gaps.
So a file is written from the buffer as it is.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import torch

from cpsr.checkpoint.device_copy import Pinning
from cpsr.checkpoint.direct_file import BLOCK_BYTES
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import SlabSize
from cpsr.checkpoint.parts import Held, Parts
from cpsr.checkpoint.running_copy import Piece
from cpsr.checkpoint.tensor_file import in_file_order, in_memory_order
from cpsr.errors import SaveError, UnsupportedEngineError
from cpsr.state.device_values import Arrival, Deadline
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["HostBuffer", "close_buffers", "layout_bytes", "make_buffers", "slab_size"]

# Of an operator: the slice that given values are, and the names of its moments.
_Template = tuple[Callable[[torch.Tensor], ParamSlice], tuple[str, ...]]
_KINDS = ("param", "moment", "other")  # what the keys of `Shard.tensors` begin with; each has a file


class HostBuffer:
    """Host memory for one shard: touched, so that the training thread meets no page fault, and pinned for a GPU.

    Args:
        template: names, shapes and dtypes.
        pinned: for copies from a GPU; `memory` is pinned by its owner.
        memory: shared memory of `slab_size` for the buffer; by default the process's own memory.
        units: operator -> its part, see `Parts`.

    Attributes:
        held: what it holds of each part.
        memory: as given.
        pinning: of that memory.
    """

    def __init__(
        self,
        template: Shard,
        *,
        pinned: bool,
        memory: MemoryFile | None = None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        self._template = _template_of(template)
        self._others = list(template.others)
        self.memory = memory
        self.pinning: Pinning | None = None
        self.offsets = _layout(template)
        if memory is None:
            self._bytes = _own_memory(layout_bytes(template), pinned=pinned)
        else:
            self._bytes = memory.bytes
        sizes = {key: tensor.nbytes for key, tensor in template.tensors()}
        placed = [(key, offset, sizes[key]) for key, offset in self.offsets.items()]
        begins = [min(self.offsets[key] for key, _ in ones) for ones in _by_kind(template) if ones]
        self.held = Held(Parts(placed, len(self._bytes), units, begins), self._bytes)
        self._views = {
            key: self._view(self.offsets[key], tensor.numel(), tensor.dtype).view(tensor.shape)
            for key, tensor in template.tensors()
        }

    def shard_of_parts(self, taken_at: Mapping[str, int]) -> Shard:
        """Views of this buffer with the template's names and shapes, each operator at the iteration of its part."""
        operators = {}
        for name, (described, moments) in self._template.items():
            parameter = described(self._views[f"param/{name}"])
            views = {moment: self._views[f"moment/{moment}/{name}"] for moment in moments}
            operators[name] = OperatorState(name, parameter, views, taken_at[self.held.parts.of(name)])
        return Shard(operators, {name: self._views[f"other/{name}"] for name in self._others})

    def shard_at(self, iteration: int) -> Shard:
        """`shard_of_parts` with all operators at one iteration."""
        return self.shard_of_parts(dict.fromkeys(self.held.parts.names, iteration))

    def copy_others(self, shard: Shard) -> None:
        """Copy the buffers that the next forward changes; on a GPU in the order of the current stream."""
        if differing := shard.others.keys() ^ set(self._others):
            raise _changed(f"the module's buffer {min(differing)} was added or removed")
        with torch.no_grad():
            for name, values in shard.others.items():
                target = self._views[f"other/{name}"]
                _require_same(f"other/{name}", target, values)
                target.copy_(values, non_blocking=True)

    @property
    def content(self) -> torch.Tensor:
        """All its bytes."""
        return self._bytes

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
        for key in sorted(tensors, key=lambda key: self.offsets.get(key, 0)):
            if key not in self._views:
                raise _changed(f"{key} is new")
            target, source = self._views[key], tensors[key].detach()
            _require_same(key, target, source)
            if found and self.offsets[key] not in begins and all(map(_follows, (target, source), found[-1])):
                target, source = (_with_more(one, source.numel()) for one in found.pop())
            if source.numel():
                found.append((target, source))
        return found

    def _view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[offset : offset + numel * dtype.itemsize].view(dtype)


def _template_of(shard: Shard) -> dict[str, _Template]:
    """By operator, what every shard of views shares with its template."""
    found: dict[str, _Template] = {}
    for name, operator in shard.operators.items():
        one = operator.parameter
        described = partial(ParamSlice, global_shape=one.global_shape, offset=one.offset, block=one.block)
        found[name] = described, tuple(operator.moments)
    return found


def layout_bytes(template: Shard) -> int:
    """Host memory of one buffer; the same in every process, wherever the tensors lie."""
    return sum(_in_blocks(sum(tensor.nbytes for _, tensor in ones)) for ones in _by_kind(template))


def slab_size(template: Shard) -> SlabSize:
    """The size of one buffer's file in shared memory, without its small state."""
    return SlabSize.for_tensors((key for key, _ in template.tensors()), layout_bytes(template))


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


def _layout(template: Shard) -> dict[str, int]:
    """Byte offset of every tensor: by kind, then as in a file by the size of its elements, then as in the source."""
    offsets: dict[str, int] = {}
    start = 0
    for ones in _by_kind(template):
        place = start
        for key, tensor in in_file_order(in_memory_order(dict(ones))).items():
            offsets[key] = place
            place += tensor.nbytes
        start += _in_blocks(place - start)
    return offsets


def _by_kind(template: Shard) -> Iterable[list[tuple[str, torch.Tensor]]]:
    """The tensors of each kind."""
    tensors = list(template.tensors())
    return [[(key, tensor) for key, tensor in tensors if key.split("/", 1)[0] == kind] for kind in _KINDS]


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
    problem, shared = None, list[HostBuffer]()
    try:
        files = [] if memory is None else memory.files(count, slab_size(template))
        shared = [HostBuffer(template, pinned=False, memory=file, units=units) for file in files]
        if device is not None:
            for buffer in shared:
                buffer.pinning = Pinning(buffer.content, device)
    except (OSError, SaveError) as error:
        problem = str(error)
        for buffer in shared:
            if buffer.pinning is not None:
                buffer.pinning.undo()
            if (file := buffer.memory) is not None:
                file.close(remove=file.iteration < 0)  # a restart can still use the state of an earlier process
        shared = []
    if shared:
        return shared, None
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
    pinned = [buffer.pinning for buffer in buffers if buffer.pinning is not None]
    if in_flight or (pinned and not _is_idle(device)):
        # Unregistering waits for the device; and the address of a registered mapping must not be used again.
        logger.warning(
            "the device has not finished its work: host memory of this rank stays pinned until the process ends, "
            "and %d of %d buffers stay locked because a copy into them may be under way",
            len(in_flight),
            len(buffers),
        )
        _left_alone.append(buffers)
        pinned = []
    for pinning in pinned:
        pinning.undo()
    for index, buffer in enumerate(buffers):
        if buffer.memory is not None and index not in in_flight:
            buffer.memory.close(remove=remove)


def _is_idle(device: torch.device | None) -> bool:
    try:
        if device is not None:
            Arrival(device).wait("its work", Deadline(IDLE_SECONDS))
    except (SaveError, RuntimeError):  # it hangs, or fails at every call after an error of a kernel
        return False
    return True
