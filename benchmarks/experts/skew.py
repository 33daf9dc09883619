"""How unevenly tokens are spread over experts."""

import numpy
from numpy.typing import ArrayLike

__all__ = ["dirichlet_concentration", "skew"]


def skew(tokens: ArrayLike) -> float:
    """Normalised Herfindahl-Hirschman index: `S = (sum p_i^2 - 1/E) / (1 - 1/E)` with p the experts' shares.

    Args:
        tokens: of each expert of one layer, `(experts,)`.

    Returns:
        0 where all have equally many, 1 where one has all. 0 too for a layer without tokens or with one expert only,
        of which the formula says nothing.

    Raises:
        ValueError: no experts, or a number that is negative or not finite.

    Source: moevement, appendix D.
    """
    counts = numpy.asarray(tokens, dtype=numpy.float64)
    if counts.ndim != 1 or counts.size == 0 or not numpy.isfinite(counts).all() or (counts < 0).any():
        raise ValueError(f"skew needs one finite number of tokens, not negative, for each expert: {counts}")
    if counts.size == 1 or not counts.any():
        return 0.0
    # Scaled by the largest first: sums of large counts could overflow.
    scaled = counts / counts.max()
    parts = scaled / scaled.sum()
    equal = 1 / counts.size
    # Rounding may leave equal shares a little below.
    return max(0.0, float((parts @ parts - equal) / (1 - equal)))


def dirichlet_concentration(expected_skew: float, experts: int) -> float:
    """Alpha of the symmetric Dirichlet distribution whose draws have this skew on average.

    From `E[HHI] = (alpha + 1) / (alpha E + 1)` follows `E[S] = 1 / (alpha E + 1)`.

    Args:
        expected_skew: in (0, 1).
        experts: E, at least 2.

    Source: moevement, appendix D.
    """
    if not 0 < expected_skew < 1 or experts < 2:
        raise ValueError(f"needs a skew in (0, 1) and at least 2 experts, not {expected_skew} and {experts}")
    return (1 / expected_skew - 1) / experts
