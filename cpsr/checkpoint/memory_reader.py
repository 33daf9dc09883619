"""Verifies and loads the states in shared memory."""

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import xxhash

from cpsr.checkpoint.assemble import Piece, Wanted, assemble, wanted_of
from cpsr.checkpoint.direct_file import hash_pieces
from cpsr.checkpoint.manifest import dtype_name
from cpsr.checkpoint.memory_states import Described, HeldOperator, MemoryState, describe, hash_of
from cpsr.checkpoint.parts import operator_of
from cpsr.checkpoint.ranges import WantedRange
from cpsr.checkpoint.tensor_file import NO_HEADER, PlacedTensor, TensorHeader
from cpsr.errors import CheckpointError, RunMismatchError
from cpsr.state.codec import decode
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = [
    "OpenState",
    "ages_in_memory",
    "fill",
    "load_states",
    "owned_word",
    "room_for_memory_state",
    "verify_memory_state",
]


def load_states(states: Sequence[MemoryState], into: Shard) -> Any:
    """Copy a rank's state into the views of `into`, whose operators get the iterations at which they were taken.

    Args:
        states: its snapshot; or another rank's with the same weights and moments, and its own small one behind it.
        into: views to be written.

    Returns:
        The small state of the last one.

    Raises:
        CheckpointError: a state is no longer whole, or is of another model or split, or the two do not belong together;
            `into` is unchanged.
    """
    with ExitStack() as opened:
        slabs = [opened.enter_context(OpenState(state)) for state in reversed(states)]
        small, whole = slabs[0], slabs[-1]
        if small is not whole and whole.owned_word() != states[-1].owned:
            paths = " and ".join(str(state.path) for state in states)
            raise CheckpointError(f"{paths} do not belong together: other weights or moments")
        scalars, taken_at = small.scalars(), whole.taken_at(into)
        if lacking := sorted({f"other/{name}" for name in into.others} - small.tensors.keys()):
            raise CheckpointError(f"{states[-1].path} holds no {lacking[0]}: it is of another model")
        fill(slabs, wanted_of(into))
    into.operators.update({name: replace(into.operators[name], iteration=at) for name, at in taken_at.items()})
    return scalars


def fill(slabs: Sequence["OpenState"], wanted: Mapping[str, Wanted]) -> None:
    """Fill tensors from states that are open; CheckpointError where one is in none of them, and nothing is written."""
    try:
        assemble(slabs, wanted, slabs[-1].state.path)
    except RunMismatchError as error:
        raise CheckpointError(str(error)) from error


def room_for_memory_state(state: MemoryState) -> Shard:
    """Host memory of its own for a state's tensors, of whatever rank and split; for `load_states`.

    Raises:
        CheckpointError: the state is not there any more, or its header is damaged.
    """
    found = _described(state)
    placed = {key: one for key, one in _tensors_in(found).items() if not key.startswith("small")}
    return _shard_of(found.operators, {key: torch.empty(one.shape, dtype=one.dtype) for key, one in placed.items()})


def _shard_of(held: Mapping[str, HeldOperator], tensors: Mapping[str, torch.Tensor]) -> Shard:
    """These tensors as what the state holds of each operator, and of the rest."""
    moments: dict[str, dict[str, torch.Tensor]] = {name: {} for name in held}
    for key, values in tensors.items():
        if key.startswith("moment/"):
            _, moment, name = key.split("/", 2)
            moments[name][moment] = values
    operators = {}
    for name, one in held.items():
        parameter = ParamSlice(tensors[f"param/{name}"], one.global_shape, one.offset, one.block)
        operators[name] = OperatorState(name, parameter, moments[name], one.iteration)
    prefix = "other/"
    return Shard(operators, {key.removeprefix(prefix): one for key, one in tensors.items() if key.startswith(prefix)})


def _described(state: MemoryState) -> Described:
    """What the state's file says; CheckpointError where it has another state by now."""
    found = describe(state.path)
    if found is None or found.state != state:
        raise CheckpointError(f"{state.path} does not hold iteration {state.iteration} any more")
    return found


def _tensors_in(found: Described) -> dict[str, PlacedTensor]:
    """Every tensor of a file but padding."""
    try:
        return {one.name: one for one in found.header.tensors() if not one.name.startswith("padding/")}
    except NO_HEADER as error:
        raise CheckpointError(f"the header of {found.state.path} is damaged: {error}") from error


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
    if found is None or found.state != state:
        return {}
    return {name: one.iteration for name, one in found.operators.items()}


def owned_word(shard: Shard) -> str:
    """Hash of the operators of a rank: names, slices, dtypes and every byte of weights and moments."""
    slices = sorted((name, _slice(one.parameter)) for name, one in shard.operators.items())
    state = xxhash.xxh3_128(repr(slices).encode())
    for key, values in sorted(Shard(shard.operators).tensors(), key=lambda item: item[0]):
        state.update(repr((key, dtype_name(values.dtype), tuple(values.shape))).encode())
        state.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


class OpenState:
    """A state's file, mapped and verified; tensors are views of it while it is open.

    Args:
        state: as its file describes it.

    Attributes:
        state: as given.
        operators: what it holds of each.
        tensors: where they lie in the file.

    Raises:
        CheckpointError: it is not there any more, or damaged.
    """

    def __init__(self, state: MemoryState) -> None:
        self.state = state
        found = _described(state)
        try:
            with state.path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # mapping may fail for lack of memory, or the file may be truncated
            raise CheckpointError(f"{state.path} cannot be read: {error}") from error
        self._bytes = torch.frombuffer(data, dtype=torch.uint8)
        content, header = memoryview(data), found.header.content
        # The header last: whoever overwrites the state changes it first.
        is_whole = _is_whole(found, content) and content[: len(header)] == header
        if not is_whole:
            raise CheckpointError(f"{state.path} (iteration {state.iteration}) is damaged: its hash does not hold")
        self.operators = found.operators
        self.tensors = _tensors_in(found)

    def __enter__(self) -> "OpenState":
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes

    def as_it_is(self, key: str) -> torch.Tensor:
        """The tensor of that key, of its own shape and type.

        Raises:
            CheckpointError: there is none.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.state.path} holds no {key}")
        one = self.tensors[key]
        return self._bytes[one.first : one.end].view(one.dtype).view(one.shape)

    def owned_word(self) -> str:
        """See `owned_word`."""
        return owned_word(_shard_of(self.operators, {key: self.as_it_is(key) for key in self.tensors}))

    def holds_whole_operators(self) -> bool:
        """Whether it has all elements of each of its operators."""
        held = self.operators.items()
        return all(math.prod(one.global_shape) == self.tensors[f"param/{name}"].numel for name, one in held)

    @property
    def rank(self) -> int:
        """That saved it."""
        return self.state.rank

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """By key; see `cpsr.checkpoint.assemble.Slab`."""
        found = {}
        for key, one in self.tensors.items():
            operator = operator_of(key)
            found[key] = Piece(one.shape, one.dtype, 0, one.numel)
            if operator and one.numel == self.tensors[f"param/{operator}"].numel:
                whole = self.operators[operator]
                found[key] = Piece(whole.global_shape, one.dtype, whole.offset, one.numel, whole.block)
        return found

    def read(self, wanted: Sequence[WantedRange]) -> int:
        """See `cpsr.checkpoint.assemble.Slab.read`; all of it was verified when it was opened."""
        for one in wanted:
            values = self.as_it_is(one.key).reshape(-1)
            one.target.copy_(values[one.start : one.start + one.target.numel()])
        return sum(one.target.nbytes for one in wanted)

    def taken_at(self, into: Shard) -> dict[str, int]:
        """Iteration of each of these operators.

        Raises:
            CheckpointError: a slice does not match.
        """
        for name, operator in into.operators.items():
            if name not in self.operators or _slice(self.operators[name]) != _slice(operator.parameter):
                raise CheckpointError(f"{self.state.path} holds another slice of {name}")
        return {name: self.operators[name].iteration for name in into.operators}

    def scalars(self) -> Any:
        """A decoded copy, outside shared memory.

        Raises:
            CheckpointError: they cannot be decoded.
        """
        image, tree = self.as_it_is("small/tensors"), self.as_it_is("small").numpy().tobytes()
        header = TensorHeader(len(image))
        try:
            header.take(image.numpy().data)
            return decode(json.loads(tree), {one.name: one.view(image).clone() for one in header.tensors()})
        except NO_HEADER as error:
            raise CheckpointError(
                f"the scalars of {self.state.path} cannot be decoded: {type(error).__name__}: {error}"
            ) from error


def _is_whole(found: Described, content: memoryview) -> bool:
    """Whether the segments cover the buffer, and all hashes hold."""
    index, buffer, end = found.index, content[found.header.end : found.size.bytes], 0
    if hash_of(found.header.content, content[found.size.bytes :]) != index.get("hash"):
        return False
    for (begin, after), digest in zip(json.loads(index["segments"]), json.loads(index["hashes"]), strict=True):
        if begin != end or hash_pieces(buffer[begin:after]).hex() != digest:
            return False
        end = after
    return end == len(buffer)


def _slice(one: ParamSlice | HeldOperator) -> tuple[object, ...]:
    """What of the whole parameter it is."""
    return tuple(one.global_shape), one.offset, one.block
