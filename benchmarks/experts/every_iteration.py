"""A snapshot of some operators after every iteration of a real training, in blocks with it and without."""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from cpsr.benchmarks.experts.followed import rank_budget
from cpsr.benchmarks.experts.names import EVERYTHING, MOETION, STALL_AIM, WINDOW
from cpsr.benchmarks.experts.policies import IN_TURN, POLICIES
from cpsr.benchmarks.experts.training import Training
from cpsr.benchmarks.experts.unsaved import UnsavedTokens
from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.engines.moe.operators import Expert, Operator
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.window import SparseWindow, sparse_window

__all__ = ["BlockPair", "Link", "measure_every_iteration"]

BLOCK_STEPS = 10
SETTLE_STEPS = 1  # the first step after a switch is not timed
WARM_UP_STEPS, LINK_STEPS = 10, 20
WINDOW_SHARE = STALL_AIM / 2  # of what the link moves

# Names of the operators' parameters that the next snapshot takes.
Choose = Callable[[], frozenset[str]]


@dataclass(frozen=True)
class Link:
    """From the training's state to the host memory of its snapshots.

    Attributes:
        bandwidth_bytes_per_second: of copies of everything beside training; of the slowest rank.
        step_seconds: of a training step without snapshots; median.
        state_bytes: of one rank.
    """

    bandwidth_bytes_per_second: float
    step_seconds: float
    state_bytes: int


@dataclass
class BlockPair:
    """A block of steps with a snapshot each, and its neighbour without.

    Attributes:
        with_seconds: of the block.
        without_seconds: of its neighbour.
        stall_seconds: for which each snapshot blocked the training thread.
        snapshot_bytes: of each.
    """

    with_seconds: float = 0.0
    without_seconds: float = 0.0
    stall_seconds: list[float] = field(default_factory=list)
    snapshot_bytes: list[int] = field(default_factory=list)


def measure_every_iteration(training: Training, pairs: int, experts_per_layer: int) -> dict[str, Any]:
    """Every way to choose operators, paired with the same training without snapshots.

    One way is everything. PEC in turn and MOETION save K experts of each layer beside all that is no expert. In a
    window, every operator has its turn, experts and others, the least popular first. The window is the smallest whose
    snapshots take half of the aim's 3% of what the link moves in an iteration. Copies between memories take the time
    of the very cores that train, and the other half is for beginning them.

    Args:
        training: anywhere.
        pairs: of blocks, for each way; an even number.
        experts_per_layer: K.

    Returns:
        Plain data, of this rank: `link`, `window` (its length and whether it fits), `pairs` by way.
    """
    pool = SnapshotPool(training.adapter.shard(), buffers=2)
    try:
        for _ in range(WARM_UP_STEPS):
            training.step()
        link = _measured_link(training, pool)
        chooser = _Chooser(training, experts_per_layer)
        window, in_window = chooser.in_window(WINDOW_SHARE * link.bandwidth_bytes_per_second, link.step_seconds)
        ways: dict[str, Choose] = {
            EVERYTHING: chooser.everything,
            IN_TURN: chooser.in_turn(),
            MOETION: chooser.moetion(),
            WINDOW: in_window,
        }
        measured = {
            name: [asdict(_pair(training, pool, choose, place)) for place in range(pairs)]
            for name, choose in ways.items()
        }
    finally:
        pool.close()
    return {
        "link": asdict(link),
        "window": {"iterations": window.window, "fits": window.fits},
        "pairs": measured,
    }


class _Chooser:
    """Names of what each way takes, iteration by iteration."""

    def __init__(self, training: Training, experts_per_layer: int) -> None:
        self._training = training
        self._parameters = training.operators.parameters
        self._budget = rank_budget(training, experts_per_layer)
        self._ledger = UnsavedTokens(training.layers)

    def everything(self) -> frozenset[str]:
        return self._names(self._parameters)

    def in_turn(self) -> Choose:
        policy, steps, nothing = POLICIES[IN_TURN](self._training.layers), count(), self._popularity()
        return lambda: self._with_rest(policy.select(next(steps), nothing, self._budget))

    def moetion(self) -> Choose:
        policy, steps = POLICIES[MOETION](self._training.layers), count()

        def choose() -> frozenset[str]:
            for one in self._training.routed():
                self._ledger.observe(one.routed.tokens)
            chosen = policy.select(next(steps), self._popularity(), self._budget)
            self._ledger.saved(operator for operator in chosen if isinstance(operator, Expert))
            return self._with_rest(chosen)

        return choose

    def in_window(self, bandwidth_bytes_per_second: float, step_seconds: float) -> tuple[SparseWindow, Choose]:
        """Over all operators, in the order of `_ordered`.

        Nothing is saved of those that are not active: their weights are for a replay, and these are predicted.
        """
        ordered, sizes, steps = self._ordered(), self._training.parameter_bytes, count()
        active = [sum(sizes[name] for name in self._parameters[operator]) for operator in ordered]
        window = sparse_window(active, [0.0] * len(active), step_seconds, bandwidth_bytes_per_second)

        def choose() -> frozenset[str]:
            return self._names(ordered[place] for place in window.schedule[next(steps) % window.window])

        return window, choose

    def _ordered(self) -> list[Operator]:
        """Experts by the tokens they got so far, then the rest."""
        for one in self._training.routed():
            self._ledger.observe(one.routed.tokens)
        tokens = self._ledger.tokens
        experts = [operator for operator in self._parameters if isinstance(operator, Expert)]
        experts.sort(key=lambda expert: float(tokens[expert.layer][expert.index]))
        return [*experts, *(operator for operator in self._parameters if not isinstance(operator, Expert))]

    def _popularity(self) -> Popularity:
        return Popularity(self._ledger.tokens, self._ledger.tokens, self._ledger.ages)

    def _with_rest(self, chosen: Iterable[Operator]) -> frozenset[str]:
        experts = set(chosen)
        return self._names(one for one in self._parameters if one in experts or not isinstance(one, Expert))

    def _names(self, operators: Iterable[Operator]) -> frozenset[str]:
        return frozenset(name for operator in operators for name in self._parameters[operator])


def _measured_link(training: Training, pool: SnapshotPool) -> Link:
    steps, rates = [], []
    size = training.adapter.shard().state_bytes
    for _ in range(LINK_STEPS):
        started = time.perf_counter()
        training.step()
        steps.append(time.perf_counter() - started)
    for _ in range(LINK_STEPS):
        snapshot = pool.begin(training.adapter.shard(), training.iteration, None)
        assert snapshot is not None  # every one before was released
        training.step(before_update=pool.finish)
        rates.append(size / snapshot.copy_seconds)
        pool.release(snapshot)
    slowest = torch.tensor([statistics.median(rates), -statistics.median(steps)], dtype=torch.float64)
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MIN)
    return Link(float(slowest[0]), -float(slowest[1]), size)


def _pair(training: Training, pool: SnapshotPool, choose: Choose, place: int) -> BlockPair:
    """With, without; every second pair the other way round."""
    found = BlockPair()
    for with_snapshots in (True, False) if place % 2 == 0 else (False, True):
        step = partial(_snapshot_step, training, pool, choose, found) if with_snapshots else training.step
        for _ in range(SETTLE_STEPS):
            step()
        started = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            step()
        seconds = time.perf_counter() - started
        if with_snapshots:
            found.with_seconds = seconds
        else:
            found.without_seconds = seconds
    return found


def _snapshot_step(training: Training, pool: SnapshotPool, choose: Choose, found: BlockPair) -> None:
    started = time.perf_counter()
    shard = training.adapter.shard()
    contents = Contents.sparse(frozenset(shard.operators), choose())
    contents = replace(contents, uncopied=contents.carried)
    snapshot = pool.begin(shard, training.iteration, None, contents)
    begun = time.perf_counter() - started
    assert snapshot is not None  # the one before was released
    before = snapshot.stall_seconds
    training.step(before_update=pool.finish)
    found.stall_seconds.append(begun + snapshot.stall_seconds - before)
    found.snapshot_bytes.append(snapshot.shard.state_bytes)
    pool.release(snapshot)
