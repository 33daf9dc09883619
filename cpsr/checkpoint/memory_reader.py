"""Verifies and loads the states in shared memory."""

import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load

from cpsr.checkpoint.loading import dtype_name
from cpsr.checkpoint.memory_states import PAGE_BYTES, MemoryState, describe, digest_of
from cpsr.errors import CheckpointError
from cpsr.state.codec import decode
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = [
    "OpenState",
    "ages_in_memory",
    "holds_whole_operators",
    "load_memory_state",
    "owned_word",
    "owned_word_in_memory",
    "room_for_memory_state",
    "verify_memory_state",
]


def load_memory_state(state: MemoryState, into: Shard) -> Any:
    """Copy a state into the views of `into`, whose operators get the iterations at which they were taken.

    Returns:
        Its scalars.

    Raises:
        CheckpointError: the state is no longer whole, or is of another model or split; `into` is unchanged.
    """
    with OpenState(state) as reading:
        pairs = [(target, reading.tensor(key, target)) for key, target in into.tensors()]
        taken_at = reading.taken_at(into)
        scalars = reading.scalars()
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
        into.operators.update({name: replace(into.operators[name], iteration=at) for name, at in taken_at.items()})
        return scalars


def room_for_memory_state(state: MemoryState) -> Shard:
    """Host memory of its own for a state's tensors, of whatever rank and split; for `load_memory_state`.

    Blocks of a parameter (tensor parallelism) look like ranges here.

    Raises:
        CheckpointError: the state is not there any more.
    """
    found = describe(state.path)
    if found is None or found[0] != state:
        raise CheckpointError(f"{state.path} does not hold iteration {state.iteration} any more")
    layout, operators = found[1]["layout"], found[1]["operators"]
    room = {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, (_, dtype, shape) in layout.items()}
    moments: dict[str, dict[str, torch.Tensor]] = {name: {} for name in operators}
    for key, values in room.items():
        if key.startswith("moment/"):
            moment, name = _moment_of(key, operators)
            moments[name][moment] = values
    owned = {
        name: OperatorState(name, ParamSlice(room[f"param/{name}"], tuple(shape), offset), moments[name], 0)
        for name, (shape, offset, _) in operators.items()
    }
    prefix = "other/"
    return Shard(owned, {key.removeprefix(prefix): one for key, one in room.items() if key.startswith(prefix)})


def _moment_of(key: str, operators: Collection[str]) -> tuple[str, str]:
    """Moment and operator of a tensor's key; both may have a slash in them."""
    rest = key.removeprefix("moment/")
    at = next(place for place, sign in enumerate(rest) if sign == "/" and rest[place + 1 :] in operators)
    return rest[:at], rest[at + 1 :]


def verify_memory_state(state: MemoryState) -> str | None:
    """What is wrong with a state; None where its hash matches."""
    try:
        with OpenState(state):
            return None
    except CheckpointError as error:
        return str(error)


def ages_in_memory(state: MemoryState) -> dict[str, int]:
    """Iteration of each operator in a state; nothing is verified. Empty where it is not there any more."""
    found = describe(state.path)
    if found is None or found[0] != state:
        return {}
    taken_at = found[1]["taken_at"]
    return {name: int(taken_at[part]) for name, (_, _, part) in found[1]["operators"].items()}


def holds_whole_operators(state: MemoryState) -> bool:
    """Whether a state has all elements of each of its operators; nothing is verified. False where it is gone."""
    found = describe(state.path)
    if found is None or found[0] != state:
        return False
    layout, operators = found[1]["layout"], found[1]["operators"]
    sizes = ((shape, layout[f"param/{name}"][2]) for name, (shape, _, _) in operators.items())
    return all(math.prod(whole) == math.prod(held) for whole, held in sizes)


def owned_word(shard: Shard) -> str:
    """Hash of the operators of a rank: names, slices, dtypes and every byte of weights and moments."""
    slices = {name: (one.parameter.global_shape, one.parameter.offset) for name, one in shard.operators.items()}
    tensors = {
        key: (dtype_name(values.dtype), tuple(values.shape), values.contiguous().reshape(-1).view(torch.uint8))
        for key, values in Shard(shard.operators).tensors()
    }
    return _owned_word(slices, tensors)


def owned_word_in_memory(state: MemoryState) -> str:
    """`owned_word` of a state in shared memory; reads all of it.

    Raises:
        CheckpointError: it is not whole any more.
    """
    with OpenState(state) as reading:
        return reading.owned_word()


class OpenState:
    """A state's file, mapped and verified; tensors are views of it while it is open.

    Args:
        state: as its file describes it.

    Raises:
        CheckpointError: it is not there any more, or damaged.
    """

    def __init__(self, state: MemoryState) -> None:
        self._state = state
        found = describe(state.path)
        if found is None or found[0] != state:
            raise CheckpointError(f"{state.path} does not hold iteration {state.iteration} any more")
        self._description, digest, (tensor_bytes, description_bytes, scalar_bytes) = found[1:]
        try:
            data = _mapped(state.path)
        except (OSError, ValueError) as error:  # mapping may fail for lack of memory, or the file may be truncated
            raise CheckpointError(f"{state.path} cannot be read: {error}") from error
        self._bytes = torch.frombuffer(data, dtype=torch.uint8)
        end = PAGE_BYTES + tensor_bytes
        description = data[end : end + description_bytes]
        self._saved = data[end + description_bytes : end + description_bytes + scalar_bytes]
        if digest_of(description, self._saved) != digest or not self._is_whole(tensor_bytes):
            raise CheckpointError(f"{state.path} (iteration {state.iteration}) is damaged: its hash does not hold")

    def __enter__(self) -> "OpenState":
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes

    def _is_whole(self, tensor_bytes: int) -> bool:
        """Whether the segments cover all bytes of the tensors, and the hash of each holds."""
        end, content = 0, self._bytes.numpy()[PAGE_BYTES : PAGE_BYTES + tensor_bytes]
        for (begin, after), digest in zip(self._description["segments"], self._description["hashes"], strict=True):
            if begin != end or xxhash.xxh3_128_hexdigest(content[begin:after].data) != digest:
                return False
            end = after
        return bool(end == tensor_bytes)

    def tensor(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """The tensor of that key, of the shape and type of `like`.

        Raises:
            CheckpointError: there is none.
        """
        offset, dtype, shape = self._description["layout"].get(key, (0, "nothing", []))
        if (dtype, tuple(shape)) != (dtype_name(like.dtype), tuple(like.shape)):
            raise CheckpointError(
                f"{self._state.path} holds {key} as {dtype} of shape {tuple(shape)}, this job has "
                f"{dtype_name(like.dtype)} of shape {tuple(like.shape)}: it is of another model or split over ranks"
            )
        start = PAGE_BYTES + int(offset)
        return self._bytes[start : start + like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def has(self, key: str) -> bool:
        """Whether there is a tensor of that key."""
        return key in self._description["layout"]

    def as_it_is(self, key: str) -> torch.Tensor:
        """The tensor of that key, of its own shape and type.

        Raises:
            CheckpointError: there is none.
        """
        if not self.has(key):
            raise CheckpointError(f"{self._state.path} holds no {key}")
        offset, dtype, shape = self._description["layout"][key]
        start, kind = PAGE_BYTES + int(offset), getattr(torch, dtype)
        return self._bytes[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)

    def owned_word(self) -> str:
        """See `owned_word`."""
        tensors = {}
        for key, (offset, dtype, shape) in self._description["layout"].items():
            if not key.startswith("other/"):
                start, size = PAGE_BYTES + offset, math.prod(shape) * getattr(torch, dtype).itemsize
                tensors[key] = dtype, tuple(shape), self._bytes[start : start + size]
        operators = self._description["operators"].items()
        return _owned_word({name: (tuple(shape), offset) for name, (shape, offset, _) in operators}, tensors)

    def taken_at(self, into: Shard) -> dict[str, int]:
        """Iteration of each of these operators.

        Raises:
            CheckpointError: a slice does not match.
        """
        found, taken_at = {}, self._description["taken_at"]
        for name, operator in into.operators.items():
            shape, offset, part = self._description["operators"].get(name, ([], 0, ""))
            if (tuple(shape), offset) != (operator.parameter.global_shape, operator.parameter.offset):
                raise CheckpointError(f"{self._state.path} holds another slice of {name}")
            found[name] = int(taken_at[part])
        return found

    def scalars(self) -> Any:
        """A decoded copy, outside shared memory.

        Raises:
            CheckpointError: they cannot be decoded.
        """
        try:
            tensors = load(bytes(self._saved))
            return decode(self._description["scalars"], tensors)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"the scalars of {self._state.path} cannot be decoded: {error!r}") from error


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _owned_word(
    slices: Mapping[str, tuple[tuple[int, ...], int]],
    tensors: Mapping[str, tuple[str, tuple[int, ...], torch.Tensor]],
) -> str:
    """Of the slices by operator, and by key of type, shape and bytes of each tensor."""
    state = xxhash.xxh3_128(repr(sorted(slices.items())).encode())
    for key, (dtype, shape, data) in sorted(tensors.items(), key=lambda item: item[0]):
        state.update(repr((key, dtype, shape)).encode())
        state.update(data.numpy().data)
    return state.hexdigest()
