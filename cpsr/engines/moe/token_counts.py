"""Tokens that gates route to each expert, iteration by iteration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from cpsr.engines.hooks import ModuleHook
from cpsr.engines.moe.measures import Routed
from cpsr.errors import UnsupportedEngineError

__all__ = ["Counted", "HookedTokenCounts", "ProbabilitiesOf", "RoutingLayer", "TokenCounts"]

ProbabilitiesOf = Callable[[torch.nn.Module, tuple[Any, ...]], torch.Tensor]


@dataclass(frozen=True)
class Counted:
    """What the gates did in one iteration.

    Attributes:
        iteration: that this step was.
        routed: over all ranks that share the batch.
    """

    iteration: int
    routed: Routed


class TokenCounts(Protocol):
    """What policies and accounts read of a model with layers of experts, whoever counts."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Of the layers, in the model's order, which is that of `ModelOperators.layer_names`."""

    def take(self) -> list[Counted]:
        """Iterations that ended since the last call, oldest first; each is given once.

        A collective: the ranks that share the batch call it between the same two iterations.
        """


@dataclass(frozen=True)
class RoutingLayer:
    """A layer whose gate shows where tokens went.

    Attributes:
        name: of the layer.
        module: whose forward routes; None where another rank has it, in another stage of a pipeline.
        experts: how many there are, on all ranks together.
        capacity_factor: most tokens that an expert takes, over its equal part of them.
    """

    name: str
    module: torch.nn.Module | None
    experts: int
    capacity_factor: float = 1.0


@dataclass
class _Sums:
    """Of one iteration, by place of the layer: on the device, `(experts,)`."""

    tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    probabilities: dict[int, torch.Tensor] = field(default_factory=dict)


class HookedTokenCounts:
    """Adds up on the device what layers report after each training forward; the host waits for it in `take` alone.

    Counted is what is trained on: forwards between `begin_forward` and `end_iteration` of layers in training mode. Not
    counted are evaluations, and forwards that activation checkpointing repeats during a backward. Tokens
    that an expert has no room for are routed to it all the same.

    Between two calls of `take` the device holds 8 bytes for each expert and iteration, and 8 more with probabilities.

    Args:
        layers: in the model's order.
        counts_of: how many of this rank's tokens a layer's last forward routed to each expert: integers, `(experts,)`.
        ranks: the process group that shares the batch; None where this process is alone.
        probabilities_of: given a layer and the arguments of its last forward: each expert's gating probability, summed
            over this rank's tokens, `(experts,)`; None where nobody needs them.
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
        probabilities_of: ProbabilitiesOf | None = None,
        device: torch.device | None = None,
        forwards_are_told: bool = True,
    ) -> None:
        if not layers:
            raise ValueError("the model has no layers of experts: there are no tokens to count")
        self._layers = tuple(layers)
        self._counts_of = counts_of
        self._probabilities_of = probabilities_of
        self._ranks = ranks
        self._device = device
        self._counting = self._always = not forwards_are_told
        self._open = _Sums()
        self._ended: list[tuple[int, _Sums]] = []
        self._handles: list[RemovableHandle] = [
            layer.module.register_forward_hook(ModuleHook(partial(self._after_forward, place)))
            for place, layer in enumerate(self._layers)
            if layer.module is not None
        ]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Of the layers, in the model's order."""
        return tuple(layer.name for layer in self._layers)

    @property
    def capacity_factors(self) -> tuple[float, ...]:
        """Of the layers, as they were when counting began."""
        return tuple(layer.capacity_factor for layer in self._layers)

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
        """See `TokenCounts.take`; the host waits for the device here."""
        if not self._ended:
            return []
        sums = [one for _, one in self._ended]
        tokens = self._reduced([self._row(one.tokens, torch.int64) for one in sums])
        shown = None
        if self._probabilities_of is not None:
            shown = self._reduced([self._row(one.probabilities, torch.float64) for one in sums])
        ends = numpy.cumsum([layer.experts for layer in self._layers])[:-1]
        taken = []
        for place, (iteration, _) in enumerate(self._ended):
            probabilities = None if shown is None else numpy.split(shown[place], ends)
            taken.append(Counted(iteration, Routed(numpy.split(tokens[place], ends), probabilities)))
        self._ended = []
        return taken

    def _reduced(self, rows: list[torch.Tensor]) -> NDArray[Any]:
        """Sums over all ranks, `(iterations, experts of all layers)`."""
        table = torch.stack(rows)
        if self._ranks is not None:
            torch.distributed.all_reduce(table, group=self._ranks)
        return table.cpu().numpy()

    def forget(self) -> None:
        """Drop what was not taken: the weights went back to an earlier iteration."""
        self._ended = []
        self._drop_open()

    def remove(self) -> None:
        """Take the hooks off; what was counted can still be taken."""
        while self._handles:
            self._handles.pop().remove()

    def _drop_open(self) -> None:
        self._counting, self._open = self._always, _Sums()

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
        _add(self._open.tokens, place, counts.detach().to(torch.int64))
        if self._probabilities_of is not None:
            with torch.no_grad():
                probabilities = self._probabilities_of(module, args)
            _add(self._open.probabilities, place, probabilities.detach().to(torch.float64))

    def _row(self, found: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Numbers of all experts, layer by layer, `(experts of all layers,)`; 0 of a layer that was left out."""
        device = self._device or _device_of(self._layers)
        none = {
            place: torch.zeros(layer.experts, dtype=dtype, device=device) for place, layer in enumerate(self._layers)
        }
        return torch.cat([one.to(device) for one in (none | found).values()])


def _device_of(layers: Sequence[RoutingLayer]) -> torch.device:
    return next(parameter for one in layers if one.module is not None for parameter in one.module.parameters()).device


def _add(sums: dict[int, torch.Tensor], place: int, values: torch.Tensor) -> None:
    if place in sums:
        sums[place] += values
    else:
        sums[place] = values.clone()  # the layer may go on using its own
