"""A change of what any of many objects hold is noticed, by identity."""

from collections import deque
from typing import Any

import pytest

from cpsr.hints.held import Held


class Slotted:
    __slots__ = ("a",)


class Own:
    pass


def function(x: Any = (), *, y: Any = 1.5) -> Any:
    return x, y


def counter() -> Any:
    count = 0

    def inner() -> int:
        nonlocal count
        count += 1000
        return count

    return inner


CHANGES: dict[str, tuple[Any, Any]] = {
    "list": (lambda: [1.5], lambda one: one.append(1)),
    "equal item": (lambda: [1.5], lambda one: one.__setitem__(0, float("1.5"))),
    "order": (lambda: ["a", "b"], lambda one: one.reverse()),
    "deque": (deque, lambda one: one.append(1)),
    "set": (set, lambda one: one.add(1)),
    "empty mapping": (dict, lambda one: one.update(a=1)),
    "mapping": (lambda: {"a": 1}, lambda one: one.update(a=True)),
    "class": (lambda: type("C", (), {}), lambda one: setattr(one, "n", 1)),
    "object": (Own, lambda one: setattr(one, "n", 1)),
    "slots": (Slotted, lambda one: setattr(one, "a", 1)),
    "default": (lambda: function, lambda one: setattr(one, "__defaults__", (2,))),
    "keyword": (lambda: function, lambda one: one.__kwdefaults__.update(y=2.5)),
    "code": (lambda: function, lambda one: setattr(one, "__code__", (lambda x, *, y: 1).__code__)),
    "cell": (counter, lambda one: one()),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_noticed_until_it_is_remembered(kind: str) -> None:
    make, change = CHANGES[kind]
    held, one = Held(), make()
    for other in ([1, 2], one, {"k": 1}, (1,)):
        held.add(other)
    held.remember()
    assert held.is_unchanged()
    change(one)
    assert not held.is_unchanged()
    held.remember()
    assert held.is_unchanged()
