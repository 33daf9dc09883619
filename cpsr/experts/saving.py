"""Which experts the next checkpoint of a running job saves."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.config import ExpertsConfig
from cpsr.engines.adapter import EngineAdapter, Mixture
from cpsr.engines.moe.operators import Expert, ExpertLayer, ModelOperators, check_shared, experts_of
from cpsr.engines.moe.token_counts import zeros
from cpsr.errors import ConfigError
from cpsr.experts.account import ExpertAccount, Loss
from cpsr.experts.memory_turns import MemoryTurns
from cpsr.experts.moetion import Moetion
from cpsr.experts.policies import Budget, DynamicK, Load, LoadAware, Policy, Sequential
from cpsr.experts.tokens import TokenHistory
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["ExpertSaving", "policy_named", "trained_experts", "unit_name", "units_of"]

# Enough writes that one slow write changes little, few enough that the bandwidth follows the disk.
MEASURED_SAVES = 5


class ExpertSaving:
    """Chooses experts for checkpoints, the same on all ranks, and keeps the account of those that were not chosen.

    Every checkpoint holds everything but experts whole; experts are chosen one by one (*units*). For a checkpoint::

        units = saving.choose(iteration, whole=False)     # all ranks
        ...                                               # its small state has saving.state_dict()

    A life that begins with a checkpoint passes its state to `load_state_dict`, then calls `restored`. A roll-back does
    the same after `forget`. Each life counts popularity from zero.

    Made by `of`.

    Attributes:
        units: operator name in this rank's shard -> unit, for experts' parameters alone.
        trained: see `trained_experts`.
        in_memory: which experts snapshots in host memory copy.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        mixture: Mixture,
        operators: ModelOperators,
        shard: Shard,
        config: ExpertsConfig,
        group: Group,
    ) -> None:
        self.units = units_of(operators, shard)
        self.trained = trained_experts(mixture, shard, group)
        self._adapter = adapter
        self._counts = mixture.token_counts()
        self._config = config
        self._group = group
        self._layers = sized_layers(operators, shard, group)
        self._non_expert_bytes = shard.state_bytes - sum(shard.operators[name].state_bytes for name in self.units)
        self._written_beside_bytes: float = self._non_expert_bytes
        sizes = {name: shard.operators[name].state_bytes for name in self.units}
        self.in_memory = MemoryTurns(self.units, sizes, self._non_expert_bytes)
        self._policy = policy_named(config.policy, self._layers, config.experts_per_layer, config.lost_portion_limit)
        self._tokens = zeros(self._layers)  # routed in this life
        self._history = TokenHistory(self._layers, adapter.iteration)
        self._account = ExpertAccount(mixture, self._layers, config.recovering_capacity_fraction)
        self._step = 0
        self._iteration = adapter.iteration
        self._writes: deque[float] = deque(maxlen=MEASURED_SAVES)  # bytes per second
        self._interval_seconds = math.nan

    @staticmethod
    def of(adapter: EngineAdapter, shard: Shard, config: ExpertsConfig, group: Group) -> "ExpertSaving | None":
        """The configured instance; None for the policy `none`. A collective.

        Raises:
            ConfigError: the model has no layers of experts, or one that the ranks cannot share; see `check_shared`.
            UnsupportedEngineError: see `check_shared`, `Mixture.operators`.
        """
        if config.policy == "none":
            return None
        mixture = adapter.mixture
        operators = None if mixture is None else mixture.operators()
        check_shared(operators, group.gather)
        if mixture is None or operators is None or not operators.layer_names:
            raise ConfigError(
                f"experts.policy = {config.policy!r}, and the model has no layers of experts that CPSR knows: set it "
                "to none, or tell TorchAdapter of them (experts=MixtureOfExperts(...))"
            )
        return ExpertSaving(adapter, mixture, operators, shard, config, group)

    def shares_rest(self, non_expert_bytes: float | None) -> None:
        """Bytes beside experts that this rank writes on average; other ranks write some replicas. None: all."""
        self._written_beside_bytes = self._non_expert_bytes if non_expert_bytes is None else non_expert_bytes

    # On every step; nothing here waits for the device

    def begin_forward(self) -> None:
        """A training forward begins: `StepObserver.on_forward`."""
        self._counts.begin_forward()

    def end_iteration(self, iteration: int, applied: bool) -> None:
        """A step is complete: `StepObserver.after_step`."""
        self._counts.end_iteration(iteration, applied)
        self._iteration = iteration

    # On every checkpoint

    def choose(self, iteration: int, *, whole: bool) -> frozenset[str] | None:
        """Units of all ranks that the checkpoint of this iteration saves, which begins now; the same on all ranks.

        A collective.

        Args:
            iteration: of the checkpoint.
            whole: all must be saved: the first checkpoint of a life or an attempt, the last one, one that is asked for,
                and the one after a checkpoint that failed. One rank that asks for it is enough.

        Returns:
            None for all of them.
        """
        gathered = self._group.gather([self._bytes_in_an_interval(), whole, self.in_memory.wanted_rounds()])
        self.in_memory.agree(max(part[2] for part in gathered))
        self._take()
        every = any(part[1] for part in gathered)
        load = Load(self._history.unsaved_tokens, self._history.ages)
        budget = self._budget([part[0] for part in gathered])
        chosen = self._history.experts if every else self._policy.select(self._step, load, budget)
        self._history.begun(iteration, chosen)
        self._step += 1
        return None if every else frozenset(map(unit_name, chosen))

    def note_saved(self, saved_bytes: int, write_seconds: float, interval_seconds: float) -> None:
        """Record the cost of a checkpoint on this rank, which policies by bytes use.

        Args:
            saved_bytes: that this rank wrote.
            write_seconds: that it took beside training.
            interval_seconds: between two checkpoints, as they are now.
        """
        if saved_bytes > 0 and write_seconds > 0:
            self._writes.append(saved_bytes / write_seconds)
            self._interval_seconds = interval_seconds

    # After a failure

    def forget(self) -> None:
        """The weights were rewound or replaced: drop counts of undone steps."""
        self._counts.forget()
        self._iteration = self._adapter.iteration
        self._history.reach(self._iteration)
        self._history.undone()

    def restored(self, taken_at: Mapping[str, int], iteration: int) -> dict[str, Any]:
        """A life begins with experts of these ages; a collective that gives all ranks the same.

        Args:
            taken_at: unit -> iteration of its weights, of this rank's experts; of experts that
                no rank names it is `iteration`, and the oldest counts where several ranks hold parts of one.
            iteration: of everything else.

        Returns:
            Plain data: portion of lost tokens and momentary loss of the run, the portion of this failure, and the
            layers one by one.
        """
        ages = self._oldest(self._group.gather(dict(taken_at)), iteration)
        loss = Loss(*self._history.restored(ages, iteration))
        self._account.restored(loss)
        if isinstance(self._policy, DynamicK):
            self._policy.recovered(loss.missed, sum(loss.assigned))
        report = self._account.report(loss, self._history.split(ages), iteration)
        return {**report, "experts_per_layer": self._experts_per_layer}

    def state_dict(self) -> dict[str, Any]:
        """Counts, accounts and recovering experts, for the chosen checkpoint: plain data."""
        dynamic = self._policy.state_dict() if isinstance(self._policy, DynamicK) else None
        return {
            "tokens": self._history.state_dict(),
            "dynamic_k": dynamic,
            "step": self._step,
            **self._account.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; an empty one, of a checkpoint that was saved without, begins anew.

        Raises:
            ValueError: it is of a model with other layers of experts.
        """
        self.forget()
        history = TokenHistory(self._layers, self._iteration)
        if state:
            history.load_state_dict(state["tokens"])
        self._account.load_state_dict(state)
        self._history = history
        if state:
            if isinstance(self._policy, DynamicK) and state["dynamic_k"] is not None:
                self._policy.load_state_dict(state["dynamic_k"])
            self._step = state["step"]

    @property
    def popularity(self) -> dict[str, float]:
        """Operator -> tokens of its expert in this life, for this rank's experts; empty before any was counted."""
        tokens = numpy.concatenate(self._tokens).tolist()
        if not any(tokens):
            return {}
        of_units = dict(zip(map(unit_name, self._history.experts), tokens, strict=True))
        return {name: of_units[unit] for name, unit in self.units.items()}

    def close(self) -> None:
        """Remove the hooks, and restore the capacities."""
        self._counts.remove()
        self._account.close()

    # Parts of the above

    def _take(self) -> None:
        """Add tokens routed since the last checkpoint; a collective, and the host waits for the device."""
        for counted in self._counts.take():
            self._tokens = tuple(sums + new for sums, new in zip(self._tokens, counted.tokens, strict=True))
            self._history.count(counted.tokens)
            self._account.observe(counted.tokens)
        self._history.reach(self._iteration)
        self._account.set_capacities()

    def _budget(self, measured: Sequence[float | None]) -> Budget:
        """The budget, equal on all ranks: by bytes, that of the rank that can save least."""
        count = self._config.experts_per_layer
        if self._config.policy != "moetion":
            return Budget(experts_per_layer=count)
        known = [budget for budget in measured if budget is not None]
        if len(known) < len(measured):
            wanted = sum(min(count, layer.experts) * layer.expert_bytes for layer in self._layers)
            return Budget(snapshot_bytes=wanted / self._layers[0].expert_parallel.size)
        # A positive number even where non-expert parts take more than there is: one expert is always saved.
        return Budget(snapshot_bytes=max(1.0, min(known)))

    def _bytes_in_an_interval(self) -> float | None:
        """Bytes of experts that this rank can write until the next checkpoint; None before any measurement."""
        if not self._writes:
            return None
        return statistics.median(self._writes) * self._interval_seconds - self._written_beside_bytes

    def _oldest(self, taken_at: Iterable[Mapping[str, int]], iteration: int) -> NDArray[numpy.int64]:
        """The oldest iteration of each expert over all ranks' reports, `(experts of all layers,)`."""
        oldest: dict[str, int] = {}
        for ages in taken_at:
            for unit, age in ages.items():
                oldest[unit] = min(age, oldest.get(unit, age))
        names = [unit_name(expert) for expert in self._history.experts]
        if unknown := oldest.keys() - set(names):
            raise ValueError(f"the model has no expert {min(unknown)}: it has {names[0]} to {names[-1]}")
        return numpy.array([oldest.get(name, iteration) for name in names])

    @property
    def _experts_per_layer(self) -> int | None:
        """K; None where bytes decide."""
        if isinstance(self._policy, DynamicK):
            return self._policy.experts_per_layer
        return None if self._config.policy == "moetion" else self._config.experts_per_layer


def policy_named(name: str, layers: Sequence[ExpertLayer], experts_per_layer: int, lost_portion_limit: float) -> Policy:
    """A policy that selects among the experts of all ranks.

    Args:
        name: of `ExpertsConfig.policy`, but for `none`.
        layers: of the model.
        experts_per_layer: K with which `dynamic_k` starts.
        lost_portion_limit: at which it doubles.
    """
    if name == "dynamic_k":
        return DynamicK(layers, LoadAware(layers), experts_per_layer, lost_portion_limit)
    plain: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
        "sequential": Sequential,
        "load_aware": LoadAware,
        "moetion": Moetion,
    }
    return plain[name](layers)


def unit_name(expert: Expert) -> str:
    """Name of an expert in checkpoints: layer and index, `00000-00012`."""
    return f"{expert.layer:05d}-{expert.index:05d}"


def units_of(operators: ModelOperators, shard: Shard) -> dict[str, str]:
    """Operator name in the shard -> `unit_name` of its expert, for experts' parameters alone."""
    return {
        name: unit_name(expert)
        for expert, names in operators.parameters.items()
        for name in names
        if name in shard.operators
    }


def trained_experts(mixture: Mixture, shard: Shard, group: Group) -> frozenset[str]:
    """Names of the experts' parameters that some rank trains, which `wrong_experts` must find; a collective."""
    gathered = group.gather(list(experts_of(mixture, shard.operators)))
    return frozenset(name for names in gathered for name in names)


def sized_layers(operators: ModelOperators, shard: Shard, group: Group) -> tuple[ExpertLayer, ...]:
    """The layers over all ranks, each with the bytes of its largest expert; a collective.

    An expert belongs to the rank that has most of it. Experts that no rank trains count one byte: policies need a
    positive size.
    """
    layers = operators.layers()
    sizes = [torch.zeros(layer.experts, dtype=torch.int64, device="cpu") for layer in layers]
    for expert, names in operators.parameters.items():
        trained = (shard.operators[name] for name in names if name in shard.operators)
        sizes[expert.layer][expert.index] = sum(one.state_bytes for one in trained)
    table = group.reduce(torch.cat(sizes), "max")
    by_layer = numpy.split(table.numpy(), numpy.cumsum([layer.experts for layer in layers])[:-1])
    return tuple(
        replace(layer, expert_bytes=max(1, *size.tolist())) for layer, size in zip(layers, by_layer, strict=True)
    )
