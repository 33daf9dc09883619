"""A policy along a run: what it saves at each checkpoint, and what it would lose."""

import copy
from collections.abc import Sequence
from typing import Any

from cpsr.benchmarks.experts.policies import policy_of_job
from cpsr.benchmarks.experts.saved import Saved
from cpsr.benchmarks.experts.training import Training
from cpsr.benchmarks.experts.unsaved import UnsavedTokens
from cpsr.engines.moe.measures import HardCount
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.popularity import Popularity
from cpsr.engines.moe.token_counts import Counted
from cpsr.experts.budget import Budget
from cpsr.experts.catching_up import CatchingUp, Missed
from cpsr.experts.dynamic_k import DynamicK
from cpsr.experts.lost_tokens import LostTokens
from cpsr.experts.missed_iterations import MissedIterations
from cpsr.experts.recovering import Recovering

__all__ = ["Followed", "rank_budget"]


def rank_budget(training: Training, experts_per_layer: int) -> Budget:
    """What one rank saves where all ranks together save so many experts of each layer, to the nearest expert above.

    It is for experts alone, as a job's own: the parts that every snapshot holds whole are no matter of the policies.
    """
    layers = training.layers
    experts = -(-experts_per_layer * len(layers) // layers[0].expert_parallel.size)
    return Budget(snapshot_bytes=experts * max(layer.expert_bytes for layer in layers))


class Followed:
    """One policy's snapshots of one rank, its account of unsaved tokens, and that of lost ones.

    Args:
        name: of the policy.
        training: at the iteration at which everything is saved whole, to begin with.
        budget: of one rank and snapshot.

    Attributes:
        saved: what of this rank's operators there is.
        lost: what failures took.
        saved_experts: in each checkpoint since the last failure, of all ranks.
    """

    def __init__(self, name: str, training: Training, budget: Budget) -> None:
        self.name = name
        self._training = training
        self._budget = budget
        self._policy = policy_of_job(name, training.layers, budget.experts_in_each(training.layers))
        self._measure = HardCount(training.layers)
        self._ledger = UnsavedTokens(training.layers)
        self._step = 0
        self._more_capacity = 0.0
        self._recovering = Recovering(training.layers, 0.0)
        self._catching_up: CatchingUp | None = None
        self._missed = MissedIterations(step_factor=1.0)
        self._whole: Saved | None = None  # what is gone back to in place of `saved`
        self.lost = LostTokens(training.layers)
        self.saved_experts: tuple[int, ...] = ()
        self.saved = Saved(training.adapter.shard(), training.iteration, training.adapter.scalars())

    def fork(self, more_capacity: float, step_factor: float = 1.0, whole: Saved | None = None) -> "Followed":
        """The same, which goes its own way from here.

        Args:
            more_capacity: fraction by which the capacity of layers is raised until what experts lost is made up.
            step_factor: of the steps of older experts, until they have made up for what they missed.
            whole: everything at the last checkpoint, where failures are to bring back every expert as it was there; it
                goes its own way, too.
        """
        # Accounts replace what they hold: a shallow copy of each is one of its own. A policy may hold others.
        other = copy.copy(self)
        other._policy, other._measure = copy.deepcopy(self._policy), copy.copy(self._measure)
        other._ledger, other.lost, other.saved = copy.copy(self._ledger), copy.copy(self.lost), self.saved.fork()
        other._more_capacity = more_capacity
        other._recovering = Recovering(self._training.layers, more_capacity)
        if step_factor > 1:
            other._catching_up = CatchingUp(self._training.adapter.optimizer)
        other._missed = MissedIterations(step_factor)
        other._whole = None if whole is None else whole.fork()
        return other

    def close(self) -> None:
        """The run is over: nothing is left on the training."""
        if self._catching_up is not None:
            self._catching_up.close()

    def save(self, routed: Sequence[Counted]) -> None:
        """Take a checkpoint now.

        Args:
            routed: since the last one.
        """
        for one in routed:
            self._measure.observe(one.routed)
            self._ledger.observe(one.routed.tokens)
            self._recovering.observe(one.routed.tokens)
        self._set_capacities()
        self._step += 1
        popularity = Popularity(self._measure.scores, self._ledger.tokens, self._ledger.ages)
        chosen = self._policy.select(self._step, popularity, self._budget)
        experts = {operator for operator in chosen if isinstance(operator, Expert)}
        training = self._training
        names = [
            name
            for operator, parameters in training.operators.parameters.items()
            if not isinstance(operator, Expert) or operator in experts
            for name in parameters
        ]
        self.saved.save(training.adapter.shard(), names, training.iteration, training.adapter.scalars())
        if self._whole is not None:
            self._whole.save(
                training.adapter.shard(), self._whole.operators, training.iteration, training.adapter.scalars()
            )
        self._ledger.saved(experts)
        self.saved_experts = (*self.saved_experts, len(experts))

    def put_back(self) -> None:
        """Bring the training back to the last checkpoint, with every operator as it was last saved."""
        adapter = self._training.adapter
        (self._whole or self.saved).put_back(adapter.shard())
        adapter.load_scalars(self.saved.scalars)
        adapter.push_down()
        self._training.forget_routed()
        lost = self._ledger.tokens_at_snapshot
        self.lost.add(lost)
        self._recovering.lost(lost)
        if isinstance(self._policy, DynamicK):
            self._policy.recovered(sum(float(layer.sum()) for layer in lost), sum(self._assigned()))
        self._ledger.restored()
        self.saved_experts = ()
        self._set_capacities()
        self._catch_up()

    def _catch_up(self) -> None:
        """Older operators make up for what they miss, and for what they still missed when they were saved."""
        if self._catching_up is not None:
            newest = self.saved.iteration
            operators = self._training.adapter.shard().operators
            self._missed.restarted({name: self.saved.newest(name) for name in operators}, newest)
            missed = self._missed.at(newest)
            late = {name: Missed(operators[name].parameter.values, left) for name, left in missed.items()}
            self._catching_up.begin(late, self._missed.step_factor)

    def _set_capacities(self) -> None:
        for layer, recovers in zip(self._training.layers, self._recovering.in_layers, strict=True):
            self._training.adapter.scale_expert_capacity(layer.name, 1 + self._more_capacity * recovers)

    def ages(self) -> list[int]:
        """Iterations by which each of this rank's experts is older than the last checkpoint."""
        newest = self.saved.iteration
        return [
            newest - self.saved.newest(parameters[0])
            for operator, parameters in self._training.operators.parameters.items()
            if isinstance(operator, Expert)
        ]

    def account(self) -> dict[str, Any]:
        """Portion of lost tokens and MOETION's fractions over the training so far."""
        assigned = self._assigned()
        momentary = self.lost.momentary(assigned)
        return {
            "portion_lost": self.lost.portion(assigned),
            "momentary_total": momentary.total,
            "momentary_mean": momentary.mean,
        }

    def _assigned(self) -> list[float]:
        """Tokens of each layer up to now."""
        return [float(self._training.tokens_per_layer * self._training.iteration)] * len(self._training.layers)
