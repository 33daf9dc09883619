"""What a step begins with: the calls of the module by the loop, and the gradients of its outputs."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from cpsr.engines.module_attributes import ModuleAttributes

__all__ = ["Forward", "Inputs", "RecordedLoss", "autocast_of", "copied", "enter_autocast"]

# By kind of device: whether, in which dtype, and with a cache.
Autocast = Sequence[tuple[str, bool, str, bool]]


@dataclass(eq=False)
class Forward:
    """One call of the module: its inputs, and what its backward began with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: dict[str, Any]
    attributes: ModuleAttributes | None  # of the modules; None: of another rank, whose are not sent
    autocast: Autocast
    reduces: bool | None  # whether the backward of this call reduces gradients; None: the engine decides
    random_after: dict[str, Any] | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # of its outputs, by number


@dataclass(eq=False)
class Inputs:
    """What a step began with: the calls of the module, and the gradients of its outputs."""

    forwards: Sequence[Forward]
    events: Sequence[tuple[str, Any]]

    def to_tree(self) -> dict[str, Any]:
        """Plain data and tensors on the host."""
        forwards = [{**vars(one), "attributes": None} for one in self.forwards]
        tree = {"forwards": forwards, "events": [list(one) for one in self.events]}
        found: dict[str, Any] = tree_map_only(torch.Tensor, lambda one: one.detach().cpu(), tree)
        return found

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], device: torch.device) -> "Inputs":
        """What `to_tree` returned, with the inputs on this device."""
        moved = tree_map_only(torch.Tensor, lambda one: one.to(device), [one["args"] for one in tree["forwards"]])
        named = tree_map_only(torch.Tensor, lambda one: one.to(device), [one["kwargs"] for one in tree["forwards"]])
        forwards = [
            Forward(**{**one, "args": tuple(args), "kwargs": kwargs})
            for one, args, kwargs in zip(tree["forwards"], moved, named, strict=True)
        ]
        return cls(forwards, [(kind, what) for kind, what in tree["events"]])


def copied(inputs: Any) -> Any:
    """The same inputs in memory of their own, without a graph."""

    def copy_of(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return one.detach().clone()
        return one if one is None or isinstance(one, int | float | str | bytes) else copy.deepcopy(one)

    return tree_map(copy_of, inputs)


def autocast_of(device: str) -> Autocast:
    """The contexts that the loop has entered."""
    cached = torch.is_autocast_cache_enabled()
    kinds = sorted({"cpu", device})
    return [(kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)), cached) for kind in kinds]


def enter_autocast(contexts: ExitStack, found: Autocast) -> None:
    """Enter what `autocast_of` found."""
    for kind, enabled, dtype, cached in found:
        contexts.enter_context(torch.autocast(kind, getattr(torch, dtype.removeprefix("torch.")), enabled, cached))


class RecordedLoss(torch.autograd.Function):
    """A loss whose backward gives its inputs the gradients that were recorded."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        """Zero: its backward alone matters."""
        ctx.gradients = gradients
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """The recorded gradients."""
        return None, *ctx.gradients
