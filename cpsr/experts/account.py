"""What failures take from experts: lost tokens, and the layers with more capacity until these are made up."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.adapter import Mixture
from cpsr.engines.moe.operators import ExpertLayer
from cpsr.engines.moe.token_counts import PerExpert, per_expert, zeros

__all__ = ["ExpertAccount", "Loss", "LostTokens", "Recovering"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loss:
    """What one recovery took from experts.

    Attributes:
        lost: tokens of each expert, for each layer `(experts,)`.
        routed: tokens of each expert in the whole run, likewise.
    """

    lost: PerExpert
    routed: PerExpert

    @property
    def assigned(self) -> list[float]:
        """Tokens of each layer in the whole run."""
        return [float(layer.sum()) for layer in self.routed]

    @property
    def missed(self) -> float:
        """Lost tokens of all layers."""
        return sum(float(layer.sum()) for layer in self.lost)

    @property
    def portion(self) -> float:
        """Lost tokens over all tokens of the run."""
        return self.missed / sum(self.assigned) if self.missed else 0.0


class LostTokens:
    """Tokens whose updates experts lost for good in the failures of one run.

    They are compared with `assigned`: for each layer, input tokens times experts per token (T x TopK) over the
    training, each iteration once even if it was repeated. It includes tokens that experts dropped for lack of capacity.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers
        self._lost = zeros(layers)

    def add(self, lost: Sequence[ArrayLike]) -> None:
        """Add one failure: for each layer, `(experts,)` tokens that were not made up."""
        new = per_expert(self._layers, lost, "lost tokens")
        self._lost = tuple(old + more for old, more in zip(self._lost, new, strict=True))

    def state_dict(self) -> list[list[float]]:
        """Tokens that each expert has lost, layer by layer."""
        return [layer.tolist() for layer in self._lost]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on from `state_dict()`.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        self._lost = per_expert(self._layers, state, "lost tokens")

    def by_layer(self, assigned: Sequence[float]) -> NDArray[numpy.float64]:
        """Fraction of each layer's tokens that was lost, `(layers,)`; their sum is the momentary loss (moetion, Eq. 6).

        Raises:
            ValueError: more was lost than assigned, or `assigned` is not finite or does not fit the layers.
        """
        lost, whole = self._compared(assigned)
        return numpy.divide(lost, whole, out=numpy.zeros_like(lost), where=whole > 0)

    def portion(self, assigned: Sequence[float]) -> float:
        """Lost tokens of all failures and layers, over those assigned in all layers; 0 before any was assigned.

        Raises:
            ValueError: as `by_layer`.

        Source: pec, Eq. 4.
        """
        lost, whole = self._compared(assigned)
        return float(lost.sum() / whole.sum()) if whole.any() else 0.0

    def _compared(self, assigned: Sequence[float]) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        whole = numpy.asarray(assigned, dtype=numpy.float64)
        lost = numpy.array([layer.sum() for layer in self._lost])
        if whole.shape != lost.shape or not numpy.isfinite(whole).all() or not (lost <= whole).all():
            raise ValueError(f"layers lost {lost} of {whole} tokens: `assigned` is of the whole run, T x TopK a layer")
        return lost, whole


class Recovering:
    """Which experts take more tokens than others, and for how long.

    While its capacity is raised by a fraction, an expert is assumed to process that fraction more. Its loss is made up
    when this fraction of the tokens routed to it since then equals the lost tokens.

    Args:
        layers: of the model.
        fraction: by which capacity is raised, the paper's 10% by default; 0: nothing recovers.

    Source: moetion, section 6, "Resuming Training from Failures".
    """

    def __init__(self, layers: Sequence[ExpertLayer], fraction: float = 0.1) -> None:
        self._layers = layers
        self._fraction = fraction
        self._missing = zeros(layers)

    @property
    def in_layers(self) -> tuple[bool, ...]:
        """For each layer, whether one of its experts recovers."""
        return tuple(bool(layer.any()) for layer in self._missing)

    def lost(self, tokens: Sequence[ArrayLike]) -> None:
        """Add one failure: for each layer, `(experts,)` tokens."""
        if self._fraction > 0:
            more = per_expert(self._layers, tokens, "lost tokens")
            self._missing = tuple(old + new for old, new in zip(self._missing, more, strict=True))

    def observe(self, tokens: Sequence[ArrayLike]) -> None:
        """Add the tokens routed since then: for each layer, `(experts,)`."""
        routed = per_expert(self._layers, tokens, "tokens")
        self._missing = tuple(
            numpy.maximum(old - self._fraction * new, 0.0) for old, new in zip(self._missing, routed, strict=True)
        )

    def state_dict(self) -> list[list[float]]:
        """Missing tokens, layer by layer."""
        return [layer.tolist() for layer in self._missing]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on from `state_dict()`.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        missing = per_expert(self._layers, state, "tokens to make up")
        self._missing = missing if self._fraction > 0 else zeros(self._layers)


class ExpertAccount:
    """Counts the tokens that recoveries take from experts, and gives their layers more capacity until they are made up.

    Args:
        mixture: of the engine.
        layers: of the model.
        capacity_fraction: by which the capacity of a layer with recovering experts is raised.
    """

    def __init__(self, mixture: Mixture, layers: Sequence[ExpertLayer], capacity_fraction: float) -> None:
        self._mixture = mixture
        self._layers = tuple(layers)
        self._more_capacity = capacity_fraction
        self._lost = LostTokens(self._layers)
        self._recovering = Recovering(self._layers, capacity_fraction)
        self._raised = [False] * len(self._layers)  # capacity, by layer
        self._reported_no_limit = False

    def observe(self, tokens: Sequence[ArrayLike]) -> None:
        """Add the routed tokens of one iteration: for each layer, `(experts,)`."""
        self._recovering.observe(tokens)

    def restored(self, loss: Loss, *, predicted: bool) -> None:
        """Record a restart with experts that are older than the rest.

        Args:
            loss: of this recovery.
            predicted: predictions replace the missed iterations, so that the experts need not make up for them.
        """
        if loss.missed:
            self._lost.add(loss.lost)
            if not predicted:
                self._recovering.lost(loss.lost)
        self.set_capacities()

    def set_capacities(self) -> None:
        """Raise the capacity of layers with recovering experts, and restore it where none recovers."""
        for place, (layer, recovers) in enumerate(zip(self._layers, self._recovering.in_layers, strict=True)):
            if recovers == self._raised[place]:
                continue
            self._raised[place] = recovers
            limited = self._mixture.scale_capacity(layer.name, 1 + self._more_capacity if recovers else 1.0)
            if not limited and not self._reported_no_limit:
                self._reported_no_limit = True
                logger.info(
                    "layer %r has experts that recover, and no limit to the tokens which they take that could be "
                    "raised: they make up for lost tokens as training goes on (reported once)",
                    layer.name,
                )

    def report(self, loss: Loss, ages: tuple[NDArray[numpy.int64], ...], iteration: int) -> dict[str, Any]:
        """Plain data on a recovery and on the run so far, with the layers one by one.

        Args:
            loss: of the recovery, already counted.
            ages: for each layer, iteration of each expert's weights, `(experts,)`.
            iteration: of everything else.
        """
        assigned = loss.assigned
        fractions = self._lost.by_layer(assigned)
        rows = zip(self._layers, ages, loss.lost, fractions, assigned, strict=True)
        return {
            "iteration": iteration,
            "lost_portion": loss.portion,
            "lost_portion_of_run": self._lost.portion(assigned),
            "momentary_loss_of_run": {"total": float(fractions.sum()), "mean": float(fractions.mean())},
            "layers": [
                {
                    "layer": layer.name,
                    "stale_experts": int((taken < iteration).sum()),
                    "oldest_iteration": int(taken.min()),
                    "lost_tokens": float(lost.sum()),
                    "lost_fraction_of_run": float(fraction),
                    "assigned_tokens": whole,
                }
                for layer, taken, lost, fraction, whole in rows
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Lost tokens and recovering experts: plain data."""
        return {"lost": self._lost.state_dict(), "recovering": self._recovering.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; an empty one begins anew.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        lost, recovering = LostTokens(self._layers), Recovering(self._layers, self._more_capacity)
        if state:
            lost.load_state_dict(state["lost"])
            recovering.load_state_dict(state["recovering"])
        self._lost, self._recovering = lost, recovering
        self.set_capacities()

    def close(self) -> None:
        """Restore the capacities."""
        for layer, raised in zip(self._layers, self._raised, strict=True):
            if raised:
                self._mixture.scale_capacity(layer.name, 1.0)
        self._raised = [False] * len(self._layers)
