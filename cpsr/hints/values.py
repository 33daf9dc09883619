"""Variables as plain data for the codec, with everything that two of them share.

Lists, mappings, tensors, arrays, random generators and iterators are numbered objects, and refer to each other by
number: two names of one list are two names of one list after a restart. The memory under tensors and arrays is saved in
blocks (see `cpsr.hints.memory`), so that views stay views.

Objects of the arguments come first, in the order in which they are met. Those that are as they were when the call
began are not saved: the call after a kill is given the same ones again. Others are restored in place.
"""

import json
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import xxhash
from torch import nn

from cpsr.errors import NotResumableError, UnsupportedEngineError
from cpsr.hints.memory import Block, Memory, UnsavableError
from cpsr.hints.plain import OBJECT, plain_value
from cpsr.hints.positions import Positions, is_iterator
from cpsr.hints.stateful import (
    fixed_description,
    is_fixed,
    is_stateful,
    seeds_of,
    state_of,
    stateful_description,
    tensors_of,
)
from cpsr.state.codec import encode
from cpsr.state.stateful import stateful

__all__ = ["GENERATORS", "Arguments", "Encoder", "read_arguments"]

GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
_ARRAY_KINDS = "biufcSUmM"


@dataclass(frozen=True)
class Arguments:
    """What a call was given: its objects and their memory as they were when it began.

    Attributes:
        objects: every object that can be reached from the arguments.
        names: of them, for messages.
        nodes: each of them, as text that tells it from what it may become.
        blocks: of their memory.
        digests: hash of each block.
        identity: hash of each argument, by name.
    """

    objects: list[Any]
    names: list[str]
    nodes: list[str]
    blocks: list[Block]
    digests: list[str]
    identity: dict[str, str]


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Look at the arguments of a call before it begins.

    Raises:
        NotResumableError: one is of a kind that cannot be saved; names it.
    """
    encoder = Encoder(None)
    identity: dict[str, str] = {}
    nodes: list[str] = []
    digests: list[str] = []
    for name, value in given.items():
        root = encoder.add(value, f"the argument '{name}'")
        new = [_text(node) for node in encoder.nodes(since=len(nodes))]
        more = [block.digest() for block in encoder.memory.blocks[len(digests) :]]
        identity[name] = xxhash.xxh3_128("\n".join([_text(root), *new, *more]).encode()).hexdigest()
        nodes, digests = nodes + new, digests + more
    encoder.check_memory()
    names = [encoder.name(number) for number in range(len(encoder.objects))]
    return Arguments(encoder.objects, names, nodes, encoder.memory.blocks, digests, identity)


class Encoder:
    """Numbers objects, and describes each by plain data.

    Args:
        arguments: of the call, whose objects and blocks come first; None: these are the arguments.

    Attributes:
        objects: in the order of their numbers.
        memory: under tensors and arrays.
    """

    def __init__(self, arguments: Arguments | None) -> None:
        self._arguments = arguments
        self.objects: list[Any] = list(arguments.objects) if arguments else []
        self.memory = Memory(arguments.blocks if arguments else None)
        # What refers to an object first: a name, or another object's number, and a key in it.
        self._owners: list[tuple[str | int, Any]] = [(name, None) for name in arguments.names] if arguments else []
        self._index = {id(one): number for number, one in enumerate(self.objects)}
        self._known = len(self.objects)
        # Memory of objects with a state of their own, which goes on elsewhere after a restart.
        self._foreign = {
            tensor.untyped_storage().data_ptr(): f"the argument of type {type(one).__name__}"
            for one in self.objects
            if is_stateful(one)
            for tensor in tensors_of(one)
        }

    def add(self, value: Any, name: str) -> Any:
        """The reference to a value: itself if it is plain, else by number.

        Raises:
            NotResumableError: it cannot be saved; names it.
        """
        try:
            return self._reference(value, name, None)
        except UnsavableError as error:
            raise NotResumableError(f"{name} cannot be saved: {error}") from None

    def name(self, number: int) -> str:
        """How the program comes to an object, for messages: `the argument 'rows'[3]`."""
        keys = ""
        owner: str | int = number
        while isinstance(owner, int):
            owner, key = self._owners[owner]
            keys = keys if key is None else f"[{str(key)[:80]}]{keys}"
        return owner + keys

    def nodes(self, since: int = 0) -> list[Any]:
        """What describes each object from this number on, and those that they refer to.

        Raises:
            NotResumableError: one cannot be saved; names it.
        """
        made: list[Any] = []
        while since + len(made) < len(self.objects):
            number = since + len(made)
            try:
                made.append(self._node(self.objects[number], number))
            except UnsavableError as error:
                raise NotResumableError(f"{self.name(number)} cannot be saved: {error}") from None
        return made

    def changed(self) -> dict[str, Any]:
        """All objects and blocks, with None for what is of the arguments and as it was.

        Raises:
            NotResumableError: one cannot be saved; names it.
        """
        nodes = self.nodes()
        self.check_memory()
        blocks: list[Any] = [block.bytes for block in self.memory.blocks]
        known = self._arguments
        if known is not None:
            for number, before in enumerate(known.nodes):
                if nodes[number][0] == "stateful":  # known by its description alone
                    continue
                text = _text(nodes[number])
                if text == before:
                    nodes[number] = None
                elif nodes[number][0] in ("tensor", "array"):
                    self._require_same_memory(number, text, before)
            for number, digest in enumerate(known.digests):
                if known.blocks[number].digest() == digest:
                    blocks[number] = None
        return {"objects": nodes, "blocks": [None if one is None else numpy.array(one) for one in blocks]}

    def check_memory(self) -> None:
        """Refuse memory that two values share in part alone, without being views of the same one."""
        if self.memory.overlapping() is not None:
            raise NotResumableError(
                "two of the variables or arguments share a part of their memory, as views of different things: copy one"
            )

    def _require_same_memory(self, number: int, text: str, before: str) -> None:
        """An argument is restored in the memory that it has."""
        now, then = (json.loads(one)[0]["items"][1] for one in (text, before))
        if any(now[key] != then[key] for key in ("block", "dtype", "shape", "strides", "offset")):
            raise NotResumableError(
                f"{self.name(number)} was given other memory or another shape in place, which the caller's own will "
                "not have after a restart: work on a copy"
            )

    def _reference(self, value: Any, owner: str | int, key: Any) -> Any:
        if type(value) is tuple:
            return ("tuple", [self._reference(one, owner, key) for one in value])
        plain = plain_value(value)
        return ("ref", self._number(value, owner, key)) if plain is OBJECT else plain

    def _number(self, value: Any, owner: str | int, key: Any) -> int:
        number = self._index.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
            self._owners.append((owner, key))
        return number

    def _node(self, value: Any, number: int) -> Any:
        kind = type(value)
        if kind is list:
            return ("list", [self._reference(one, number, index) for index, one in enumerate(value)])
        if kind in (dict, OrderedDict):
            pairs = [
                [self._reference(key, number, "a key"), self._reference(one, number, key)] for key, one in value.items()
            ]
            return ("dict" if kind is dict else "ordered", pairs)
        if kind in (torch.Tensor, nn.Parameter):
            return ("tensor", self._tensor(value, number))
        if kind is numpy.ndarray:
            return ("array", self._array(value))
        if kind in GENERATORS:
            bits = type(value.bit_generator).__name__ if kind is numpy.random.Generator else ""
            return ("generator", [kind.__name__, bits, stateful("", value).state_dict(), seeds_of(value)])
        if is_iterator(value):
            return self._iterator(value, number)
        return self._of_arguments(value, number)

    def _of_arguments(self, value: Any, number: int) -> Any:
        """What a call must be given again."""
        here = self._arguments is None or number < self._known
        if is_fixed(value) and here:
            return ("fixed", fixed_description(value))
        if is_stateful(value):
            if not here:
                raise UnsavableError(f"a {type(value).__name__} has to be an argument of the function: pass it")
            return ("stateful", _described(value) if self._arguments is None else state_of(value))
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
            "gradient": self._reference(value.grad, number, "its gradient"),
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
        if self._arguments is None:
            raise UnsavableError("the next call would be given an iterator that begins anew: pass what it goes over")
        if type(value) is Positions:
            return ("positions", [self._reference(value.source, number, None), value.view, value.state()])
        maker, arguments, *state = value.__reduce__()
        made = [self._reference(one, number, None) for one in arguments]
        return ("iterator", [maker.__name__, made, state[0] if state else None])


def _advice(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return "The order of a set differs from start to start: use dict.fromkeys(...)"
    return "Keep plain data in its place, pass it as an argument, or make it anew after each hint"


def _described(value: Any) -> Any:
    """What must be the same when the call begins again: the kind of an object, and its state, bit for bit."""
    try:
        data, tensors = encode(state_of(value))
    except UnsupportedEngineError as error:
        raise UnsavableError(str(error)) from None
    bits = {name: one.detach().contiguous().reshape(-1).view(torch.uint8) for name, one in tensors.items()}
    state = [data, {name: xxhash.xxh3_128(one.numpy().data).hexdigest() for name, one in bits.items()}]
    return [*stateful_description(value), json.dumps(state)]


def _text(node: Any) -> str:
    """A node as text; two are the same if their texts are."""
    data, tensors = encode(node)
    return json.dumps([data, {name: xxhash.xxh3_128(bytes(one.numpy())).hexdigest() for name, one in tensors.items()}])
