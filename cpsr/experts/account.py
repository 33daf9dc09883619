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

__all__ = ["ExpertAccount", "Loss"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loss:
    """What one recovery took from experts.

    Attributes:
        lost: tokens of each expert, for each layer `(experts,)`.
        routed: tokens of each expert in the whole run, likewise: input tokens times experts per token (T x TopK), each
            iteration once even if it was repeated, and with those that experts dropped for lack of capacity.
    """

    lost: PerExpert
    routed: PerExpert

    @property
    def assigned(self) -> list[float]:
        """Tokens of each layer in the whole run."""
        return [float(layer.sum()) for layer in self.routed]

    @property
    def portion(self) -> float:
        """Lost tokens over all tokens of the run so far."""
        missed = sum(float(layer.sum()) for layer in self.lost)
        return missed / sum(self.assigned) if missed else 0.0


class ExpertAccount:
    """Counts the tokens that recoveries take from experts, and gives their layers more capacity until they are made up.

    While its capacity is raised by a fraction, an expert is assumed to process that fraction more. Its loss is made up
    when this fraction of the tokens routed to it since then equals the lost tokens.

    Args:
        mixture: of the engine.
        layers: of the model.
        capacity_fraction: by which the capacity of a layer with recovering experts is raised; 0: nothing recovers.

    Source: pec, Eq. 4; moetion, Eq. 6, and section 6, "Resuming Training from Failures".
    """

    def __init__(self, mixture: Mixture, layers: Sequence[ExpertLayer], capacity_fraction: float) -> None:
        self._mixture, self._layers, self._fraction = mixture, tuple(layers), capacity_fraction
        self._lost, self._missing = zeros(layers), zeros(layers)  # in all failures, and what is not made up of it
        self._raised = [False] * len(self._layers)  # capacity, by layer
        self._reported_no_limit = False

    def observe(self, tokens: Sequence[ArrayLike]) -> None:
        """Add the routed tokens of one iteration: for each layer, `(experts,)`."""
        routed = per_expert(self._layers, tokens, "tokens")
        self._missing = tuple(
            numpy.maximum(old - self._fraction * new, 0.0) for old, new in zip(self._missing, routed, strict=True)
        )

    def restored(self, loss: Loss) -> None:
        """Record a restart with experts that are older than the rest.

        Args:
            loss: of this recovery.
        """
        lost = per_expert(self._layers, loss.lost, "lost tokens")
        self._lost = tuple(old + new for old, new in zip(self._lost, lost, strict=True))
        if self._fraction > 0:
            self._missing = tuple(old + new for old, new in zip(self._missing, lost, strict=True))
        self.set_capacities()

    def set_capacities(self) -> None:
        """Raise the capacity of layers with recovering experts, and restore it where none recovers."""
        for place, (layer, missing) in enumerate(zip(self._layers, self._missing, strict=True)):
            recovers = bool(missing.any())
            if recovers == self._raised[place]:
                continue
            self._raised[place] = recovers
            limited = self._mixture.scale_capacity(layer.name, 1 + self._fraction if recovers else 1.0)
            if not limited and not self._reported_no_limit:
                self._reported_no_limit = True
                logger.info(
                    "layer %r has experts that recover, and no limit to the tokens which they take that could be "
                    "raised: they make up for lost tokens as training goes on (reported once)",
                    layer.name,
                )

    @property
    def lost_tokens(self) -> float:
        """Of all experts, by all recoveries of the run."""
        return sum(float(layer.sum()) for layer in self._lost)

    def report(self, loss: Loss, ages: tuple[NDArray[numpy.int64], ...], iteration: int) -> dict[str, Any]:
        """Plain data on a recovery and on the run so far, with the layers one by one.

        Args:
            loss: of the recovery, already counted.
            ages: for each layer, iteration of each expert's weights, `(experts,)`.
            iteration: of everything else.

        Raises:
            ValueError: more was lost than assigned.
        """
        assigned = numpy.array(loss.assigned)
        lost = numpy.array([layer.sum() for layer in self._lost])
        if not numpy.isfinite(assigned).all() or not (lost <= assigned).all():
            raise ValueError(f"layers lost {lost} of {assigned} tokens: those are not of the whole run")
        fractions = numpy.divide(lost, assigned, out=numpy.zeros_like(lost), where=assigned > 0)
        rows = zip(self._layers, ages, loss.lost, fractions.tolist(), loss.assigned, strict=True)
        return {
            "iteration": iteration,
            "lost_portion": loss.portion,
            "lost_portion_of_run": float(lost.sum() / assigned.sum()) if assigned.any() else 0.0,
            "momentary_loss_of_run": {"total": float(fractions.sum()), "mean": float(fractions.mean())},
            "layers": [
                {
                    "layer": layer.name,
                    "stale_experts": int((taken < iteration).sum()),
                    "oldest_iteration": int(taken.min()),
                    "lost_tokens": float(lost.sum()),
                    "lost_fraction_of_run": fraction,
                    "assigned_tokens": whole,
                }
                for layer, taken, lost, fraction, whole in rows
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Lost tokens, and those to make up, layer by layer: plain data."""
        return {"lost": [one.tolist() for one in self._lost], "recovering": [one.tolist() for one in self._missing]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; an empty one begins anew.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        lost, missing = zeros(self._layers), zeros(self._layers)
        if state:
            lost = per_expert(self._layers, state["lost"], "lost tokens")
            missing = per_expert(self._layers, state["recovering"], "tokens to make up")
        self._lost, self._missing = lost, missing if self._fraction > 0 else zeros(self._layers)
        self.set_capacities()

    def close(self) -> None:
        """Restore the capacities."""
        for layer, raised in zip(self._layers, self._raised, strict=True):
            if raised:
                self._mixture.scale_capacity(layer.name, 1.0)
        self._raised = [False] * len(self._layers)
