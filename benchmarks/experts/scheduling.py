"""How long a policy takes to choose among 10,000 operators."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy

from cpsr.benchmarks.experts.policies import BY_BYTES, BY_NUMBER, POLICIES
from cpsr.engines.moe.layers import ExpertLayer, ExpertParallel
from cpsr.engines.moe.operators import Expert, Operator
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.budget import Budget
from cpsr.experts.moevement import MoEvement, OperatorBytes
from cpsr.experts.policy import Policy

__all__ = ["OPERATORS", "Scheduling", "scheduling"]

LAYERS, EXPERTS = 100, 100
OPERATORS = LAYERS * EXPERTS
EXPERTS_PER_LAYER = 10
EXPERT_BYTES, FROZEN_SHARE = 12_000_000, 1 / 6
REPEATS = 9
RANKS = (20, 100)  # 500 experts on each, and one of each layer


@dataclass(frozen=True)
class Scheduling:
    """One policy.

    Attributes:
        policy: name.
        ranks: of the expert-parallel group, which share the experts. With more than one, each chooses what all of
            them save, as in a job.
        seconds: of choosing the operators of one snapshot; the fastest of several, which other processes delayed least.
        chosen: operators in it.
    """

    policy: str
    ranks: int
    seconds: float
    chosen: int


def scheduling() -> list[Scheduling]:
    """Every policy on 100 layers of 100 experts with uneven load, on one rank and shared by many."""
    layers = [ExpertLayer(f"layer {place}", EXPERTS, EXPERT_BYTES) for place in range(LAYERS)]
    generator = numpy.random.default_rng(0)
    load = tuple(generator.gamma(0.5, 1000.0, EXPERTS) for _ in layers)
    popularity = Popularity(load, load, tuple(numpy.zeros(EXPERTS) for _ in layers))
    budget = Budget(experts_per_layer=EXPERTS_PER_LAYER)
    found = [_timed(name, 1, partial(make, layers), popularity, budget) for name, make in POLICIES.items()]
    sizes: dict[Operator, OperatorBytes] = {
        Expert(place, index): OperatorBytes(EXPERT_BYTES, FROZEN_SHARE * EXPERT_BYTES)
        for place in range(LAYERS)
        for index in range(EXPERTS)
    }
    # All frozen, and a tenth of them active.
    link = Budget(snapshot_bytes=OPERATORS * EXPERT_BYTES * (FROZEN_SHARE + EXPERTS_PER_LAYER / EXPERTS))
    found.append(_timed("MoEvement's window", 1, partial(MoEvement, sizes), popularity, link))
    for ranks in RANKS:
        shared = [replace(layer, expert_parallel=ExpertParallel(ranks)) for layer in layers]
        own = Budget(snapshot_bytes=LAYERS * EXPERTS_PER_LAYER * EXPERT_BYTES / ranks)
        found += [_timed(name, ranks, partial(make, shared), popularity, budget) for name, make in BY_NUMBER.items()]
        found += [_timed(name, ranks, partial(make, shared), popularity, own) for name, make in BY_BYTES.items()]
    return found


def _timed(name: str, ranks: int, make: Callable[[], Policy], popularity: Popularity, budget: Budget) -> Scheduling:
    seconds = []
    for _ in range(REPEATS):
        policy = make()  # anew: a window is found at its beginning alone
        own = replace(popularity)  # what one selection worked out of it is not there for the next
        started = time.perf_counter()
        chosen = policy.select(0, own, budget)
        seconds.append(time.perf_counter() - started)
    return Scheduling(name, ranks, min(seconds), len(chosen))
