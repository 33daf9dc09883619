"""Iterations over which one checkpoint is spread, so that none of its snapshots is late."""

from collections.abc import Sequence
from dataclasses import dataclass

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

    Source: moevement, section 3.5, Algorithm 1.
    """
    all_frozen = float(sum(frozen_bytes))
    schedule: list[list[int]] = []
    sizes: list[float] = []
    for place, (active, frozen) in enumerate(zip(active_bytes, frozen_bytes, strict=True)):
        more = active - frozen
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
