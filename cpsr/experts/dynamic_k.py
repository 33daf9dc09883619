"""K that grows with the tokens lost by failures."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.operators import Operator
from cpsr.engines.moe.popularity import Popularity
from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.policy import Policy

__all__ = ["DynamicK"]


class DynamicK:
    """Another policy under a K that doubles after recoveries that were too expensive.

    Lost tokens are charged to the current K. When its charge exceeds the limit, as a portion of all tokens so far, K
    doubles, up to all experts. Each K has the whole limit, as the paper describes it: with E experts the run may lose
    up to `log2(E)` times the limit, plus the excess of the last recovery under each K. To keep the whole run below 5%,
    the paper's aim, set 5% divided by `log2(E)`.

    Args:
        layers: of the model.
        policy: that selects K experts of each layer.
        experts_per_layer: K of the start.
        limit: portion of lost tokens (`LostTokens.portion`), the paper's 5% by default.

    Raises:
        ConfigError: K or the limit is not usable.

    Source: pec, section 3.1, "Dynamic-K", and Eq. 4.
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
        self._lost = 0.0  # since the last change of K
        self._assigned = 0.0  # in the whole run, up to the last recovery

    @property
    def experts_per_layer(self) -> int:
        """K now."""
        return self._count

    @property
    def charged(self) -> float:
        """Tokens charged to K, as a portion of those assigned up to the last recovery."""
        return self._lost / self._assigned if self._assigned else 0.0

    def recovered(self, lost: float, assigned: float) -> None:
        """Charge one recovery.

        Args:
            lost: tokens, of all experts, by this recovery.
            assigned: in the whole run up to now, in all layers: what `LostTokens.portion` compares with.

        Raises:
            ValueError: more was lost than assigned, or a number is negative or not finite; nothing was charged.
        """
        if not 0 <= lost <= assigned < math.inf:
            raise ValueError(f"lost tokens are part of those assigned, and {lost} of {assigned} cannot be")
        self._lost += lost
        self._assigned = assigned
        if self.charged > self._limit and self._count < self._most:
            self._count = min(2 * self._count, self._most)
            self._lost = 0.0

    def state_dict(self) -> dict[str, Any]:
        """K, and the tokens charged to it."""
        return {"experts_per_layer": self._count, "lost": self._lost, "assigned": self._assigned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the K of `state_dict()`, or that of the start where it is larger.

        A state without tokens, which earlier versions saved, brings K alone: nothing is charged to it yet.
        """
        if state["experts_per_layer"] >= self._count:
            self._count = min(state["experts_per_layer"], self._most)
            self._lost, self._assigned = state.get("lost", 0.0), state.get("assigned", 0.0)

    def select(self, step: int, popularity: Popularity, budget: Budget) -> Sequence[Operator]:
        """Selection of the other policy with K, which overrides the budget's own."""
        return self._policy.select(step, popularity, replace(budget, experts_per_layer=self._count))
