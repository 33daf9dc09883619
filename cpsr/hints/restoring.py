"""Variables from what `cpsr.hints.values` has saved, with everything that they shared."""

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from cpsr.hints.memory import Block
from cpsr.hints.plain import value_of_plain
from cpsr.hints.positions import MAKERS, Positions
from cpsr.hints.stateful import GENERATORS, load_state, spawn_to
from cpsr.hints.values import Arguments
from cpsr.state.stateful import stateful

__all__ = ["restored"]

_NO_ROWS: list[Any] = []
_EMPTY: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "ordered": OrderedDict}


def restored(saved: Mapping[str, Any], roots: Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """Variables by name; what was changed of the arguments is changed in place.

    Args:
        saved: what `Encoder.changed` returned.
        roots: the references to the variables.
        arguments: of this call, which are those of the one that was saved.
    """
    return _Decoder(saved, arguments).all(roots)


class _Decoder:
    def __init__(self, saved: Mapping[str, Any], arguments: Arguments) -> None:
        self._nodes = saved["objects"]
        self._objects: dict[int, Any] = dict(enumerate(arguments.objects))
        self._known = len(arguments.objects)
        leaves = [value_of_plain(*one) if type(one) is tuple else one for one in saved["leaves"]]
        self._leaves = [*arguments.leaves, *leaves]
        self._blocks = [self._block(number, one, arguments) for number, one in enumerate(saved["blocks"])]
        self._late: list[tuple[Any, Any, list[Any]]] = []  # iterators, where they are, and the list they go over

    def all(self, roots: Mapping[str, Any]) -> dict[str, Any]:
        for number, node in enumerate(self._nodes):
            if number >= self._known and node[0] in _EMPTY:
                self._objects[number] = _EMPTY[node[0]]()
        for number in range(len(self._nodes)):
            self._make(number)
        for number, node in enumerate(self._nodes):
            if node is not None:
                self._fill(self._objects[number], node)
        for iterator, position, rows in self._late:  # lists and mappings are filled by now
            # Python takes no position beyond the end of a list, where an iterator is once the list was shortened.
            length = len(rows)
            rows += [None] * (position + 1 - length if rows is not _NO_ROWS else 0)
            iterator.__setstate__(position)
            del rows[length:]
        return {name: self._value(number) for name, number in roots.items()}

    @staticmethod
    def _block(number: int, saved: Any, arguments: Arguments) -> Block:
        if number >= len(arguments.blocks):
            return Block.of_storage(torch.from_numpy(saved).clone().untyped_storage())
        block = arguments.blocks[number]
        if saved is not None:
            block.bytes[...] = saved
        return block

    def _value(self, number: int) -> Any:
        return self._objects[number] if number >= 0 else self._leaves[-1 - number]

    def _make(self, number: int) -> None:
        """Make an object, after those that it is made of."""
        waiting = [number]
        while waiting:
            number = waiting[-1]
            missing = [] if number in self._objects else [one for one in _parts(self._nodes[number]) if one >= 0]
            missing = [one for one in missing if one not in self._objects]
            waiting += missing
            if missing:
                continue
            waiting.pop()
            if number not in self._objects:
                self._objects[number] = self._made(*self._nodes[number])

    def _made(self, kind: str, content: Any) -> Any:
        if kind == "tuple":
            return tuple(map(self._value, content))
        if kind == "tensor":
            return self._tensor(content)
        if kind == "array":
            return self._array(content)
        if kind == "generator":
            return _generator(content[0], content[1], content[3])
        if kind == "positions":
            (source,), view, position = content
            given = [self._value(source)]
            made: Any = Positions(given[0], view)
        else:
            maker, arguments, position = content
            given = list(map(self._value, arguments))
            made = MAKERS[maker](*given)
        if position is not None:
            self._late.append((made, position, given[0] if type(given[0]) is list else _NO_ROWS))
        return made

    def _array(self, content: Mapping[str, Any]) -> Any:
        shape, dtype, block = content["shape"], content["dtype"], self._blocks[content["block"]]
        if not block.bytes.size:
            return numpy.empty(shape, dtype)
        return numpy.ndarray(shape, dtype, block.buffer(), content["offset"], content["strides"])

    def _tensor(self, content: Mapping[str, Any]) -> torch.Tensor:
        storage = self._blocks[content["block"]].storage()
        made = torch.empty(0, dtype=getattr(torch, content["dtype"]), device="cpu")
        made.set_(storage, content["offset"], content["shape"], content["strides"])
        return nn.Parameter(made, content["trained"]) if content["parameter"] else made

    def _fill(self, made: Any, node: Any) -> None:
        """Give an object what it holds."""
        kind, content = node
        if kind == "list":
            made[:] = map(self._value, content)
        elif kind in ("dict", "ordered"):
            made.clear()
            made.update(zip(*(map(self._value, one) for one in content), strict=True))
        elif kind == "tensor":
            made.requires_grad_(content["trained"])
            made.grad = self._value(*content["gradient"])
        elif kind == "array":
            made.flags.writeable = content["writeable"]
        elif kind == "generator":
            stateful("", made).load_state_dict(content[2])
            spawn_to(made, content[3])
        elif kind == "stateful":
            load_state(made, content)


def _parts(node: Any) -> Sequence[int]:
    """Numbers of what an object is made of, and not only filled with."""
    kind, content = node
    if kind == "tuple":
        return content  # type: ignore[no-any-return]  # plain data
    return content[0] if kind == "positions" else content[1] if kind == "iterator" else ()


def _generator(name: str, bits: str, seeds: Any) -> Any:
    if bits:
        seed = numpy.random.SeedSequence(seeds[0], spawn_key=seeds[1], pool_size=seeds[2]) if seeds else 0
        return numpy.random.Generator(getattr(numpy.random, bits)(seed))
    made: Any = {one.__name__: one for one in GENERATORS if one is not numpy.random.Generator}[name]
    return made(0) if made is random.Random or made is numpy.random.RandomState else made()
