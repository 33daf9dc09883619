"""Bytes of one snapshot by policy, on the papers' models: arithmetic, nothing is trained."""

from dataclasses import dataclass, replace

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.experts.policies import IN_TURN, POLICIES
from cpsr.benchmarks.experts.routing import SKEWS, drawn_shares
from cpsr.benchmarks.experts.shapes import MOETION_EXPERTS, SPREAD_OF_64, Shape, moetion_shape, pec_shape
from cpsr.engines.moe.layers import ExpertParallel
from cpsr.engines.moe.popularity import Popularity, zeros
from cpsr.experts.budget import Budget
from cpsr.experts.moevement import MoEvement
from cpsr.experts.sequential import Sequential
from cpsr.experts.sharding import adaptive_sharding, equal_sharding, expert_bytes_by_rank

__all__ = ["EXPERTS", "SAVED_TOKENS", "RankBytes", "SnapshotSize", "SweepPoint", "expert_sweep", "rank_bytes", "sizes"]

EXPERTS = (1, 2, 4, 8, 16, 32, 64)  # moetion, Figure 9, and 64
SAVED_TOKENS = 0.8  # moetion, section 7.2: the experts to which so many of the tokens go
DRAWS = 200  # layers drawn for each skew
ROUNDING = 1e-9  # equal shares sum to a little below the portion that they are
WINDOW = "MoEvement's window, as many bytes"


@dataclass(frozen=True)
class SnapshotSize:
    """What one snapshot takes.

    Attributes:
        shape: of the model.
        policy: name.
        experts_per_layer: in a snapshot, on average; None where operators of all kinds take turns.
        snapshot_bytes: over all ranks, without what several hold alike.
        dense_bytes: of the whole state.
        round_snapshots: until everything was saved once; None where nothing promises it.
        fits: False where even the smallest snapshot of its kind takes more than it was to take.
    """

    shape: str
    policy: str
    experts_per_layer: int | None
    snapshot_bytes: float
    dense_bytes: int
    round_snapshots: int | None
    fits: bool = True

    @property
    def saved(self) -> float:
        """How much smaller than the whole state, as a fraction of it."""
        return 1 - self.snapshot_bytes / self.dense_bytes


@dataclass(frozen=True)
class SweepPoint:
    """Snapshots of the experts to which 80% of the tokens go.

    Attributes:
        experts: of each layer.
        skew: of their tokens.
        saved_experts: that it takes of each layer, on average.
        snapshot_bytes: with them.
        dense_bytes: of the whole state.
    """

    experts: int
    skew: float
    saved_experts: float
    snapshot_bytes: float
    dense_bytes: int


@dataclass(frozen=True)
class RankBytes:
    """What the busiest of 8 ranks saves of the 8-expert model, one expert a layer, over a whole round.

    Attributes:
        every_rank_saves_all: before anything is shared out and with all experts.
        adaptive: parts shared out by what experts each rank has to save.
        equal: parts shared out by themselves.
    """

    every_rank_saves_all: int
    adaptive: int
    equal: int


def sizes() -> list[SnapshotSize]:
    """PEC's 8-expert model with one expert a layer, and MOETION's 64-expert model with the six popular ones."""
    popular = numpy.asarray(SPREAD_OF_64) / 100
    return [*_of(pec_shape(), numpy.full(8, 1 / 8), 1), *_of(moetion_shape(MOETION_EXPERTS), popular, 6)]


def rank_bytes() -> RankBytes:
    """PEC's model on 8 ranks, each with one expert of every layer and all non-expert parts."""
    shape = pec_shape()
    ranks = shape.layers[0].experts
    layers = [replace(layer, expert_parallel=ExpertParallel(ranks)) for layer in shape.layers]
    policy, nothing = Sequential(layers), zeros(layers)
    popularity = Popularity(nothing, nothing, nothing)
    adaptive, equal = [], []
    for step in range(ranks):
        experts = expert_bytes_by_rank(layers, policy.select(step, popularity, Budget(experts_per_layer=1)))
        adaptive.append(max(adaptive_sharding(shape.parts, experts).rank_bytes))
        equal.append(max(equal_sharding(shape.parts, experts).rank_bytes))
    own = sum(layer.expert_bytes for layer in layers)
    return RankBytes(shape.non_expert_bytes + own, max(adaptive), max(equal))


def expert_sweep() -> list[SweepPoint]:
    """MOETION's model with 1 to 64 experts, and tokens that are spread equally or more and more unevenly."""
    found = []
    for experts in EXPERTS:
        shape = moetion_shape(experts)
        for skew in (0.0, *SKEWS):
            counts = [holding(share, SAVED_TOKENS) for share in drawn_shares(skew, experts, DRAWS, seed=experts)]
            saved = float(numpy.mean(counts))
            taken = shape.non_expert_bytes + saved * sum(layer.expert_bytes for layer in shape.layers)
            found.append(SweepPoint(experts, skew, saved, taken, shape.dense_bytes))
    return found


def holding(shares: NDArray[numpy.float64], portion: float) -> int:
    """The fewest experts that get this portion of the tokens."""
    sums = numpy.cumsum(numpy.sort(shares)[::-1])
    return int(numpy.searchsorted(sums, portion * sums[-1] * (1 - ROUNDING))) + 1


def _of(shape: Shape, shares: NDArray[numpy.float64], count: int) -> list[SnapshotSize]:
    """Every policy on one model, then the window with as many bytes as a snapshot in turn takes."""
    load = tuple(shares for _ in shape.layers)
    popularity = Popularity(load, load, zeros(shape.layers))
    in_round = -(-shape.layers[0].experts // count)
    found = []
    for name, make in POLICIES.items():
        chosen = make(shape.layers).select(0, popularity, Budget(experts_per_layer=count))
        taken = shape.snapshot_bytes(chosen)
        snapshots = in_round if name == IN_TURN else None
        found.append(SnapshotSize(shape.name, name, count, taken, shape.dense_bytes, snapshots))
    moevement = MoEvement(shape.operators())
    moevement.select(0, popularity, Budget(snapshot_bytes=found[0].snapshot_bytes))
    window = moevement.window
    assert window is not None  # there are operators
    largest = window.largest_snapshot_bytes
    return [*found, SnapshotSize(shape.name, WINDOW, None, largest, shape.dense_bytes, window.window, window.fits)]
