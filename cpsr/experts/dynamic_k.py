"""K that grows with what failures have cost."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.operators import Operator
from cpsr.experts.policy import Policy
from cpsr.experts.popularity import Popularity

__all__ = ["DynamicK"]


class DynamicK:
    """Another policy under a K that doubles after recoveries that were too expensive.

    After each recovery the portion of lost tokens is charged to the current K; when the sum charged to it passes the
    limit, K doubles, up to all experts. Each K has the whole limit to itself, as the paper describes it: with E experts
    the run may lose up to `log2(E)` times the limit, and what the last recovery under each K took beyond it. To keep
    the whole run below 5%, which is the paper's aim, give 5% divided by `log2(E)`.

    Args:
        layers: of the model.
        policy: that selects K experts of each layer.
        experts_per_layer: K of the start.
        limit: portion of lost tokens, the paper's 5% by default.

    Raises:
        ConfigError: K or the limit is not usable.

    Source: pec, section 3.1, "Dynamic-K".
    """

    def __init__(
        self, layers: Sequence[ExpertLayer], policy: Policy, experts_per_layer: int = 1, limit: float = 0.05
    ) -> None:
        if experts_per_layer < 1 or not 0 <= limit <= 1:
            raise ConfigError(
                "Dynamic-K needs at least 1 expert per layer and a limit between 0 and 1, "
                f"not {experts_per_layer} and {limit}"
            )
        self._policy = policy
        self._limit = limit
        self._most = max((layer.experts for layer in layers), default=1)
        self._count = min(experts_per_layer, self._most)
        self._charged = 0.0

    @property
    def experts_per_layer(self) -> int:
        """K now."""
        return self._count

    @property
    def charged(self) -> float:
        """Portion of lost tokens charged to K."""
        return self._charged

    def recovered(self, portion: float) -> None:
        """Charge one recovery.

        Args:
            portion: of lost tokens, that this recovery added to `LostTokens.portion`.

        Raises:
            ValueError: no portion.
        """
        if not 0 <= portion <= 1:
            raise ValueError(f"a portion of lost tokens is between 0 and 1, not {portion}")
        self._charged += portion
        if self._charged > self._limit and self._count < self._most:
            self._count = min(2 * self._count, self._most)
            self._charged = 0.0

    def state_dict(self) -> dict[str, Any]:
        """K, and what is charged to it."""
        return {"experts_per_layer": self._count, "charged": self._charged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the K of `state_dict()`, or that of the start where it is larger."""
        if state["experts_per_layer"] >= self._count:
            self._count, self._charged = min(state["experts_per_layer"], self._most), state["charged"]

    def select(self, step: int, popularity: Popularity, budget: Budget) -> Sequence[Operator]:
        """What the other policy selects with K, whatever the budget's own."""
        return self._policy.select(step, popularity, replace(budget, experts_per_layer=self._count))
