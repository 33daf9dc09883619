"""Bytes of one snapshot by policy on the papers' models, and the time to choose: arithmetic, nothing is trained."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.experts.shapes import MOETION_EXPERTS, SPREAD_OF_64, Shape, moetion_shape, pec_shape
from cpsr.engines.moe.operators import Expert, ExpertLayer, ExpertParallel
from cpsr.engines.moe.token_counts import PerExpert, zeros
from cpsr.experts.moetion import Moetion
from cpsr.experts.policies import Budget, Load, LoadAware, Policy, Sequential
from cpsr.experts.sharding import adaptive_sharding
from cpsr.replay.schedule import sparse_window

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
    policy, load = Sequential(layers), Load(zeros(layers), zeros(layers))
    adaptive, equal = [], []
    for step in range(ranks):
        experts = [0] * ranks
        for expert in policy.select(step, load, Budget(experts_per_layer=1)):
            experts[layers[expert.layer].owner(expert.index)] += layers[expert.layer].expert_bytes
        adaptive.append(max(adaptive_sharding(shape.parts, experts).rank_bytes))
        alone = adaptive_sharding(shape.parts, [0] * ranks)
        equal.append(max(own + more for own, more in zip(alone.rank_bytes, experts, strict=True)))
    own = sum(layer.expert_bytes for layer in layers)
    return RankBytes(shape.non_expert_bytes + own, max(adaptive), max(equal))


def _of(shape: Shape, shares: NDArray[numpy.float64], count: int) -> list[SnapshotSize]:
    """Every policy on one model, then the window with as many bytes as a snapshot in turn takes."""
    load = Load(tuple(shares for _ in shape.layers), zeros(shape.layers))
    in_round = -(-shape.layers[0].experts // count)
    found = []
    for name, make in POLICIES.items():
        chosen = make(shape.layers).select(0, load, Budget(experts_per_layer=count))
        taken = shape.snapshot_bytes(chosen)
        snapshots = in_round if name == IN_TURN else None
        found.append(SnapshotSize(shape.name, name, count, taken, shape.dense_bytes, snapshots))
    operators = shape.operators()
    # Experts by their tokens, then what every token passes.
    order = sorted(operators, key=lambda one: float(shares[one.index]) if isinstance(one, Expert) else numpy.inf)
    budget = found[0].snapshot_bytes
    turns, largest = _window([operators[one] for one in order], budget)
    return [*found, SnapshotSize(shape.name, WINDOW, None, largest, shape.dense_bytes, len(turns), largest <= budget)]


def scheduling() -> list[Scheduling]:
    """Every policy on 100 layers of 100 experts with uneven load."""
    layers = [ExpertLayer(f"layer {place}", EXPERTS, EXPERT_BYTES) for place in range(LAYERS)]
    generator = numpy.random.default_rng(0)
    load = tuple(generator.gamma(0.5, 1000.0, EXPERTS) for _ in layers)
    budget = Budget(experts_per_layer=EXPERTS_PER_LAYER)
    sizes = [(EXPERT_BYTES, FROZEN_SHARE * EXPERT_BYTES)] * OPERATORS
    # All frozen, and a tenth of them active.
    link = OPERATORS * EXPERT_BYTES * (FROZEN_SHARE + EXPERTS_PER_LAYER / EXPERTS)
    chosen = {name: _timed(partial(_chosen, make, layers, load, budget)) for name, make in POLICIES.items()}
    chosen[WINDOW] = _timed(lambda: len(_window(sizes, link)[0][0]))
    return [Scheduling(name, *found) for name, found in chosen.items()]


def _chosen(
    make: Callable[[Sequence[ExpertLayer]], Policy], layers: list[ExpertLayer], load: PerExpert, budget: Budget
) -> int:
    return len(make(layers).select(0, Load(load, zeros(layers)), budget))


def _window(sizes: Sequence[tuple[float, float]], snapshot_bytes: float) -> tuple[list[list[int]], float]:
    """The window of operators in this order, each with its active and its frozen bytes."""
    return sparse_window([size for size, _ in sizes], [size for _, size in sizes], snapshot_bytes)


def _timed(choose: Callable[[], int]) -> tuple[float, int]:
    """The fastest of several runs, and how many operators were chosen."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        chosen = choose()
        seconds.append(time.perf_counter() - started)
    return min(seconds), chosen
