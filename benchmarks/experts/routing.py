"""How many of a layer's tokens each expert gets: drawn with a given skew."""

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.experts.skew import dirichlet_concentration

__all__ = ["SKEWS", "drawn_shares"]

# moevement, appendix D.
SKEWS = (0.25, 0.50, 0.75, 0.99)


def drawn_shares(expected_skew: float, experts: int, layers: int, seed: int) -> list[NDArray[numpy.float64]]:
    """Shares of each layer from the symmetric Dirichlet distribution with this skew; 0 is equal shares.

    Source: moevement, appendix D.
    """
    if expected_skew == 0 or experts == 1:
        return [numpy.full(experts, 1 / experts)] * layers
    concentration = dirichlet_concentration(expected_skew, experts)
    generator = numpy.random.default_rng(seed)
    return list(generator.dirichlet([concentration] * experts, size=layers))
