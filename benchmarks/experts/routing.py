"""Which tokens go to which experts, iteration by iteration: of a real training, or drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cpsr.experts.layers import ExpertLayer
from cpsr.experts.skew import dirichlet_concentration, skew

__all__ = ["SKEWS", "Trace", "drawn_shares", "synthetic_trace"]

# moevement, appendix D.
SKEWS = (0.25, 0.50, 0.75, 0.99)


@dataclass(frozen=True)
class Trace:
    """Routed tokens.

    Attributes:
        source: where they are from, for people; drawn ones are called synthetic.
        tokens: `(iterations, layers, experts)`.
    """

    source: str
    tokens: NDArray[numpy.int64]

    @property
    def skew(self) -> float:
        """Mean over layers of the skew of all iterations' tokens together."""
        return float(numpy.mean([skew(layer) for layer in self.tokens.sum(axis=0)]))

    def layers(self) -> tuple[ExpertLayer, ...]:
        """Layers of experts with these numbers, all equally large."""
        _, layers, experts = self.tokens.shape
        return tuple(ExpertLayer(f"layer {place}", experts, 1) for place in range(layers))


def synthetic_trace(
    source: str, shares: Sequence[NDArray[numpy.float64]], iterations: int, tokens: int, seed: int
) -> Trace:
    """Every iteration routes so many tokens of each layer by the same shares, at random.

    Args:
        source: what the shares are.
        shares: for each layer, `(experts,)`, of sum 1.
        iterations: length.
        tokens: of an iteration, in each layer.
        seed: of the draws.
    """
    generator = numpy.random.default_rng(seed)
    drawn = [generator.multinomial(tokens, share, size=iterations) for share in shares]
    return Trace(f"synthetic: {source}", numpy.stack(drawn, axis=1))


def drawn_shares(expected_skew: float, experts: int, layers: int, seed: int) -> list[NDArray[numpy.float64]]:
    """Shares of each layer from the symmetric Dirichlet distribution with this skew; 0 is equal shares.

    Source: moevement, appendix D.
    """
    if expected_skew == 0 or experts == 1:
        return [numpy.full(experts, 1 / experts)] * layers
    concentration = dirichlet_concentration(expected_skew, experts)
    generator = numpy.random.default_rng(seed)
    return list(generator.dirichlet([concentration] * experts, size=layers))
