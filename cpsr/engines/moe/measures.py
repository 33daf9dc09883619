"""Popularity of experts: by hard count, soft count, with decay over time, and relative to capacity."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import ArrayLike

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.popularity import PerExpert, per_expert, zeros

__all__ = ["CapacityAware", "HardCount", "Measure", "Routed", "SoftCount", "TimeDecayed"]


@dataclass(frozen=True)
class Routed:
    """What the gates did with the tokens of one iteration, summed over the expert-parallel group.

    Attributes:
        tokens: for each layer, `(experts,)`: tokens routed to each expert.
        probabilities: for each layer, `(experts,)`: each expert's gating probability, summed over the tokens;
            None where the gates do not show it.
    """

    tokens: Sequence[ArrayLike]
    probabilities: Sequence[ArrayLike] | None = None


class Measure(Protocol):
    """A measure of the popularity of experts."""

    def observe(self, routed: Routed) -> None:
        """Take in one iteration."""

    @property
    def scores(self) -> PerExpert:
        """How popular each expert is."""


class HardCount:
    """Tokens routed to each expert, `A_j = sum_x 1[gamma(e_j, x) = 1]`.

    Source: moevement, section 3.5.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers
        self._sums = zeros(layers)

    @property
    def scores(self) -> PerExpert:
        """Tokens."""
        return self._sums

    def observe(self, routed: Routed) -> None:
        """Add the tokens of one iteration."""
        tokens = per_expert(self._layers, routed.tokens, "tokens")
        self._sums = tuple(total + new for total, new in zip(self._sums, tokens, strict=True))


class SoftCount:
    """Gating probability of each expert summed over the tokens, `A_j = sum_x P_j(x)`.

    Source: moevement, appendix B.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers
        self._sums = zeros(layers)

    @property
    def scores(self) -> PerExpert:
        """Sums of probabilities."""
        return self._sums

    def observe(self, routed: Routed) -> None:
        """Add the probabilities of one iteration.

        Raises:
            ValueError: the gates do not show them; count hard instead.
        """
        if routed.probabilities is None:
            raise ValueError("the gates show no probabilities, which a soft count sums: use the hard count")
        probabilities = per_expert(self._layers, routed.probabilities, "probabilities")
        self._sums = tuple(total + new for total, new in zip(self._sums, probabilities, strict=True))


class TimeDecayed:
    """Running mean of the tokens per iteration, `A_j(t) = alpha A_j(t-1) + (1 - alpha) tokens_j(t)`, from 0.

    What the start from 0 takes away is the same factor for all experts, and neither their order nor their shares
    change.

    Args:
        layers: of the model.
        decay: alpha, in [0, 1).

    Source: moevement, appendix B.
    """

    def __init__(self, layers: Sequence[ExpertLayer], decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, not {decay}")
        self._layers = layers
        self._decay = decay
        self._means = zeros(layers)

    @property
    def scores(self) -> PerExpert:
        """Tokens per iteration."""
        return self._means

    def observe(self, routed: Routed) -> None:
        """Take in the tokens of one iteration."""
        tokens = per_expert(self._layers, routed.tokens, "tokens")
        self._means = tuple(
            self._decay * mean + (1 - self._decay) * new for mean, new in zip(self._means, tokens, strict=True)
        )


class CapacityAware:
    """Another measure relative to what each expert can take, `A_j / C_j`, for experts of different capacity.

    Args:
        layers: of the model.
        measure: numerator.
        capacities: for each layer, `(experts,)`: tokens per iteration that each expert can take.

    Raises:
        ValueError: a capacity is not positive.

    Source: moevement, appendix B.
    """

    def __init__(self, layers: Sequence[ExpertLayer], measure: Measure, capacities: Sequence[ArrayLike]) -> None:
        self._measure = measure
        self._capacities = per_expert(layers, capacities, "capacities")
        for layer, capacity in zip(layers, self._capacities, strict=True):
            if (capacity == 0).any():
                raise ValueError(f"an expert of layer {layer.name!r} has capacity 0 and can take no token: {capacity}")

    @property
    def scores(self) -> PerExpert:
        """The other measure's scores over capacity."""
        return tuple(score / limit for score, limit in zip(self._measure.scores, self._capacities, strict=True))

    def observe(self, routed: Routed) -> None:
        """Let the other measure take in one iteration."""
        self._measure.observe(routed)
