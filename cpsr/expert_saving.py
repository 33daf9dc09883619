"""Which experts the next checkpoint of a running job saves, and what failures took from them."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.config import ExpertsConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.catching_up import CatchingUp, Missed
from cpsr.experts.dynamic_k import DynamicK
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.lost_tokens import LostTokens
from cpsr.experts.measures import Measure
from cpsr.experts.missed_iterations import MissedIterations
from cpsr.experts.named import measure_named, policy_named
from cpsr.experts.naming import Naming, experts_of
from cpsr.experts.operators import Expert, ModelOperators, check_shared
from cpsr.experts.popularity import PerExpert, Popularity, zeros
from cpsr.experts.recovering import Recovering
from cpsr.experts.saved import SavedExperts
from cpsr.experts.token_counts import HookedTokenCounts
from cpsr.experts.two_level import copied_with
from cpsr.group import Group
from cpsr.state import Shard

__all__ = ["ExpertSaving", "trained_experts", "unit_name", "units_of"]

logger = logging.getLogger(__name__)

# Enough writes that one slow one does not change the bandwidth, and few enough that it follows the disk.
MEASURED_SAVES = 5
# Policies whose selections follow one another whatever the load: what was not committed has to come again.
IN_TURN = ("sequential", "window")
# Policies that save what the disk takes, which is measured.
BY_BYTES = ("moetion", "window")


class ExpertSaving:
    """Chooses experts for checkpoints, alike on all ranks, and accounts for those that were not chosen.

    Every checkpoint holds everything but experts whole; experts are chosen one by one (*units*). For a checkpoint::

        units = saving.choose(newest_committed, whole=False)     # all ranks
        copied = saving.copied                                   # those that its snapshot takes from the device
        ...                                                      # its small state has saving.state_dict()
        saving.began(iteration)                                  # unless it was skipped

    A life that begins with a checkpoint gives what that holds to `load_state_dict`, then calls `restored`. So does a
    roll-back, after `forget`. Popularity is counted anew in each life.

    Made by `of`.

    Attributes:
        units: operator name in this rank's shard -> unit, for experts' parameters alone.
        trained: see `trained_experts`.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        naming: Naming,
        operators: ModelOperators,
        counts: HookedTokenCounts,
        shard: Shard,
        config: ExpertsConfig,
        group: Group,
    ) -> None:
        self.units = units_of(operators, shard)
        self.trained = trained_experts(naming, shard, group)
        self._adapter = adapter
        self._counts = counts
        self._config = config
        self._group = group
        sizes = _expert_bytes(operators, shard, group)
        self._layers = tuple(
            # One byte at least: a policy does not know experts that take nothing, as those that are not trained.
            replace(layer, expert_bytes=max(1, *size.tolist()))
            for layer, size in zip(_layers(operators), sizes, strict=True)
        )
        self._non_expert_bytes = shard.state_bytes - sum(shard.operators[name].state_bytes for name in self.units)
        self._written_beside_bytes: float = self._non_expert_bytes
        self._policy = policy_named(config.policy, self._layers, config.experts_per_layer, config.lost_portion_limit)
        self._measure: Measure | None = None
        self._saved = SavedExperts(self._layers, adapter.iteration)
        self._lost = LostTokens(self._layers)
        self._recovering = Recovering(self._layers, config.recovering_capacity_fraction)
        self._raised = [False] * len(self._layers)  # capacity, by layer
        self._missed = MissedIterations(config.catch_up_step_factor) if config.stale == "catch_up" else None
        self._catching_up = None if self._missed is None else CatchingUp(adapter.optimizer)
        self._chosen: frozenset[Expert] | None = None  # of a checkpoint that has not begun yet
        self._copied: frozenset[Expert] | None = None  # for its snapshot; None: all
        self._again: deque[frozenset[Expert]] = deque()  # selections that were not committed
        self._step = 0
        self._iteration = adapter.iteration
        self._writes: deque[float] = deque(maxlen=MEASURED_SAVES)  # bytes per second
        self._copies: deque[float] = deque(maxlen=MEASURED_SAVES)  # likewise, to host memory
        self._overlaps: deque[float] = deque(maxlen=MEASURED_SAVES)  # seconds that training gave them
        self._interval_seconds = math.nan
        self._said_no_limit = False

    @staticmethod
    def of(adapter: EngineAdapter, shard: Shard, config: ExpertsConfig, group: Group) -> "ExpertSaving | None":
        """What a configuration asks for; None for the policy `none`. A collective.

        Raises:
            ConfigError: the model has no layers of experts, or one that the ranks cannot share; see `check_shared`.
            UnsupportedEngineError: see `check_shared`, `EngineAdapter.expert_operators` and `token_counts`.
        """
        if config.policy == "none":
            return None
        naming, operators, counts = adapter.expert_naming(), adapter.expert_operators(), None
        check_shared(operators, group.gather)
        if operators is not None and operators.layer_names:
            counts = adapter.token_counts(probabilities=config.popularity == "soft")
        if naming is None or operators is None or counts is None:
            raise ConfigError(
                f"experts.policy = {config.policy!r}, and the model has no layers of experts that CPSR knows: set it "
                "to none, or tell TorchAdapter of them (experts=MixtureOfExperts(...))"
            )
        return ExpertSaving(adapter, naming, operators, counts, shard, config, group)

    def shares_rest(self, non_expert_bytes: float | None) -> None:
        """Others write some of what this rank holds: on average it writes so many bytes beside experts; None: all."""
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

    def choose(
        self, committed_iteration: int | None, *, whole: bool, source_iteration: int | None = None
    ) -> frozenset[str] | None:
        """Units of all ranks that a checkpoint of this iteration saves; a collective that gives all ranks the same.

        Args:
            committed_iteration: newest committed checkpoint by rank 0's word, which alone counts. What was chosen for
                an older one that was not seen here as the newest is given back, and counts as not saved.
            whole: all must be saved: the first checkpoint of a life or an attempt, the last one, one that is asked for.
                The word of any rank is enough.
            source_iteration: of the snapshot from which experts can be taken over that are not copied; where it is
                not the same on all ranks all are copied, so that ranks with the same experts hold the same of them.

        Returns:
            None for all of them.
        """
        here = [committed_iteration, self._bytes_in_an_interval(), whole, self._bytes_overlapped(), source_iteration]
        told = self._group.gather(here)
        self._take()
        given_back = self._saved.settle(told[0][0])
        if self._config.policy in IN_TURN:
            # Whoever asked for a whole one sees to it himself that there is one.
            self._again += [one for one in given_back if len(one) < len(self._saved.experts)]
        if any(part[2] for part in told):
            self._again.clear()
            self._chosen, self._copied = frozenset(self._saved.experts), None
            return None
        self._chosen = self._again[0] if self._again else self._selected([part[1] for part in told])
        self._copied = self._to_copy(self._chosen, [part[3] for part in told], {part[4] for part in told})
        return frozenset(map(unit_name, self._chosen))

    @property
    def copied(self) -> frozenset[str] | None:
        """Units of all ranks that the snapshot of the last choice copies from the device; None for all of them."""
        return None if self._copied is None else frozenset(map(unit_name, self._copied))

    def began(self, iteration: int) -> None:
        """The checkpoint of this iteration has begun, with what was chosen last."""
        assert self._chosen is not None, "began() without choose()"
        self._saved.begun(iteration, self._chosen, self._copied)
        if self._again and self._again[0] == self._chosen:
            self._again.popleft()
        else:
            self._step += 1
        self._chosen = None

    def note_saved(self, saved_bytes: int, write_seconds: float, interval_seconds: float) -> None:
        """What a checkpoint cost this rank; policies by bytes go by it.

        Args:
            saved_bytes: that this rank wrote.
            write_seconds: that it took beside training.
            interval_seconds: between two checkpoints, as they are now.
        """
        if saved_bytes > 0 and write_seconds > 0:
            self._writes.append(saved_bytes / write_seconds)
            self._interval_seconds = interval_seconds

    def note_copied(self, copied_bytes: int, copy_seconds: float, overlap_seconds: float) -> None:
        """What a snapshot's copy to host memory was; where `memory` is `overlapped` the next ones go by it.

        Args:
            copied_bytes: on this rank.
            copy_seconds: that they took beside training.
            overlap_seconds: from the beginning of the snapshot to the next update, which waits for it.
        """
        if copied_bytes > 0 and copy_seconds > 0 and overlap_seconds > 0:
            self._copies.append(copied_bytes / copy_seconds)
            self._overlaps.append(overlap_seconds)

    # After a failure

    def forget(self) -> None:
        """The weights went back, or others came: what was not taken is dropped, and nothing is under way any more."""
        self._counts.forget()
        if self._catching_up is not None:
            self._catching_up.forget()
        self._iteration = self._adapter.iteration
        self._saved.history.reach(self._iteration)
        self._saved.undone()
        self._again.clear()
        self._chosen = None

    def restored(self, taken_at: Mapping[str, int], iteration: int, *, predicted: bool = False) -> dict[str, Any]:
        """A life begins with experts of these ages; a collective that gives all ranks the same.

        Args:
            taken_at: unit -> iteration of its weights before any prediction, of this rank's experts; of experts that
                no rank names it is `iteration`, and the oldest counts where several ranks hold parts of one.
            iteration: of everything else.
            predicted: predictions stand for what these experts missed, so that they need not make up for it; the
                account counts it all the same.

        Returns:
            Plain data: portion of lost tokens and momentary loss of the run, the portion of this failure, and the
            layers one by one.
        """
        ages = self._oldest(self._group.gather(dict(taken_at)), iteration)
        lost, routed = self._saved.restored(ages, iteration)
        assigned = [float(layer.sum()) for layer in routed]
        missed = sum(float(layer.sum()) for layer in lost)
        portion = missed / sum(assigned) if missed else 0.0
        if missed:
            self._lost.add(lost)
            if not predicted:
                self._recovering.lost(lost)
        if self._missed is not None:
            self._missed.restarted(self._units_taken_at(ages, iteration), iteration)
            if predicted:
                self._missed.forget()
        self._catch_up()
        if isinstance(self._policy, DynamicK):
            self._policy.recovered(missed, sum(assigned))
        self._set_capacities()
        report = self._report(ages, iteration, lost, assigned, portion)
        until = None if self._missed is None else self._missed.made_up_at(iteration)
        return {**report, "predicted": predicted, "caught_up_at_iteration": until}

    def state_dict(self) -> dict[str, Any]:
        """Counts, accounts, and what recovers, for the checkpoint that was chosen for: plain data for `cpsr.codec`."""
        dynamic = self._policy.state_dict() if isinstance(self._policy, DynamicK) else None
        return {
            "saved": self._saved.state_dict(),
            "lost": self._lost.state_dict(),
            "recovering": self._recovering.state_dict(),
            "dynamic_k": dynamic,
            "missed": {} if self._missed is None else self._missed.state_dict(),
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; an empty one, of a checkpoint that was saved without, begins anew.

        Raises:
            ValueError: it is of a model with other layers of experts.
        """
        self.forget()
        saved = SavedExperts(self._layers, self._iteration)
        lost = LostTokens(self._layers)
        recovering = Recovering(self._layers, self._config.recovering_capacity_fraction)
        if state:
            saved.load_state_dict(state["saved"])
            lost.load_state_dict(state["lost"])
            recovering.load_state_dict(state["recovering"])
            if isinstance(self._policy, DynamicK) and state["dynamic_k"] is not None:
                self._policy.load_state_dict(state["dynamic_k"])
            self._step = state["step"]
        self._saved, self._lost, self._recovering = saved, lost, recovering
        self._set_capacities()
        if self._missed is not None:
            self._missed.load_state_dict(state.get("missed", {}), self._iteration)
        self._catch_up()

    @property
    def catching_up(self) -> bool:
        """Whether an expert of some rank makes up for iterations that it missed; the same on all ranks."""
        return self._missed is not None and bool(self._missed.at(self._iteration))

    def close(self) -> None:
        """Take the hooks off, and put the capacities back."""
        self._counts.remove()
        if self._catching_up is not None:
            self._catching_up.close()
        for layer, raised in zip(self._layers, self._raised, strict=True):
            if raised:
                self._adapter.scale_expert_capacity(layer.name, 1.0)
        self._raised = [False] * len(self._layers)

    # Parts of the above

    def _take(self) -> None:
        """Take in what was routed since the last checkpoint; a collective, and the host waits for the device."""
        for counted in self._counts.take():
            if self._measure is None:
                factors = self._counts.capacity_factors
                self._measure = measure_named(self._config.popularity, self._layers, factors, counted.routed)
            self._measure.observe(counted.routed)
            self._saved.history.count(counted.routed.tokens)
            self._recovering.observe(counted.routed.tokens)
        self._saved.history.reach(self._iteration)
        self._set_capacities()

    def _selected(self, budgets: Sequence[float | None]) -> frozenset[Expert]:
        saved = self._saved
        popularity = Popularity(self._scores, saved.unsaved_tokens, saved.ages)
        operators = self._policy.select(self._step, popularity, self._budget(budgets))
        return frozenset(operator for operator in operators if isinstance(operator, Expert))

    @property
    def _scores(self) -> PerExpert:
        return zeros(self._layers) if self._measure is None else self._measure.scores

    def _to_copy(
        self, chosen: frozenset[Expert], measured: Sequence[float | None], sources: Collection[int | None]
    ) -> frozenset[Expert] | None:
        """What the snapshot copies, the same on all ranks: by the rank that can copy least, or all."""
        if self._config.memory != "overlapped" or None in sources or len(sources) > 1:
            return None
        known = [overlapped for overlapped in measured if overlapped is not None]
        if len(known) < len(measured):
            return chosen
        in_memory = Popularity(self._scores, self._saved.uncopied_tokens, self._saved.copy_ages)
        return copied_with(chosen, self._layers, in_memory, min(known))

    def _budget(self, measured: Sequence[float | None]) -> Budget:
        """The same on all ranks: by bytes, that of the rank that can save least."""
        count = self._config.experts_per_layer
        if self._config.policy not in BY_BYTES:
            return Budget(experts_per_layer=count)
        known = [budget for budget in measured if budget is not None]
        if len(known) < len(measured):
            wanted = sum(min(count, layer.experts) * layer.expert_bytes for layer in self._layers)
            return Budget(snapshot_bytes=wanted / self._layers[0].expert_parallel.size)
        # A positive number even where non-expert parts take more than there is: one expert is always saved.
        return Budget(snapshot_bytes=max(1.0, min(known)))

    def _bytes_in_an_interval(self) -> float | None:
        """Of experts, that this rank can write until the next checkpoint; None before anything was measured."""
        if not self._writes:
            return None
        return statistics.median(self._writes) * self._interval_seconds - self._written_beside_bytes

    def _bytes_overlapped(self) -> float | None:
        """Of experts, that this rank can copy until the next update; None before anything was measured."""
        if not self._copies:
            return None
        bandwidth, seconds = statistics.median(self._copies), statistics.median(self._overlaps)
        return Budget.of_link(bandwidth, seconds, self._non_expert_bytes).expert_bytes

    def _oldest(self, told: Iterable[Mapping[str, int]], iteration: int) -> NDArray[numpy.int64]:
        oldest: dict[str, int] = {}
        for ages in told:
            for unit, age in ages.items():
                oldest[unit] = min(age, oldest.get(unit, age))
        names = [unit_name(expert) for expert in self._saved.experts]
        if unknown := oldest.keys() - set(names):
            raise ValueError(f"the model has no expert {min(unknown)}: it has {names[0]} to {names[-1]}")
        return numpy.array([oldest.get(name, iteration) for name in names])

    def _set_capacities(self) -> None:
        """Raise the limit of layers with experts that recover, and put it back where none does any more."""
        raised = 1 + self._config.recovering_capacity_fraction
        for place, (layer, recovers) in enumerate(zip(self._layers, self._recovering.in_layers, strict=True)):
            if recovers == self._raised[place]:
                continue
            self._raised[place] = recovers
            limited = self._adapter.scale_expert_capacity(layer.name, raised if recovers else 1.0)
            if not limited and not self._said_no_limit and self._group.rank == 0:
                self._said_no_limit = True
                logger.info(
                    "layer %r has experts that recover, and no limit to the tokens which they take that could be "
                    "raised: they make up for lost tokens as training goes on (said once)",
                    layer.name,
                )

    def _catch_up(self) -> None:
        """From now on steps are longer for what is missing now."""
        if self._missed is None or self._catching_up is None:
            return
        missed = self._missed.at(self._iteration)
        operators = self._adapter.shard().operators if missed else {}
        late = {
            name: Missed(operators[name].parameter.values, missed[unit])
            for name, unit in self.units.items()
            if unit in missed
        }
        self._catching_up.begin(late, self._missed.step_factor)

    def _units_taken_at(self, ages: NDArray[numpy.int64], iteration: int) -> dict[str, int]:
        units = map(unit_name, self._saved.experts)
        return {unit: taken for unit, taken in zip(units, ages.tolist(), strict=True) if taken < iteration}

    def _report(
        self,
        ages: NDArray[numpy.int64],
        iteration: int,
        lost: PerExpert,
        assigned: Sequence[float],
        portion: float,
    ) -> dict[str, Any]:
        account = self._lost
        momentary = account.momentary(assigned)
        told = zip(
            self._layers, self._saved.history.split(ages), lost, account.by_layer(assigned), assigned, strict=True
        )
        return {
            "iteration": iteration,
            "lost_portion": portion,
            "lost_portion_of_run": account.portion(assigned),
            "momentary_loss_of_run": {"total": momentary.total, "mean": momentary.mean},
            "harmless": account.is_harmless(assigned),
            "experts_per_layer": self._experts_per_layer,
            "layers": [
                {
                    "layer": layer.name,
                    "stale_experts": int((taken < iteration).sum()),
                    "oldest_iteration": int(taken.min()),
                    "lost_tokens": float(now.sum()),
                    "lost_fraction_of_run": float(fraction),
                    "assigned_tokens": whole,
                }
                for layer, taken, now, fraction, whole in told
            ],
        }

    @property
    def checkpoints_of_a_round(self) -> int | None:
        """Within which each expert is saved once; None where popularity or bytes decide how often each is."""
        if self._config.policy != "sequential":
            return None
        return max(-(-layer.experts // self._config.experts_per_layer) for layer in self._layers)

    @property
    def _experts_per_layer(self) -> int | None:
        """K; None where bytes decide."""
        if isinstance(self._policy, DynamicK):
            return self._policy.experts_per_layer
        return None if self._config.policy in BY_BYTES else self._config.experts_per_layer


def unit_name(expert: Expert) -> str:
    """How an expert is called in checkpoints: layer and index, `00000-00012`."""
    return f"{expert.layer:05d}-{expert.index:05d}"


def units_of(operators: ModelOperators, shard: Shard) -> dict[str, str]:
    """Operator name in the shard -> `unit_name` of its expert, for experts' parameters alone."""
    return {
        name: unit_name(operator)
        for operator, names in operators.parameters.items()
        for name in names
        if isinstance(operator, Expert) and name in shard.operators
    }


def trained_experts(naming: Naming, shard: Shard, group: Group) -> frozenset[str]:
    """Names of the experts' parameters that some rank trains, what `missing_experts` has to find; a collective."""
    told = group.gather(list(experts_of(naming, shard.operators)))
    return frozenset(name for names in told for name in names)


def _layers(operators: ModelOperators) -> tuple[ExpertLayer, ...]:
    """The layers over all ranks, with experts of no size yet."""
    return operators.layers({name: 1 for names in operators.parameters.values() for name in names})


def _expert_bytes(operators: ModelOperators, shard: Shard, group: Group) -> list[NDArray[numpy.int64]]:
    """For each layer, what each expert takes of the rank that has most of it; 0 of those that nobody trains."""
    layers = _layers(operators)
    sizes = [torch.zeros(layer.experts, dtype=torch.int64) for layer in layers]
    for operator, names in operators.parameters.items():
        if isinstance(operator, Expert):
            trained = (shard.operators[name] for name in names if name in shard.operators)
            sizes[operator.layer][operator.index] = sum(one.state_bytes for one in trained)
    table = group.reduce(torch.cat(sizes), "max")
    return list(numpy.split(table.numpy(), numpy.cumsum([layer.experts for layer in layers])[:-1]))
