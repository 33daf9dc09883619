"""Bytes of one snapshot by policy on the papers' models, and the time to choose: arithmetic, nothing is trained."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.experts.shapes import MOETION_EXPERTS, SPREAD_OF_64, Shape, moetion_shape, pec_shape
from cpsr.engines.moe.layers import ExpertLayer, ExpertParallel
from cpsr.engines.moe.operators import Expert, Operator
from cpsr.engines.moe.popularity import Popularity, zeros
from cpsr.experts.budget import Budget
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.moetion import Moetion
from cpsr.experts.moevement import MoEvement, OperatorBytes
from cpsr.experts.policy import Policy
from cpsr.experts.sequential import Sequential
from cpsr.experts.sharding import adaptive_sharding, equal_sharding, expert_bytes_by_rank

__all__ = [
    "IN_TURN",
    "MOETION",
    "OPERATORS",
    "POLICIES",
    "WINDOW",
    "RankBytes",
    "Scheduling",
    "SnapshotSize",
    "rank_bytes",
    "scheduling",
    "sizes",
]

IN_TURN, BY_LOAD, MOETION, WINDOW = "in turn (PEC)", "by load (PEC)", "MOETION", "MoEvement's window, as many bytes"
POLICIES: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
    IN_TURN: Sequential,
    BY_LOAD: LoadAware,
    MOETION: Moetion,
}
"""Name -> makes the policy. Windows lose no token: their bytes are worked out apart."""
LAYERS, EXPERTS = 100, 100  # of the model on which choosing is timed
OPERATORS = LAYERS * EXPERTS
EXPERTS_PER_LAYER = 10
EXPERT_BYTES, FROZEN_SHARE = 12_000_000, 1 / 6
REPEATS = 9


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


@dataclass(frozen=True)
class Scheduling:
    """One policy.

    Attributes:
        policy: name.
        seconds: of choosing the operators of one snapshot; the fastest of several, which other processes delayed least.
        chosen: operators in it.
    """

    policy: str
    seconds: float
    chosen: int


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


def scheduling() -> list[Scheduling]:
    """Every policy on 100 layers of 100 experts with uneven load."""
    layers = [ExpertLayer(f"layer {place}", EXPERTS, EXPERT_BYTES) for place in range(LAYERS)]
    generator = numpy.random.default_rng(0)
    load = tuple(generator.gamma(0.5, 1000.0, EXPERTS) for _ in layers)
    popularity = Popularity(load, load, tuple(numpy.zeros(EXPERTS) for _ in layers))
    budget = Budget(experts_per_layer=EXPERTS_PER_LAYER)
    sizes: dict[Operator, OperatorBytes] = {
        Expert(place, index): OperatorBytes(EXPERT_BYTES, FROZEN_SHARE * EXPERT_BYTES)
        for place in range(LAYERS)
        for index in range(EXPERTS)
    }
    # All frozen, and a tenth of them active.
    link = Budget(snapshot_bytes=OPERATORS * EXPERT_BYTES * (FROZEN_SHARE + EXPERTS_PER_LAYER / EXPERTS))
    by_number = [_timed(name, partial(make, layers), popularity, budget) for name, make in POLICIES.items()]
    return [*by_number, _timed(WINDOW, partial(MoEvement, sizes), popularity, link)]


def _timed(name: str, make: Callable[[], Policy], popularity: Popularity, budget: Budget) -> Scheduling:
    seconds = []
    for _ in range(REPEATS):
        policy = make()  # anew: a window is found at its beginning alone
        own = replace(popularity)  # what one selection worked out of it is not there for the next
        started = time.perf_counter()
        chosen = policy.select(0, own, budget)
        seconds.append(time.perf_counter() - started)
    return Scheduling(name, min(seconds), len(chosen))
