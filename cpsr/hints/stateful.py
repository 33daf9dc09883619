"""Arguments that a call is given again after a kill: objects with a state of their own, and what never changes."""

import random
import re
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from cpsr.hints.memory import UnsavableError

__all__ = ["CONSTANTS", "GENERATORS", "GLOBAL_GENERATORS", "bits_of", "code_of", "fixed_description", "is_fixed"]
__all__ += ["is_global_generator", "is_stateful", "load_state", "seeds_of", "spawn_to", "state_of"]
__all__ += ["stateful_description", "tensors_of"]

GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
# Those behind the functions of the modules, which every checkpoint has as the global random states.
_OF_MODULES: tuple[Any, ...] = (random.random, numpy.random.rand)
GLOBAL_GENERATORS: tuple[Any, ...] = (*(one.__self__ for one in _OF_MODULES), torch.default_generator)
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, EllipsisType)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def is_stateful(value: Any) -> bool:
    """Whether it has `state_dict` and `load_state_dict`."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_fixed(value: Any) -> bool:
    """Whether it is a function, a class or a module: without a state that a call could change and no checkpoint has."""
    if is_global_generator(value):
        return True
    if isinstance(value, BuiltinFunctionType | MethodType):  # of an object, it changes or shows the object
        owner = value.__self__
        known = isinstance(value, BuiltinFunctionType) and (owner is None or isinstance(owner, ModuleType | type))
        return known or is_global_generator(owner)
    return isinstance(value, FunctionType | type | ModuleType | numpy.ufunc)


def is_global_generator(value: Any) -> bool:
    """Whether it is one of the random generators behind the functions of Python's, NumPy's and torch's modules."""
    return any(value is one for one in GLOBAL_GENERATORS)


def bits_of(generator: Any) -> Any:
    """From what a random generator draws: itself, or a bit generator of NumPy, which others may share."""
    return getattr(generator, "bit_generator", getattr(generator, "_bit_generator", generator))


def fixed_description(value: Any) -> str:
    """What tells a function, a class or a module from another one.

    Raises:
        UnsavableError: a function keeps hold of variables of the function around it.
    """
    if isinstance(value, FunctionType):
        if value.__closure__:
            raise UnsavableError(f"it keeps hold of the variable '{value.__code__.co_freevars[0]}': pass that, too")
        return f"{value.__module__}.{value.__qualname__} {code_of(value)}"
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    return f"{type(value).__name__} {getattr(value, '__module__', '')}.{name}"


def code_of(function: FunctionType) -> str:
    """A function's code as text: what it does, without lines."""
    return repr((_code_text(function.__code__), _fixed(function.__defaults__), _fixed(function.__kwdefaults__)))


def _code_text(code: CodeType) -> Any:
    return code.co_code.hex(), code.co_names, code.co_varnames, tuple(map(_fixed, code.co_consts))


def _fixed(value: Any) -> Any:
    """A constant as something whose text is the same in every process."""
    if isinstance(value, CodeType):
        return _code_text(value)
    if isinstance(value, tuple | list):
        return [_fixed(one) for one in value]
    if isinstance(value, dict):
        return [[_fixed(key), _fixed(one)] for key, one in value.items()]
    if isinstance(value, frozenset | set):
        return sorted(repr(_fixed(one)) for one in value)
    return repr(value) if type(value) in CONSTANTS else type(value).__name__


def stateful_description(value: Any) -> Any:
    """What must be the same when a call begins again: type, settings, and shapes of tensors; these are restored.

    Raises:
        UnsavableError: a part of its state is not in host memory.
    """
    text = _ADDRESS.sub("", repr(value)) if isinstance(value, nn.Module) else ""
    if device := next((str(one.device) for one in tensors_of(value) if one.device.type != "cpu"), None):
        raise UnsavableError(f"it has tensors on {device}: only host memory is saved")
    state = [[name, _summary(one)] for name, one in _leaves(value.state_dict(), "")]
    return [f"{type(value).__module__}.{type(value).__qualname__}", text, state]


def _summary(value: Any) -> Any:
    return [str(value.dtype), list(value.shape)] if isinstance(value, torch.Tensor) else _fixed(value)


def state_of(value: Any) -> Any:
    """Everything of it that changes, as plain data and tensors; of a module also what `state_dict` leaves out."""
    if not isinstance(value, nn.Module):
        return value.state_dict()
    return {
        "state": dict(value.state_dict()),
        "buffers": dict(value.named_buffers()),
        "gradients": {name: one.grad for name, one in value.named_parameters()},
        "trained": [one.requires_grad for one in value.parameters()],
        "training": [one.training for one in value.modules()],
    }


def load_state(value: Any, state: Any) -> None:
    """Restore what `state_of` returned."""
    if not isinstance(value, nn.Module):
        value.load_state_dict(state)
        return
    value.load_state_dict(state["state"])
    with torch.no_grad():
        for name, buffer in value.named_buffers():
            buffer.copy_(state["buffers"][name])
    for (name, parameter), trained in zip(value.named_parameters(), state["trained"], strict=True):
        parameter.requires_grad_(trained)
        parameter.grad = state["gradients"][name]
    for module, training in zip(value.modules(), state["training"], strict=True):
        module.training = training


def seeds_of(generator: Any) -> Any:
    """What a generator of NumPy makes others from in `spawn`: entropy, key, size, and how many; None without any."""
    sequence = _sequence(generator)
    if sequence is None:
        return None
    entropy: Any = sequence.entropy
    whole = entropy if entropy is None or isinstance(entropy, int) else [int(one) for one in numpy.ravel(entropy)]
    return [whole, [int(one) for one in sequence.spawn_key], sequence.pool_size, sequence.n_children_spawned]


def spawn_to(generator: Any, seeds: Any) -> None:
    """Let it make as many others as `seeds_of` counted."""
    sequence = _sequence(generator)
    if sequence is not None and seeds is not None and seeds[3] > sequence.n_children_spawned:
        sequence.spawn(seeds[3] - sequence.n_children_spawned)


def _sequence(generator: Any) -> numpy.random.SeedSequence | None:
    bits = bits_of(generator)
    found = getattr(bits, "seed_seq", getattr(bits, "_seed_seq", None))
    return found if isinstance(found, numpy.random.SeedSequence) else None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in which its state lies."""
    if isinstance(value, nn.Module):
        for one in [*value.parameters(), *value.buffers()]:
            yield from (tensor for tensor in (one, one.grad if one.is_leaf else None) if tensor is not None)
    yield from (one for _, one in _leaves(value.state_dict(), "") if isinstance(one, torch.Tensor))


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{index}")
    else:
        yield name, tree
