"""Which experts the next checkpoint of a running job saves."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.config import ExpertsConfig
from cpsr.engines.adapter import Mixture
from cpsr.engines.moe.operators import Expert, ExpertLayer, ModelOperators, experts_of
from cpsr.experts.account import ExpertAccount, Loss
from cpsr.experts.in_memory import Agreed, InMemory
from cpsr.experts.moetion import Moetion
from cpsr.experts.policies import Budget, DynamicK, Load, LoadAware, Policy, Sequential
from cpsr.experts.routed import RoutedTokens, unit_name
from cpsr.experts.tokens import TokenHistory
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["ExpertSaving", "policy_named", "trained_experts"]

# Enough writes that one slow write changes little, few enough that the bandwidth follows the disk.
MEASURED_SAVES = 5


class ExpertSaving:
    """Chooses experts for checkpoints, the same on all ranks, and keeps the account of those that were not chosen.

    Every checkpoint holds everything but experts whole; experts are chosen one by one (*units*). For a checkpoint::

        units = saving.choose(iteration, whole=False)     # all ranks
        ...                                               # its small state has saving.state_dict()

    A life that begins with a checkpoint passes its state to `load_state_dict`, then calls `restored`. A roll-back does
    the same after `forget`.

    Args:
        tokens: counts those of this life.
        mixture: of the engine.
        shard: of this rank.
        config: with a policy.
        group: the ranks; making it is a collective.

    Attributes:
        tokens: as given.
        units: operator name in this rank's shard -> unit, for experts' parameters alone.
        in_memory: which experts snapshots in host memory copy.
    """

    def __init__(
        self, tokens: RoutedTokens, mixture: Mixture, shard: Shard, config: ExpertsConfig, group: Group
    ) -> None:
        self.tokens, self.units = tokens, tokens.units
        self._counted = tokens.sums  # of which the history knows
        self._config = config
        self._group = group
        self._layers = sized_layers(tokens.operators, shard, group)
        self._non_expert_bytes = shard.state_bytes - sum(shard.operators[name].state_bytes for name in self.units)
        self._written_beside_bytes: float = self._non_expert_bytes
        policy_of = partial(policy_named, config.policy, lost_portion_limit=config.lost_portion_limit)
        by_bytes, owners = config.policy == "moetion", owning_ranks(tokens, group)
        self._stages = stages_of(tokens, group) if by_bytes else [((), tuple(range(len(self._layers))))]
        self._policies = [policy_of([self._layers[place] for place in places]) for _, places in self._stages]
        self.in_memory = InMemory(tokens, self._layers, policy_of, by_bytes=by_bytes, owners=owners)
        self._history = TokenHistory(self._layers, tokens.iteration)
        self._account = ExpertAccount(mixture, self._layers, config.recovering_capacity_fraction)
        self._rates = numpy.zeros(len(self._history.experts))
        self._step = 0
        self._writes: deque[float] = deque(maxlen=MEASURED_SAVES)  # bytes per second
        self._interval_seconds = math.nan

    def shares_rest(self, written_bytes: float | None) -> None:
        """Bytes beside experts that this rank writes on average; other ranks write some replicas. None: all."""
        self._written_beside_bytes = self._non_expert_bytes if written_bytes is None else written_bytes

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
        gathered = self._group.gather([self._bytes_in_an_interval(), whole, self.in_memory.wanted_bytes()])
        self._take()
        self._agree_in_memory([part[2] for part in gathered])
        history = self._history
        load = Load(
            history.unsaved_tokens,
            history.ages,
            history.interval_tokens,
            history.run_tokens,
            self._account.lost_tokens,
        )
        chosen: Sequence[Expert] = history.experts
        if not any(part[1] for part in gathered):
            chosen = [*self._selected(load, [part[0] for part in gathered])]
        history.begun(iteration, chosen)
        self.in_memory.copies_all(iteration)
        self._step += 1
        return None if len(chosen) == len(history.experts) else frozenset(map(unit_name, chosen))

    def agree_in_memory(self) -> None:
        """Let snapshots in host memory follow what was measured up to now; a collective."""
        measured = self._group.gather(self.in_memory.wanted_bytes())
        self._take()
        self._agree_in_memory(measured)

    def _agree_in_memory(self, measured: Sequence[float | None]) -> None:
        self._rates = self._history.rates(self._rates)
        self.in_memory.agree(Agreed(_least(measured), self._rates, self._history.tokens, self._account.lost_tokens))

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
        self.tokens.forget()
        self._counted = self.tokens.sums
        self._history.reach(self.tokens.iteration)
        self._history.undone()
        self.in_memory.restart(self.tokens.iteration)

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
        return self._account.report(loss, self._history.split(ages), iteration)

    def state_dict(self) -> dict[str, Any]:
        """Counts, accounts and recovering experts, for the chosen checkpoint: plain data."""
        return {"tokens": self._history.state_dict(), "step": self._step, **self._account.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; an empty one, of a checkpoint that was saved without, begins anew.

        Raises:
            ValueError: it is of a model with other layers of experts.
        """
        self.forget()
        history = TokenHistory(self._layers, self.tokens.iteration)
        if state:
            history.load_state_dict(state["tokens"])
        self._account.load_state_dict(state)
        self._history = history
        self._step = state["step"] if state else self._step

    def close(self) -> None:
        """Restore the capacities."""
        self._account.close()

    # Parts of the above

    def _take(self) -> None:
        """Add tokens routed since the last checkpoint; a collective, and the host waits for the device."""
        before, tokens = self._counted, self.tokens
        tokens.take()
        self._counted = tokens.sums
        routed = [now - then for now, then in zip(tokens.sums, before, strict=True)]
        self._history.count(routed)
        self._account.observe(routed)
        self._history.reach(tokens.iteration)
        self._account.set_capacities()

    def _selected(self, load: Load, measured: Sequence[float | None]) -> Iterator[Expert]:
        """Experts for a checkpoint; what ranks have measured is for the layers of their own stage."""
        for (ranks, places), policy in zip(self._stages, self._policies, strict=True):
            tokens, ages = (tuple(one[place] for place in places) for one in (load.unsaved_tokens, load.ages))
            budget = self._budget([self._layers[place] for place in places], [measured[rank] for rank in ranks])
            for expert in policy.select(self._step, replace(load, unsaved_tokens=tokens, ages=ages), budget):
                yield Expert(places[expert.layer], expert.index)

    def _budget(self, layers: Sequence[ExpertLayer], measured: Sequence[float | None]) -> Budget:
        """The budget, equal on all ranks: by bytes, that of the rank of these layers that can save least."""
        count = self._config.experts_per_layer
        if self._config.policy != "moetion":
            return Budget(experts_per_layer=count)
        least = _least(measured)
        if least is None:
            wanted = sum(min(count, layer.experts) * layer.expert_bytes for layer in layers)
            return Budget(snapshot_bytes=wanted / layers[0].expert_parallel.size)
        # A positive number even where non-expert parts take more than there is: one expert is always saved.
        return Budget(snapshot_bytes=max(1.0, least))

    def _bytes_in_an_interval(self) -> float | None:
        """Bytes of experts that this rank can write until the next checkpoint; None before any measurement."""
        if not self.units:
            return math.inf
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


def _least(measured: Sequence[float | None]) -> float | None:
    """Of what ranks measured; None until all have."""
    known = [one for one in measured if one is not None]
    return min(known, default=math.inf) if len(known) == len(measured) else None


def policy_named(name: str, layers: Sequence[ExpertLayer], lost_portion_limit: float) -> Policy:
    """A policy that selects among the experts of all ranks.

    Args:
        name: of `ExpertsConfig.policy`, but for `none`.
        layers: of the model.
        lost_portion_limit: of `dynamic_k`.
    """
    if name == "dynamic_k":
        return DynamicK(layers, LoadAware(layers), lost_portion_limit)
    plain: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
        "sequential": Sequential,
        "load_aware": LoadAware,
        "moetion": Moetion,
    }
    return plain[name](layers)


def trained_experts(mixture: Mixture, shard: Shard, group: Group) -> frozenset[str]:
    """Names of the experts' parameters that some rank trains, which `wrong_experts` must find; a collective."""
    gathered = group.gather(list(experts_of(mixture, shard.operators)))
    return frozenset(name for names in gathered for name in names)


def owning_ranks(tokens: RoutedTokens, group: Group) -> int | None:
    """How many ranks share the experts of this rank's layers; a collective.

    None where several ranks hold parts of one expert, or copies of it.
    """
    elsewhere = sorted(tokens.operators.elsewhere)
    gathered = group.gather([sorted({*tokens.units.values()}), elsewhere])
    held = [unit for units, _ in gathered for unit in units]
    return None if len({*held}) < len(held) else sum(layers == elsewhere for _, layers in gathered)


def stages_of(tokens: RoutedTokens, group: Group) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ranks and the places of their layers, for each stage of a pipeline; a collective."""
    elsewhere = group.gather(sorted(tokens.operators.elsewhere))
    stages: dict[tuple[int, ...], list[int]] = {}
    for place, layer in enumerate(tokens.layers):
        ranks = tuple(rank for rank, names in enumerate(elsewhere) if layer.name not in names)
        stages.setdefault(ranks, []).append(place)
    return [(ranks, tuple(places)) for ranks, places in stages.items()]


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
