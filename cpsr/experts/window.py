"""Iterations over which one checkpoint is spread, so that none of its snapshots is late."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import ArrayLike, NDArray

__all__ = ["SparseWindow", "sparse_window"]


@dataclass(frozen=True)
class SparseWindow:
    """Which operators are saved whole (*active*) at which iteration; until then only their weights are (*frozen*).

    Attributes:
        window: W, iterations until every operator was active once.
        active_per_step: the most operators that are active in one iteration; all but the last have as many where
            operators are equally large.
        schedule: for each iteration, places of the active operators in the sequence that was given.
        fits: whether no snapshot takes longer than an iteration. Where one does, every operator that does not fit is
            alone in its snapshot, and training waits for it.
        largest_snapshot_bytes: what the largest one takes by the algorithm's estimate, which counts all operators
            that are not active as frozen.
    """

    window: int
    active_per_step: int
    schedule: tuple[tuple[int, ...], ...]
    fits: bool
    largest_snapshot_bytes: float

    def frozen(self, step: int) -> tuple[int, ...]:
        """Operators of which an iteration of the window saves only the weights: those that are active after it."""
        return tuple(place for active in self.schedule[step + 1 :] for place in active)


def sparse_window(
    active_bytes: Sequence[float],
    frozen_bytes: Sequence[float],
    iteration_seconds: float,
    bandwidth_bytes_per_second: float,
) -> SparseWindow:
    """The smallest window whose snapshots fit into an iteration.

    Operators are active in the order in which they are given: the least popular first. Each snapshot takes as many as
    fit, with all others counted as frozen. With equal operators this is Algorithm 1, `W = ceil(N / k)` for the largest
    k that fits. Only, the paper stops at two operators even where two do not fit, and this function at one. Where
    operators differ, one number k for all snapshots would let the largest of them, an embedding say, set the window. So
    each snapshot takes its own number. No other division of the same order has fewer snapshots, as long as no operator
    takes more frozen than active.

    Args:
        active_bytes: for each operator: master weights and optimizer state.
        frozen_bytes: for each operator: the weights of the forward and backward pass.
        iteration_seconds: mean time of one iteration.
        bandwidth_bytes_per_second: from device to host.

    Raises:
        ValueError: no operators, sequences of different length, or a number that is not usable.

    Source: moevement, section 3.5, Algorithm 1.
    """
    active, frozen = _checked(active_bytes, "active_bytes"), _checked(frozen_bytes, "frozen_bytes")
    if active.size != frozen.size:
        raise ValueError(f"{active.size} operators have active_bytes and {frozen.size} have frozen_bytes")
    if not (0 < iteration_seconds < numpy.inf and bandwidth_bytes_per_second > 0):
        raise ValueError(
            "the iteration's seconds and the bandwidth must be positive, and the seconds finite, "
            f"not {iteration_seconds} and {bandwidth_bytes_per_second}"
        )
    all_frozen = float(frozen.sum())
    schedule: list[list[int]] = []
    sizes: list[float] = []
    for place, more in enumerate((active - frozen).tolist()):
        if schedule and (sizes[-1] + more) / bandwidth_bytes_per_second <= iteration_seconds:
            schedule[-1].append(place)
            sizes[-1] += more
        else:
            schedule.append([place])
            sizes.append(all_frozen + more)
    largest = max(sizes)
    return SparseWindow(
        window=len(schedule),
        active_per_step=max(map(len, schedule)),
        schedule=tuple(map(tuple, schedule)),
        fits=largest / bandwidth_bytes_per_second <= iteration_seconds,
        largest_snapshot_bytes=largest,
    )


def _checked(sizes: ArrayLike, what: str) -> NDArray[numpy.float64]:
    array = numpy.asarray(sizes, dtype=numpy.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{what} must hold one number for each operator, and at least one; it has shape {array.shape}")
    if not numpy.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{what} must be finite and not negative")
    return array
