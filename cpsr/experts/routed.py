"""Tokens that a running job routes to each expert: what policies select by, and what orders the turns of windows."""

import numpy
from numpy.typing import NDArray

from cpsr.engines.adapter import EngineAdapter, Mixture
from cpsr.engines.moe.operators import Expert, ModelOperators, check_shared
from cpsr.engines.moe.token_counts import PerExpert, zeros
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["RoutedTokens", "unit_name"]


class RoutedTokens:
    """Counts the tokens of one life, over all ranks. On each step nothing waits for the device; made by `of`.

    Args:
        adapter: of the engine.
        mixture: of its model.
        operators: of that.
        shard: of this rank.

    Attributes:
        operators: as given.
        layers: of the model; their experts have one byte each.
        units: operator name in this rank's shard -> `unit_name` of its expert, for experts' parameters alone.
        iteration: the last complete one.
        sums: tokens that `take` has counted in this life, `(experts,)` for each layer.
    """

    def __init__(self, adapter: EngineAdapter, mixture: Mixture, operators: ModelOperators, shard: Shard) -> None:
        self.operators, self.layers = operators, operators.layers()
        self.units = {
            name: unit_name(expert)
            for expert, names in operators.parameters.items()
            for name in names
            if name in shard.operators
        }
        self._adapter = adapter
        self._counts = mixture.token_counts()
        self.iteration = adapter.iteration
        self.sums: PerExpert = zeros(self.layers)

    @staticmethod
    def of(adapter: EngineAdapter, shard: Shard, group: Group) -> "RoutedTokens | None":
        """The instance for an engine; None where its model has no layers of experts. A collective.

        Raises:
            ConfigError: the ranks cannot share a layer equally; see `check_shared`.
            UnsupportedEngineError: see `check_shared`, `Mixture.operators`.
        """
        mixture = adapter.mixture
        operators = None if mixture is None else mixture.operators()
        check_shared(operators, group.gather)
        if mixture is None or operators is None or not operators.layer_names:
            return None
        return RoutedTokens(adapter, mixture, operators, shard)

    # On every step

    def begin_forward(self) -> None:
        """A training forward begins: `StepObserver.on_forward`."""
        self._counts.begin_forward()

    def end_iteration(self, iteration: int, applied: bool) -> None:
        """A step is complete: `StepObserver.after_step`."""
        self._counts.end_iteration(iteration, applied)
        self.iteration = iteration

    # On every checkpoint

    def take(self) -> None:
        """Add what was routed since the last call to `sums`; a collective, and the host waits for the device."""
        for counted in self._counts.take():
            self.sums = tuple(sums + new for sums, new in zip(self.sums, counted.tokens, strict=True))

    def local(self) -> NDArray[numpy.int64]:
        """This rank's own tokens so far, as far as the host has them; see `HookedTokenCounts.local`."""
        return self._counts.local()

    @property
    def popularity(self) -> dict[str, float]:
        """Operator -> tokens of its expert, for this rank's experts; empty before any was counted."""
        if not any(layer.any() for layer in self.sums):
            return {}
        of_units = {
            unit_name(Expert(place, index)): tokens
            for place, layer in enumerate(self.sums)
            for index, tokens in enumerate(layer.tolist())
        }
        return {name: of_units[unit] for name, unit in self.units.items()}

    # Afterwards

    def forget(self) -> None:
        """The weights were rewound or replaced: drop what was not taken."""
        self._counts.forget()
        self.iteration = self._adapter.iteration

    def close(self) -> None:
        """Remove the hooks."""
        self._counts.remove()


def unit_name(expert: Expert) -> str:
    """Name of an expert in checkpoints: layer and index, `00000-00012`."""
    return f"{expert.layer:05d}-{expert.index:05d}"
