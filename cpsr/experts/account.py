"""The account of a mixture: tokens that recoveries took from experts, and how the experts make up for them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.config import ExpertsConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.popularity import PerExpert
from cpsr.experts.catching_up import CatchingUp, Missed
from cpsr.experts.lost_tokens import LostTokens
from cpsr.experts.missed_iterations import MissedIterations
from cpsr.experts.recovering import Recovering

__all__ = ["ExpertAccount", "Loss"]

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


class ExpertAccount:
    """Counts the tokens that recoveries take from experts, and makes the experts catch up.

    Experts that lost tokens get more capacity in their layers until as many tokens were routed to them again. With
    `stale: catch_up` they also take longer steps, until the missed iterations are made up.

    Args:
        adapter: the engine.
        layers: of the model.
        units: operator name in this rank's shard -> unit, for experts' parameters alone.
        config: of experts.
    """

    def __init__(
        self, adapter: EngineAdapter, layers: Sequence[ExpertLayer], units: Mapping[str, str], config: ExpertsConfig
    ) -> None:
        self._adapter = adapter
        self._layers = tuple(layers)
        self._units = units
        self._more_capacity = config.recovering_capacity_fraction
        self._lost = LostTokens(self._layers)
        self._recovering = Recovering(self._layers, self._more_capacity)
        self._raised = [False] * len(self._layers)  # capacity, by layer
        self._missed = MissedIterations(config.catch_up_step_factor) if config.stale == "catch_up" else None
        self._catching_up = None if self._missed is None else CatchingUp(*adapter.optimizers)
        self._reported_no_limit = False

    def observe(self, tokens: Sequence[ArrayLike]) -> None:
        """Add the routed tokens of one iteration: for each layer, `(experts,)`."""
        self._recovering.observe(tokens)

    def forget(self) -> None:
        """The weights were rewound or replaced: end all longer steps."""
        if self._catching_up is not None:
            self._catching_up.forget()

    def restored(self, loss: Loss, taken_at: Mapping[str, int], iteration: int, *, predicted: bool) -> None:
        """Record a restart with experts that are older than the rest.

        Args:
            loss: of this recovery.
            taken_at: unit -> iteration at which it was taken, of those that are older.
            iteration: of everything else.
            predicted: predictions replace the missed iterations, so that the experts need not make up for them.
        """
        if loss.missed:
            self._lost.add(loss.lost)
            if not predicted:
                self._recovering.lost(loss.lost)
        if self._missed is not None:
            self._missed.restarted(dict(taken_at), iteration)
            if predicted:
                self._missed.forget()
        self._catch_up(iteration)

    def set_capacities(self) -> None:
        """Raise the capacity of layers with recovering experts, and restore it where none recovers."""
        for place, (layer, recovers) in enumerate(zip(self._layers, self._recovering.in_layers, strict=True)):
            if recovers == self._raised[place]:
                continue
            self._raised[place] = recovers
            limited = self._adapter.scale_expert_capacity(layer.name, 1 + self._more_capacity if recovers else 1.0)
            if not limited and not self._reported_no_limit and self._adapter.rank == 0:
                self._reported_no_limit = True
                logger.info(
                    "layer %r has experts that recover, and no limit to the tokens which they take that could be "
                    "raised: they make up for lost tokens as training goes on (reported once)",
                    layer.name,
                )

    def catching_up_at(self, iteration: int) -> bool:
        """Whether an expert of some rank makes up for missed iterations; the same on all ranks."""
        return self._missed is not None and bool(self._missed.at(iteration))

    def report(self, loss: Loss, ages: tuple[NDArray[numpy.int64], ...], iteration: int) -> dict[str, Any]:
        """Plain data on a recovery and on the run so far, with the layers one by one.

        Args:
            loss: of the recovery, already counted.
            ages: for each layer, iteration of each expert's weights, `(experts,)`.
            iteration: of everything else.
        """
        account, assigned = self._lost, loss.assigned
        momentary = account.momentary(assigned)
        rows = zip(self._layers, ages, loss.lost, account.by_layer(assigned), assigned, strict=True)
        return {
            "iteration": iteration,
            "lost_portion": loss.portion,
            "lost_portion_of_run": account.portion(assigned),
            "momentary_loss_of_run": {"total": momentary.total, "mean": momentary.mean},
            "harmless": account.is_harmless(assigned),
            "caught_up_at_iteration": None if self._missed is None else self._missed.made_up_at(iteration),
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
        return {
            "lost": self._lost.state_dict(),
            "recovering": self._recovering.state_dict(),
            "missed": {} if self._missed is None else self._missed.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], iteration: int) -> None:
        """Go on from `state_dict()` at an iteration; an empty one begins anew.

        Raises:
            ValueError: it is of a model with other layers of experts; nothing was changed.
        """
        lost, recovering = LostTokens(self._layers), Recovering(self._layers, self._more_capacity)
        if state:
            lost.load_state_dict(state["lost"])
            recovering.load_state_dict(state["recovering"])
        self._lost, self._recovering = lost, recovering
        self.set_capacities()
        if self._missed is not None:
            self._missed.load_state_dict(state.get("missed", {}), iteration)
        self._catch_up(iteration)

    def close(self) -> None:
        """Remove the hooks, and restore the capacities."""
        if self._catching_up is not None:
            self._catching_up.close()
        for layer, raised in zip(self._layers, self._raised, strict=True):
            if raised:
                self._adapter.scale_expert_capacity(layer.name, 1.0)
        self._raised = [False] * len(self._layers)

    def _catch_up(self, iteration: int) -> None:
        """Start longer steps for the iterations missing now."""
        if self._missed is None or self._catching_up is None:
            return
        missed = self._missed.at(iteration)
        operators = self._adapter.shard().operators if missed else {}
        late = {
            name: Missed(operators[name].parameter.values, missed[unit])
            for name, unit in self._units.items()
            if unit in missed
        }
        self._catching_up.begin(late, self._missed.step_factor)
