"""Validation curves: losses by iteration and validation chunk."""

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

__all__ = ["LossCurve"]


@dataclass(frozen=True)
class LossCurve:
    """Validation losses of one run, evaluated on the same chunks of validation data every time.

    Attributes:
        iterations: `(points,)` ascending.
        losses: `(points, chunks)` mean loss of each validation chunk, in nats.

    Raises:
        ValueError: shapes do not fit, iterations do not ascend, or a loss is not finite.
    """

    iterations: NDArray[numpy.int64]
    losses: NDArray[numpy.float64]

    def __post_init__(self) -> None:
        iterations = numpy.asarray(self.iterations, dtype=numpy.int64)
        losses = numpy.asarray(self.losses, dtype=numpy.float64)
        if iterations.ndim != 1 or losses.ndim != 2 or len(iterations) != len(losses) or losses.shape[1] < 1:
            raise ValueError(f"expected (points,) and (points, chunks), got {iterations.shape} and {losses.shape}")
        if numpy.any(numpy.diff(iterations) <= 0):
            raise ValueError("iterations of a loss curve must ascend without repeats")
        if not numpy.all(numpy.isfinite(losses)):
            point = int(numpy.argwhere(~numpy.isfinite(losses))[0, 0])
            raise ValueError(f"the loss at iteration {iterations[point]} is not finite")
        object.__setattr__(self, "iterations", iterations)
        object.__setattr__(self, "losses", losses)

    def between(self, first: float, last: float) -> "LossCurve":
        """The points with `first <= iteration <= last`."""
        inside = (self.iterations >= first) & (self.iterations <= last)
        return LossCurve(self.iterations[inside], self.losses[inside])

    def at(self, iterations: NDArray[numpy.int64]) -> NDArray[numpy.float64]:
        """Losses `(len(iterations), chunks)` at exactly these iterations.

        Raises:
            ValueError: the curve lacks one of them.
        """
        missing = numpy.setdiff1d(iterations, self.iterations)
        if missing.size:
            raise ValueError(f"the fault-free curve has no point at iteration {missing[0]} ({missing.size} missing)")
        return self.losses[numpy.searchsorted(self.iterations, iterations)]
