"""Tokens that gates route to each expert, iteration by iteration; and how a plain torch model tells them."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.hooks import RemovableHandle

from cpsr.engines.hooks import ModuleHook
from cpsr.engines.moe.operators import (
    MODULE_LIST,
    ExpertLayer,
    ExpertParallel,
    ModelOperators,
    operators_of,
)
from cpsr.engines.naming import plain_name
from cpsr.errors import UnsupportedEngineError
from cpsr.state.device_values import DeviceValues

__all__ = ["Counted", "HookedTokenCounts", "MixtureOfExperts", "ModuleMixture", "PerExpert", "RoutingLayer"]
__all__ += ["per_expert", "zeros"]

# One array `(experts,)` of float64 for each layer of experts.
PerExpert = tuple[NDArray[numpy.float64], ...]


@dataclass(frozen=True)
class Counted:
    """What the gates did in one iteration.

    Attributes:
        iteration: number of the step.
        tokens: routed to each expert over all ranks that share the batch; for each layer, `(experts,)`.
    """

    iteration: int
    tokens: Sequence[NDArray[numpy.int64]]


@dataclass(frozen=True)
class RoutingLayer:
    """A layer whose gate shows where tokens went.

    Attributes:
        name: of the layer.
        module: whose forward routes; None where another rank has it, in another stage of a pipeline.
        experts: how many there are, on all ranks together.
    """

    name: str
    module: torch.nn.Module | None
    experts: int


# Tokens of one iteration by place of the layer: on the device, `(experts,)`.
_Sums = dict[int, torch.Tensor]


class HookedTokenCounts:
    """Adds up on the device what layers report after each training forward; the host waits for it in `take` alone.

    Counted is what is trained on: forwards between `begin_forward` and `end_iteration` of layers in training mode. Not
    counted are evaluations, and forwards that activation checkpointing repeats during a backward. Tokens
    that an expert has no room for are routed to it all the same.

    Between two calls of `take` the device holds 8 bytes for each expert and iteration.

    Args:
        layers: in the model's order.
        counts_of: how many of this rank's tokens a layer's last forward routed to each expert: integers, `(experts,)`.
        ranks: the process group that shares the batch; None where this process is alone.
        device: of the sums; None: that of the first layer's parameters.
        forwards_are_told: False where nobody calls `begin_forward`, as in a pipeline: then each forward of a layer in
            training mode counts.

    Raises:
        ValueError: there are no layers.
    """

    def __init__(
        self,
        layers: Sequence[RoutingLayer],
        counts_of: Callable[[torch.nn.Module], torch.Tensor],
        ranks: Any = None,
        device: torch.device | None = None,
        forwards_are_told: bool = True,
    ) -> None:
        if not layers:
            raise ValueError("the model has no layers of experts: there are no tokens to count")
        self._layers = tuple(layers)
        self._counts_of = counts_of
        self._ranks = ranks
        self._device = device
        self._counting = self._always = not forwards_are_told
        self._open: _Sums = {}
        self._ended: list[tuple[int, _Sums]] = []
        self._sent = 0  # of these, on their way for `local`
        self._is_followed = False  # by `local`
        self._on_way: deque[_Row] = deque()
        self._local = numpy.zeros(sum(layer.experts for layer in layers), dtype=numpy.int64)
        self._handles: list[RemovableHandle] = [
            layer.module.register_forward_hook(ModuleHook(partial(self._after_forward, place)))
            for place, layer in enumerate(self._layers)
            if layer.module is not None
        ]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Of the layers, in the model's order."""
        return tuple(layer.name for layer in self._layers)

    def begin_forward(self) -> None:
        """The model is about to be called for training: `StepObserver.on_forward`."""
        self._counting = True

    def end_iteration(self, iteration: int, applied: bool) -> None:
        """A step is complete: `StepObserver.after_step`.

        Args:
            iteration: its number.
            applied: False where it was skipped: no expert has learned from its tokens, and it is left out.
        """
        if applied:
            self._ended.append((iteration, self._open))
        self._drop_open()

    def take(self) -> list[Counted]:
        """Iterations that ended since the last call, oldest first; each is given once. The host waits for the device.

        A collective: the ranks that share the batch call it between the same two iterations.
        """
        if not self._ended:
            return []
        table = torch.stack([self._row(sums) for _, sums in self._ended])
        if self._ranks is not None:
            torch.distributed.all_reduce(table, group=self._ranks)
        ends = numpy.cumsum([layer.experts for layer in self._layers])[:-1]
        rows = zip(self._ended, table.cpu().numpy(), strict=True)
        taken = [Counted(iteration, numpy.split(row, ends)) for (iteration, _), row in rows]
        if self._is_followed:
            self._send()
        self._ended, self._sent = [], 0
        return taken

    def local(self) -> NDArray[numpy.int64]:
        """This rank's own tokens in all iterations so far, `(experts of all layers,)`; not a collective.

        Nothing waits: those that a device has still to send are in what a later call gives.
        """
        self._is_followed = True
        self._send()
        while self._on_way and self._on_way[0].here:
            self._local = self._local + self._on_way.popleft().values()
        return self._local

    def _send(self) -> None:
        self._on_way.extend(_Row(self._row(sums)) for _, sums in self._ended[self._sent :])
        self._sent = len(self._ended)

    def forget(self) -> None:
        """Drop what was not taken: the weights went back to an earlier iteration."""
        self._ended, self._sent = [], 0
        self._drop_open()

    def remove(self) -> None:
        """Take the hooks off; what was counted can still be taken."""
        while self._handles:
            self._handles.pop().remove()

    def _drop_open(self) -> None:
        self._counting, self._open = self._always, {}

    def _after_forward(self, place: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        # Inside a backward there is a graph task: this forward only repeats one that was counted.
        if not (self._counting and module.training) or torch._C._current_graph_task_id() != -1:
            return
        layer = self._layers[place]
        try:
            counts = self._counts_of(module)
        except Exception as error:
            error.add_note(
                f"counts_of was asked for the tokens of the experts of {layer.name!r}: if every token passes them, "
                "give MixtureOfExperts a naming that leaves them out"
            )
            raise
        if counts.shape != (layer.experts,):
            raise UnsupportedEngineError(
                f"layer {layer.name!r} reported the tokens of {tuple(counts.shape)} experts and has {layer.experts}; "
                "counts_of has to return one number for each expert over all ranks. This step was not trained"
            )
        tokens = counts.detach().to(torch.int64)
        if place in self._open:
            self._open[place] += tokens
        else:
            self._open[place] = tokens.clone()  # the layer may go on using its own

    def _row(self, sums: _Sums) -> torch.Tensor:
        """Tokens of all experts, layer by layer, `(experts of all layers,)`; 0 of a layer that was left out."""
        device = self._device or _device_of(self._layers)
        found = [
            sums[place].to(device) if place in sums else torch.zeros(layer.experts, dtype=torch.int64, device=device)
            for place, layer in enumerate(self._layers)
        ]
        return torch.cat(found)


class _Row:
    """Tokens of one iteration on their way to the host.

    Args:
        row: on the device, `(experts of all layers,)`.
    """

    def __init__(self, row: torch.Tensor) -> None:
        self._row, self._values = row, DeviceValues()
        self._index = self._values.accept(row)
        self._values.send()

    @property
    def here(self) -> bool:
        """Whether they are there; does not wait."""
        return self._values.here

    def values(self) -> NDArray[numpy.int64]:
        """On the host."""
        row = self._row if self._index is None else self._values.values()[self._index]
        found: NDArray[numpy.int64] = row.cpu().numpy()
        return found


def _device_of(layers: Sequence[RoutingLayer]) -> torch.device:
    return next(parameter for one in layers if one.module is not None for parameter in one.module.parameters()).device


@dataclass(frozen=True)
class MixtureOfExperts:
    """How to read a module's layers of experts; all ranks train it on a batch of their own.

    A layer is the module that `naming` takes for one, whether or not it knows the gate. What is called after each of
    its forwards must not wait for the device, and covers all experts, including those on other ranks.

    Attributes:
        counts_of: how many of this rank's tokens a layer's last forward routed to each expert: integers, `(experts,)`.
        naming: matches the names of experts' parameters; see `cpsr.engines.moe.operators.place_of`.
        expert_parallel: the group of ranks that share the experts, equally many each, whose names then have their
            numbers over all ranks; a group of one where each rank has all of them.
    """

    counts_of: Callable[[torch.nn.Module], torch.Tensor]
    naming: re.Pattern[str] = MODULE_LIST
    expert_parallel: ExpertParallel = field(default_factory=ExpertParallel)


class ModuleMixture:
    """The `Mixture` of a plain torch module.

    Args:
        module: whose layers are counted.
        names: of its parameters.
        experts: how they are read.
    """

    def __init__(self, module: torch.nn.Module, names: list[str], experts: MixtureOfExperts) -> None:
        self._module, self._names, self._experts = module, names, experts
        self.naming = experts.naming

    def operators(self) -> ModelOperators:
        """See `Mixture.operators`."""
        return operators_of(self._names, self._experts.naming, self._experts.expert_parallel)

    def token_counts(self) -> HookedTokenCounts:
        """See `Mixture.token_counts`.

        Raises:
            ValueError: no name of the module is an expert's.
        """
        modules = {plain_name(name): one for name, one in self._module.named_modules()}
        layers = self.operators().layers()
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        return HookedTokenCounts(
            [RoutingLayer(layer.name, modules[layer.name], layer.experts) for layer in layers],
            self._experts.counts_of,
            torch.distributed.group.WORLD if together and torch.distributed.get_world_size() > 1 else None,
        )

    def scale_capacity(self, layer: str, factor: float) -> bool:
        """False: how many tokens an expert takes is the module's own business."""
        return False


def per_expert(layers: Sequence[ExpertLayer], values: Sequence[ArrayLike], what: str) -> PerExpert:
    """One number for each expert, checked against the layers.

    Args:
        layers: of the model.
        values: for each layer, `(experts,)`.
        what: the numbers are, for the message.

    Raises:
        ValueError: layers or experts are missing, or a number is negative or not finite.
    """
    if len(values) != len(layers):
        raise ValueError(f"{what} of {len(values)} layers were given, and the model has {len(layers)}")
    arrays = tuple(numpy.array(value, dtype=numpy.float64) for value in values)
    for layer, array in zip(layers, arrays, strict=True):
        if array.shape != (layer.experts,):
            raise ValueError(f"{what} of layer {layer.name!r} have shape {array.shape}, not ({layer.experts},)")
        if not numpy.isfinite(array).all() or (array < 0).any():
            raise ValueError(f"{what} of layer {layer.name!r} must be finite and not negative: {array}")
    return arrays


def zeros(layers: Sequence[ExpertLayer]) -> PerExpert:
    """Nothing yet, of any expert."""
    return tuple(numpy.zeros(layer.experts) for layer in layers)
