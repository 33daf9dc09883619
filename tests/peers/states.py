"""Sealed states in a directory that stands for one node's shared memory, as a rank's snapshots leave them there."""

from pathlib import Path

import torch
from safetensors import safe_open

from cpsr.checkpoint.arena import Sealed
from cpsr.checkpoint.buffers import HostBuffer, slab_size
from cpsr.checkpoint.memory import MemoryFile, SharedMemory
from cpsr.checkpoint.memory_states import MemoryState, load_states
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.state.codec import SCALARS, encode
from cpsr.state.shard import OperatorState, ParamSlice, Shard

RUN_ID = "0123abcd"


def shard(rank: int, iteration: int, elements: int, *, alike: bool = False) -> Shard:
    """What a rank has at an iteration: a slice of its own or, where all are alike, the whole; its own buffer."""
    place = 0 if alike else rank
    values = torch.arange(elements, dtype=torch.float32) * (place + 1) + iteration
    moments = {"exp_avg": values / 3, "exp_avg_sq": values.square()}
    piece = ParamSlice(values, (8 * elements,), place * elements)
    others = {"mean": torch.tensor([rank + iteration / 3])}
    return Shard({"weight": OperatorState("weight", piece, moments, iteration)}, others)


class States:
    """One rank's buffers, taken in turn.

    Args:
        directory: the node's shared memory.
        rank: the owner.
        elements: of its one operator.
        slots: number of buffers.
        alike: all ranks own the same.
    """

    def __init__(
        self, directory: Path, rank: int, elements: int = 50_000, slots: int = 3, *, alike: bool = False
    ) -> None:
        self.template = template = shard(rank, 0, elements, alike=alike)
        self.memory = SharedMemory(RUN_ID, rank, 0, directory)
        self._rank, self._elements, self._alike = rank, elements, alike
        files = self.memory.files([*map(str, range(slots))], slab_size(template))
        self._buffers: list[tuple[MemoryFile, HostBuffer]] = [
            (file, HostBuffer(template, pinned=False, memory=file)) for file in files
        ]
        self._taken = 0

    def seal(self, iteration: int) -> tuple[Path, Snapshot]:
        """The file that holds this iteration from now on, and its snapshot; in the next buffer, whatever it is for."""
        self._taken += 1
        return self._fill((self._taken - 1) % len(self._buffers), iteration)

    def image(self, iteration: int) -> Sealed:
        """The file that holds this iteration from now on, to be sent."""
        return Sealed.at(self.seal(iteration)[0], iteration)

    def _fill(self, index: int, iteration: int) -> tuple[Path, Snapshot]:
        file, buffer = self._buffers[index]
        file.unseal()
        target_shard = buffer.shard_at(iteration)
        source_shard = shard(self._rank, iteration, self._elements, alike=self._alike)
        for (_, target), (_, source) in zip(target_shard.tensors(), source_shard.tensors(), strict=True):
            target.copy_(source)
        scalars = {"of": [self._rank, iteration]}
        buffer.held.overwrite(buffer.held.parts.names)
        buffer.held.fill(buffer.held.parts.names, iteration)
        file.prepare("snapshot", target_shard, iteration, encode(scalars, prefix=SCALARS), held=buffer.held)()
        return file.path, Snapshot(iteration, target_shard, scalars)


def is_right(
    state: MemoryState, tensors: MemoryState | None = None, elements: int = 50_000, *, alike: bool = False
) -> bool:
    """Whether a replica holds, bit for bit, what its owner had; a small one together with another rank's tensors."""
    alike = alike or tensors is not None
    expected = shard(state.rank, state.iteration, elements, alike=alike)
    with safe_open(state.path, framework="pt") as file:  # any file of memory is one of that library
        if not torch.equal(file.get_tensor("other/mean"), expected.others["mean"]):
            return False
    found = shard(state.rank, -1, elements, alike=alike)
    scalars = load_states([state], found) if tensors is None else load_states([tensors, state], found)
    return bool(scalars == {"of": [state.rank, state.iteration]}) and all(
        torch.equal(values, wanted)
        for (_, values), (_, wanted) in zip(found.tensors(), expected.tensors(), strict=True)
    )
