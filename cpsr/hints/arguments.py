"""What a call is given: its arguments, and what it finds in its module.

The call after a kill is given the same again. So a variable that is one of these things, or holds one, refers to it by
its place: that of an object among all objects, and that of anything else among the leaves. A leaf has a place for each
time it is met, so that the places do not depend on which of two equal strings are one object.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from cpsr.errors import NotResumableError, UnsupportedEngineError
from cpsr.hints.memory import UnsavableError
from cpsr.hints.plain import OBJECT, plain_value
from cpsr.hints.stateful import fixed_description, is_fixed, is_stateful, state_of, stateful_description
from cpsr.hints.values import Arguments, Encoder, text_of
from cpsr.state.codec import encode

__all__ = ["read_arguments"]


def read_arguments(given: Mapping[str, Any], around: Mapping[str, Any] | None = None) -> Arguments:
    """Look at the arguments of a call before it begins.

    Args:
        given: the arguments, by name.
        around: what else the function can refer to, by words for messages; the same in every process.

    Raises:
        NotResumableError: one is of a kind that cannot be saved; names it.
    """
    reader = _Reader()
    identity = {name: reader.read(value, f"the argument '{name}'") for name, value in given.items()}
    reader.check_memory()
    reader.lenient = True
    places = [reader.read(value, name) for name, value in (around or {}).items()]
    digests = [block.digest() for block in reader.memory.blocks]
    found = Arguments(reader.objects, reader.owners, reader.leaves, reader.memory.blocks, digests, identity, places)
    encoder = Encoder(found)
    found.before.extend(None if one in reader.fixed else encoder.snapshot(one) for one in range(len(found.objects)))
    return found


class _Reader(Encoder):
    """Describes values by content: leaves and tuples are written where they are met.

    Attributes:
        lenient: take what cannot be saved as it is, without a look at what it holds.
        fixed: numbers of objects that stay as they are.
    """

    def __init__(self) -> None:
        super().__init__(Arguments([], [], [], [], [], {}, []))
        self.lenient = False
        self.fixed: set[int] = set()
        self._read = self._hashed = 0

    def read(self, value: Any, name: str) -> str:
        """The hash of a value, with everything in it that was not read before.

        Raises:
            NotResumableError: a part of it cannot be saved; names it.
        """
        texts = []
        begun = False
        try:
            texts.append(text_of(self._references([value], name, [None])))
            begun = True
            while self._read < len(self.objects):
                node = self._described(self.objects[self._read])
                if node[0] == "fixed":
                    self.fixed.add(self._read)
                texts.append(text_of(node))
                self._read += 1
        except UnsavableError as error:
            place = self.name(self._read) if begun else name
            raise NotResumableError(f"{place} cannot be saved: {error}") from None
        texts += [block.digest() for block in self.memory.blocks[self._hashed :]]
        self._hashed = len(self.memory.blocks)
        return xxhash.xxh3_128("\n".join(texts).encode()).hexdigest()

    def _references(self, values: Sequence[Any], owner: str | int, keys: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        waiting = list(zip(reversed(values), reversed(keys), strict=True))
        while waiting:
            value, key = waiting.pop()
            if type(value) is tuple:
                self.leaves.append(value)
                found.append(["tuple", len(value)])
                waiting += [(one, key) for one in reversed(value)]
            elif (plain := self._plain_value(value)) is OBJECT:
                known = self._index.get(id(value))
                found.append(["object", self._number(value, owner, key) if known is None else known])
            else:
                self.leaves.append(value)
                found.append(plain)
        return found

    def _plain_value(self, value: Any) -> Any:
        try:
            return plain_value(value)
        except UnsavableError:
            if not self.lenient:
                raise
            return OBJECT

    def _described(self, value: Any) -> Any:
        try:
            return self._node(value, self._read)
        except UnsavableError:
            if not self.lenient:
                raise
            return ("fixed", "")

    def _node(self, value: Any, number: int) -> Any:
        if is_fixed(value):
            return ("fixed", "" if self.lenient else fixed_description(value))
        return super()._node(value, number)

    def _other(self, value: Any) -> Any:
        if self.lenient:
            return ("fixed", "")
        if is_stateful(value):
            return ("stateful", _whole_state(value))
        return super()._other(value)

    def _iterator(self, value: Any, number: int) -> Any:
        raise UnsavableError("the next call would be given an iterator that begins anew: pass what it goes over")


def _whole_state(value: Any) -> Any:
    """What must be the same when the call begins again: the kind of an object, and its state, bit for bit."""
    try:
        data, tensors = encode(state_of(value))
    except UnsupportedEngineError as error:
        raise UnsavableError(str(error)) from None
    except RecursionError:
        raise UnsavableError("its state_dict holds values too deep within each other: keep them flat") from None
    bits = {name: one.detach().contiguous().reshape(-1).view(torch.uint8) for name, one in tensors.items()}
    state = [data, {name: xxhash.xxh3_128(one.numpy().data).hexdigest() for name, one in bits.items()}]
    return [*stateful_description(value), json.dumps(state)]
