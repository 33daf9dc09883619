"""Variables as plain data for the codec, with everything that two of them share.

Every value has a number, by which others refer to it: two names of one list are two names of one list after a restart,
and a NaN is found again in a list that holds it. Objects that may change, and tuples, have numbers from 0 on. The rest
are leaves, with numbers from -1 down. Nothing is nested in what is written, however deep the values are. The memory
under tensors and arrays is saved in blocks (see `cpsr.hints.memory`), so that views stay views.

What the call was given comes first (see `cpsr.hints.arguments`). Objects of it that are as they were when it began are
not saved: the call after a kill is given the same ones again. Others are restored in place.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

from cpsr.errors import NotResumableError
from cpsr.hints.attributes import Attributes
from cpsr.hints.memory import Block, Memory, UnsavableError
from cpsr.hints.plain import OBJECT, plain_value
from cpsr.hints.positions import Positions, is_iterator
from cpsr.hints.stateful import GENERATORS, GLOBAL_GENERATORS, bits_of, is_stateful, seeds_of, state_of, tensors_of
from cpsr.state.codec import encode
from cpsr.state.stateful import stateful

__all__ = ["Arguments", "Encoder", "text_of"]

_ARRAY_KINDS = "biufcSUmM"
_KEYS_MAX, _KEY_MAX = 8, 80  # keys in the name of an object, and characters of each


@dataclass(frozen=True)
class Arguments:
    """What a call was given, and what it finds in its module, as they were when it began.

    Attributes:
        objects: every object that can be reached.
        owners: of them, for messages: a name, or another object's number, and a key in it.
        leaves: what never changes, and tuples, at each place where they were met.
        blocks: memory of the objects.
        digests: hash of each block.
        identity: hash of each argument, by name.
        places: hash of everything else, with what of it is in the arguments.
        before: of each object, its items, text or attributes, which tell whether it has changed; None: it cannot.
    """

    objects: list[Any]
    owners: list[tuple[str | int, Any]]
    leaves: list[Any]
    blocks: list[Block]
    digests: list[str]
    identity: dict[str, str]
    places: list[str]
    before: list[Any] = field(default_factory=list)

    @cached_property
    def numbers(self) -> dict[int, int]:
        """By identity, the numbers of leaves and objects."""
        return {id(one): -1 - place for place, one in enumerate(self.leaves)} | {
            id(one): number for number, one in enumerate(self.objects)
        }


class Encoder:
    """Numbers values, and describes each by plain data.

    Args:
        arguments: of the call, whose objects, leaves and blocks come first.

    Attributes:
        objects: in the order of their numbers.
        owners: what refers to each object first.
        leaves: in the order of their numbers, from -1 down; without those of the arguments.
        memory: under tensors and arrays.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.objects: list[Any] = list(arguments.objects)
        self.leaves: list[Any] = []
        self._plain: list[Any] = []  # the same, for the codec
        self.memory = Memory(arguments.blocks)
        self._known = len(self.objects)
        self.owners = list(arguments.owners)
        self._given = arguments.numbers
        self._index: dict[int, int] = {}
        self._bits = {id(bits_of(one)): -1 for one in GLOBAL_GENERATORS}  # what draws from what
        # Memory of objects with a state of their own, which goes on elsewhere after a restart.
        self._foreign = {
            tensor.untyped_storage().data_ptr(): f"the argument of type {type(one).__name__}"
            for one in self.objects
            if is_stateful(one)
            for tensor in tensors_of(one)
        }

    def add(self, value: Any, name: str) -> int:
        """The number of a value.

        Raises:
            NotResumableError: it cannot be saved; names it.
        """
        try:
            number: int = self._references([value], name, [None])[0]
        except UnsavableError as error:
            raise NotResumableError(f"{name} cannot be saved: {error}") from None
        return number

    def name(self, number: int) -> str:
        """How the program comes to an object, for messages: `the argument 'rows'[3]`."""
        keys: list[str] = []
        owner: str | int = number
        while isinstance(owner, int):
            owner, key = self.owners[owner]
            keys += [] if key is None else [f"[{str(key)[:_KEY_MAX]}]"]
        keys = keys if len(keys) <= _KEYS_MAX else [*keys[: _KEYS_MAX - 1], "[...]", keys[-1]]
        return owner + "".join(reversed(keys))

    def nodes(self) -> list[Any]:
        """What describes each object; None: it is of the arguments, and as it was.

        Raises:
            NotResumableError: one cannot be saved; names it.
        """
        made: list[Any] = []
        while len(made) < len(self.objects):
            number = len(made)
            try:
                new = number >= self._known
                made.append(self._node(self.objects[number], number) if new else self._changed(number))
            except UnsavableError as error:
                raise NotResumableError(f"{self.name(number)} cannot be saved: {error}") from None
        return made

    def changed(self) -> dict[str, Any]:
        """All objects, leaves and blocks, but for what is of the arguments and as it was.

        Raises:
            NotResumableError: one cannot be saved; names it.
        """
        nodes = self.nodes()
        self.check_memory()
        blocks: list[Any] = [block.bytes for block in self.memory.blocks]
        for number, digest in enumerate(self._arguments.digests):
            if self.memory.blocks[number].digest() == digest:
                blocks[number] = None
        return {
            "objects": nodes,
            "leaves": self._plain,
            "blocks": [None if one is None else numpy.array(one) for one in blocks],
        }

    def check_memory(self) -> None:
        """Refuse memory that two values share in part alone, without being views of the same one."""
        if self.memory.overlapping() is not None:
            raise NotResumableError(
                "two of the variables or arguments share a part of their memory, as views of different things: copy one"
            )

    def snapshot(self, number: int) -> Any:
        """What tells an object of the arguments from what it may become.

        Raises:
            NotResumableError: it cannot be saved; names it.
        """
        value = self.objects[number]
        if (items := _items(value)) is not None:
            return items
        if is_stateful(value):
            return Attributes(value)
        try:
            return text_of(self._node(value, number))
        except UnsavableError as error:
            raise NotResumableError(f"{self.name(number)} cannot be saved: {error}") from None

    def _changed(self, number: int) -> Any:
        """The node of an object of the arguments; None if it is as it was."""
        value, before = self.objects[number], self._arguments.before[number]
        if before is None:
            return None
        if is_stateful(value):
            before.require_same()
            return ("stateful", state_of(value))
        if (items := _items(value)) is not None:
            same = len(items) == len(before) and all(map(is_, items, before))
            return None if same else self._node(value, number)
        node = self._node(value, number)
        if (text := text_of(node)) == before:
            return None
        if node[0] in ("tensor", "array"):
            self._require_same_memory(number, text, before)
        return node

    def _require_same_memory(self, number: int, text: str, before: str) -> None:
        """An argument is restored in the memory that it has."""
        now, then = (json.loads(one)[0]["items"][1] for one in (text, before))
        if any(now[key] != then[key] for key in ("block", "dtype", "shape", "strides", "offset")):
            raise NotResumableError(
                f"{self.name(number)} was given other memory or another shape in place, which the caller's own will "
                "not have after a restart: work on a copy"
            )

    def _references(self, values: Sequence[Any], owner: str | int, keys: Sequence[Any]) -> list[Any]:
        """The numbers of values, to which a name or an object refers by keys."""
        found: list[Any] = list(map(self._given.get, map(id, values)))
        for place, number in enumerate(found):
            if number is None:
                value = values[place]
                known = self._index.get(id(value))
                found[place] = self._number(value, owner, keys[place]) if known is None else known
        return found

    def _number(self, value: Any, owner: str | int, key: Any) -> int:
        """The number of a value that had none yet."""
        plain = OBJECT if type(value) is tuple else plain_value(value)
        if plain is OBJECT:
            number = len(self.objects)
            self.objects.append(value)
            self.owners.append((owner, key))
        else:
            self.leaves.append(value)
            self._plain.append(plain)
            number = -len(self._arguments.leaves) - len(self.leaves)
        self._index[id(value)] = number
        return number

    def _node(self, value: Any, number: int) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return (kind.__name__, self._references(value, number, range(len(value))))
        if kind in (dict, OrderedDict):
            keys = list(value)
            held = self._references(list(value.values()), number, keys)
            return (
                "dict" if kind is dict else "ordered",
                [self._references(keys, number, ["a key"] * len(keys)), held],
            )
        if kind in (torch.Tensor, nn.Parameter):
            return ("tensor", self._tensor(value, number))
        if kind is numpy.ndarray:
            return ("array", self._array(value))
        if kind in GENERATORS:
            if self._bits.setdefault(id(bits_of(value)), number) != number:
                raise UnsavableError(
                    "it draws from the bit generator of another random generator, and would have its own after a "
                    "restart: give each its own, by spawn() say"
                )
            bits = type(value.bit_generator).__name__ if kind is numpy.random.Generator else ""
            return ("generator", [kind.__name__, bits, stateful("", value).state_dict(), seeds_of(value)])
        if is_iterator(value):
            return self._iterator(value, number)
        return self._other(value)

    def _other(self, value: Any) -> Any:
        """The node of an object that is no plain data."""
        if is_stateful(value):
            raise UnsavableError(f"a {type(value).__name__} has to be an argument of the function: pass it")
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsavableError(
            f"{name} is not plain data (numbers, strings, bytes, lists, tuples, dicts, tensors, arrays, random "
            f"generators). {_advice(value)}"
        )

    def _tensor(self, value: torch.Tensor, number: int) -> dict[str, Any]:
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
            raise UnsavableError(f"it is of {value.device}, {value.layout}: only dense ones in host memory are saved")
        if value.grad_fn is not None:
            raise UnsavableError("it still has the graph of a backward: detach() it, or del it before the hint")
        if value.is_conj() or value.is_neg():
            raise UnsavableError("it is a lazy conjugate: resolve_conj() or resolve_neg() first")
        block = self._own(self.memory.of_tensor(value.detach()))
        return {
            "block": block,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "offset": value.storage_offset(),
            "trained": value.requires_grad,
            "parameter": type(value) is nn.Parameter,
            "gradient": self._references([value.grad], number, ["its gradient"]),
        }

    def _array(self, value: Any) -> dict[str, Any]:
        if value.dtype.kind not in _ARRAY_KINDS:
            raise UnsavableError(f"it is of {value.dtype}: only numbers, dates and strings of one length are saved")
        block, offset = self.memory.of_array(value)
        return {
            "block": self._own(block),
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "strides": list(value.strides),
            "offset": offset,
            "writeable": bool(value.flags.writeable),
        }

    def _own(self, number: int) -> int:
        """The number of a block that is nobody else's."""
        block = self.memory.blocks[number]
        if len(block.bytes) and block.address in self._foreign:
            raise UnsavableError(
                f"it shares its memory with {self._foreign[block.address]}: take it from there after each hint"
            )
        return number

    def _iterator(self, value: Any, number: int) -> Any:
        if type(value) is Positions:
            return ("positions", [self._references([value.source], number, [None]), value.view, value.state()])
        maker, arguments, *state = value.__reduce__()
        made = self._references(arguments, number, [None] * len(arguments))
        return ("iterator", [maker.__name__, made, state[0] if state else None])


def text_of(node: Any) -> str:
    """A node as text; two are the same if their texts are."""
    data, tensors = encode(node)
    return json.dumps([data, {name: xxhash.xxh3_128(bytes(one.numpy())).hexdigest() for name, one in tensors.items()}])


def _items(value: Any) -> list[Any] | None:
    """What a list or a mapping holds; None for anything else."""
    if type(value) in (dict, OrderedDict):
        return [*value, *value.values()]
    return list(value) if type(value) is list else None


def _advice(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return "The order of a set differs from start to start: use dict.fromkeys(...)"
    return "Keep plain data in its place, pass it as an argument, or make it anew after each hint"
