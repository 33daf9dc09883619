"""Which experts a snapshot in host memory copies: those with the most to lose, as many as make no step longer."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy
from numpy.typing import NDArray

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.engines.moe.token_counts import PerExpert
from cpsr.experts.copy_budget import CopyBudget, Lengthening
from cpsr.experts.policies import Budget, Load, Policy
from cpsr.experts.routed import RoutedTokens, unit_name

__all__ = ["Agreed", "InMemory"]

MEASURED_SNAPSHOTS = 8  # the time between two is the median of this many
KEPT_SNAPSHOTS = 64  # whose token counts are kept, since some may still be sent
# Snapshots come in tens. Of each 1,024, and of the first in any case, the second and fourth ten copy one expert, the
# third and fifth as many as a step hides: these steps are compared.
TEN, COMPARED_TENS, COMPARED_EVERY = 10, range(1, 5), 1024
UNLIKE = 3  # snapshots after each change carry more or less from the buffer before than the later ones


@dataclass(frozen=True)
class Agreed:
    """What the ranks agree on at a checkpoint.

    Attributes:
        expert_bytes: of experts, that a snapshot copies on each rank; None until all have measured it.
        rates: tokens of each expert in an iteration, `(experts of all layers,)`.
        run_tokens: of each expert in the whole run, likewise.
        lost_tokens: see `Load`.
    """

    expert_bytes: float | None
    rates: NDArray[numpy.float64]
    run_tokens: NDArray[numpy.float64]
    lost_tokens: float


class InMemory:
    """Selects experts for the snapshots between checkpoints; nothing here waits for the device or for other ranks.

    Everything that is no expert is in each snapshot. By the policy of checkpoints, but with an account of its own of
    what was routed to each expert since a snapshot has copied it. A checkpoint copies all experts to host memory.

    Where each expert lies on one rank, a rank goes by the tokens of its own batches, as they come to the host. Ranks
    that hold parts or copies of one expert must choose alike: then all go by the tokens of an iteration on which they
    agreed at the last checkpoint.

    An expert counts as copied once the copy is complete. Where ranks must choose alike it does from its selection on:
    a copy that only one rank skips must not change what that rank selects.

    A rank of a pipeline selects among the layers of its stage, in a run that has their tokens alone: of what may be
    lost, each stage has a part by its tokens.

    Args:
        tokens: of this life.
        layers: of the model.
        policy_of: makes what selects among the experts of these layers, of all ranks.
        by_bytes: whether the policy goes by bytes; else by K, as many as fit.
        owners: ranks, where each expert lies on one of them; None where several hold parts of one.

    Source: moetion, Algorithm 1 and section 4.2 (local budget); pec, section 3.2 (snapshot-PEC).
    """

    def __init__(
        self,
        tokens: RoutedTokens,
        layers: Sequence[ExpertLayer],
        policy_of: Callable[[Sequence[ExpertLayer]], Policy],
        *,
        by_bytes: bool,
        owners: int | None,
    ) -> None:
        self._tokens, self._by_bytes, self._owners = tokens, by_bytes, owners
        here = [layer.name not in tokens.operators.elsewhere for layer in layers]
        self._layers = [layer for layer, is_here in zip(layers, here, strict=True) if is_here]
        self._is_own = numpy.repeat(here, [layer.experts for layer in layers])
        self._policy = policy_of(self._layers)
        self._units = [
            [unit_name(Expert(place, index)) for index in range(layer.experts)]
            for place, layer in enumerate(layers)
            if here[place]
        ]
        self._place = {unit: place for place, unit in enumerate(chain.from_iterable(self._units))}
        self._own_bytes = sum(layer.experts_per_rank * layer.expert_bytes for layer in self._layers)  # at most
        self._ends = numpy.cumsum([layer.experts for layer in self._layers], dtype=numpy.int64)[:-1]
        self._copies, self._rest_bytes, self._lengthening = CopyBudget(), 0, Lengthening()
        self._carries: deque[float] = deque([0.0], maxlen=MEASURED_SNAPSHOTS)  # bytes for each one copied of experts
        self._most_bytes = 0.0  # of experts, on which the ranks have agreed: what a step hides
        self._due, self._unlike_until = 0, 0
        self._much: bool | None = None  # to copy by the snapshot that was begun last; None: it is not compared
        self._agreed: Agreed | None = None
        self._step = 0
        self._total = numpy.zeros(len(self._place))  # tokens so far, as this rank reckons with them
        self._learned, self._ages = numpy.zeros((2, len(self._place)))  # of each expert, as memory has it
        self._held: dict[int, NDArray[numpy.float64]] = {}
        self._begun: deque[float] = deque(maxlen=MEASURED_SNAPSHOTS)
        self.restart(tokens.iteration)

    @property
    def units(self) -> Mapping[str, str]:
        """Operator -> its expert, of this rank."""
        return self._tokens.units

    def restart(self, iteration: int) -> None:
        """The run begins, or goes back, to this iteration: its state is not only in memory."""
        self.copies_all(iteration)
        self._book(numpy.ones(len(self._place), dtype=bool))
        self._ages[:] = 0

    def copies_all(self, iteration: int) -> None:
        """The state of this iteration is about to be copied with all experts, as at a checkpoint."""
        self._much = None
        self._lengthening.begin(iteration, None)
        self._unlike_until = self._due + UNLIKE
        self._select_all(iteration)

    def _select_all(self, iteration: int) -> None:
        self._iteration = iteration
        if self._owners is not None:
            self._total = self._routed(self._owners)
        self._select(iteration, numpy.ones(len(self._place), dtype=bool))

    def copied(
        self, part_bytes: Mapping[str, int], copy_seconds: float, overlap_seconds: float, carried_bytes: int = 0
    ) -> None:
        """Learn from a copy to host memory: its bytes of each part, `CopyBudget.note`, and what was copied in it."""
        copied_bytes = sum(part_bytes.values())
        self._copies.note(copied_bytes, copy_seconds, overlap_seconds)
        self._lengthening.moved(copied_bytes + carried_bytes)
        self._rest_bytes = sum(size for part, size in part_bytes.items() if part not in self._place)
        if self._much is False and copied_bytes > self._rest_bytes:
            self._carries.append(carried_bytes / (copied_bytes - self._rest_bytes))
        if self._owners is not None:
            self._book(self._mask([part for part in part_bytes if part in self._place]))

    def _select(self, iteration: int, chosen: NDArray[numpy.bool_]) -> None:
        """A snapshot of these experts begins; keep what its experts have learned from, while it may be sent."""
        self._begun.append(time.perf_counter())
        if self._owners is None:
            self._book(chosen)
            return
        self._held[iteration] = numpy.where(chosen, self._total, self._learned)
        if len(self._held) > KEPT_SNAPSHOTS:
            del self._held[next(iter(self._held))]

    def _book(self, copied: NDArray[numpy.bool_]) -> None:
        self._learned = numpy.where(copied, self._total, self._learned)
        self._ages = numpy.where(copied, 0.0, self._ages + 1)
        self._step += 1

    def wanted_bytes(self) -> float | None:
        """Of experts, that an iteration of this rank hides, and that make it at most 2% longer with all that follows.

        An expert that is copied is carried once into each other buffer. Infinite without experts; None until a copy was
        measured. It may be less than one expert, also less than nothing: where what is no expert makes the step longer
        already, one is copied nevertheless.
        """
        if not self.units:
            return math.inf
        hidden = self._copies.bytes
        if hidden is None:
            return None
        unnoticed = (self._lengthening.bytes - self._rest_bytes) / (1.0 + statistics.median(self._carries))
        return min(hidden - self._rest_bytes, unnoticed)

    def agree(self, agreed: Agreed) -> None:
        """From here on."""
        self._agreed = agreed
        self._most_bytes = max(self._most_bytes, agreed.expert_bytes or 0.0)

    def _due_bytes(self, iteration: int, agreed: Agreed) -> float | None:
        """Of experts, for the snapshot that begins; the same on all ranks."""
        ten, place = divmod(self._due % COMPARED_EVERY, TEN)
        wanted, much = agreed.expert_bytes, ten % 2 == 0
        is_first = self._due < COMPARED_EVERY
        is_compared = wanted is not None and ten in COMPARED_TENS and (is_first or wanted < self._own_bytes)
        if is_compared and place == 0:
            self._unlike_until = self._due + UNLIKE
        self._due += 1
        self._much = much if is_compared and self._due > self._unlike_until else None
        self._lengthening.begin(iteration, self._much)
        if not is_compared:
            return wanted
        return self._most_bytes if much else 1.0

    def left_out(self, iteration: int) -> frozenset[str]:
        """Operators of this rank that the snapshot of this iteration does not copy; all ranks ask for the same ones."""
        agreed = self._agreed
        expert_bytes = None if agreed is None or not self.units else self._due_bytes(iteration, agreed)
        if agreed is None or expert_bytes is None or expert_bytes >= self._own_bytes:
            self._select_all(iteration)
            return frozenset()
        before = self._total
        self._total = self._total_at(iteration, agreed)
        unsaved, passed = self._total - self._learned, float((self._total - before).sum())
        copied = self._mask(self._chosen(self._step, unsaved, self._ages, passed, expert_bytes))
        self._select(iteration, copied)
        return frozenset(name for name, unit in self._tokens.units.items() if not copied[self._place[unit]])

    # What goes to other machines, in threads of their own

    @property
    def period_seconds(self) -> float:
        """Between two snapshots."""
        begun = list(self._begun)
        return statistics.median(later - earlier for earlier, later in pairwise(begun)) if len(begun) > 1 else math.inf

    def held_tokens(self, iteration: int) -> NDArray[numpy.float64] | None:
        """Tokens that each expert in a snapshot has learned from; None if experts are shared, and none is left out."""
        return None if self._owners is None else self._held.get(iteration)

    def for_peers(
        self,
        step: int,
        unsent: NDArray[numpy.float64],
        ages: NDArray[numpy.float64],
        link_bytes: float,
        changed: Collection[str],
    ) -> frozenset[str]:
        """Of the experts that have changed, those that a holder is sent; at least one.

        Args:
            step: number of the snapshot in this place of the holder.
            unsent: tokens of each expert since what the holder has.
            ages: snapshots since each expert was sent.
            link_bytes: of experts, that the link takes until the next snapshot.
            changed: experts of this rank.
        """
        agreed = self._agreed
        if not changed or agreed is None:
            return frozenset(changed)
        is_changed = self._mask(changed)
        at_risk = numpy.where(is_changed, numpy.maximum(unsent, 0.0), 0.0)
        chosen = self._chosen(step, at_risk, numpy.where(is_changed, ages, 0.0), 0.0, link_bytes) & {*changed}
        return frozenset(chosen or {max(changed, key=lambda unit: (unsent[self._place[unit]], unit))})

    def kept(
        self,
        sent: Collection[str],
        tokens: tuple[NDArray[numpy.float64], NDArray[numpy.float64]],
        ages: NDArray[numpy.float64],
        changed: Collection[str],
    ) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """Tokens and ages of the experts that a holder has then.

        Args:
            sent: experts.
            tokens: of the snapshot, and those that the holder had.
            ages: that they had.
            changed: experts that differed.
        """
        left = self._mask(set(changed) - set(sent))
        return numpy.where(left, tokens[1], tokens[0]), numpy.where(left, ages + 1, 0.0)

    def _mask(self, units: Collection[str]) -> NDArray[numpy.bool_]:
        found = numpy.zeros(len(self._place), dtype=bool)
        found[[self._place[unit] for unit in units]] = True
        return found

    def _chosen(
        self,
        step: int,
        unsaved: NDArray[numpy.float64],
        ages: NDArray[numpy.float64],
        interval_tokens: float,
        expert_bytes: float,
    ) -> set[str]:
        agreed = self._agreed
        assert agreed is not None
        run_tokens = float(agreed.run_tokens[self._is_own].sum())
        lost_tokens = agreed.lost_tokens * run_tokens / max(float(agreed.run_tokens.sum()), 1.0)
        load = Load(self._of_layers(unsaved), self._of_layers(ages), interval_tokens, run_tokens, lost_tokens)
        chosen = self._policy.select(step, load, self._budget(expert_bytes))
        return {self._units[expert.layer][expert.index] for expert in chosen}

    def _total_at(self, iteration: int, agreed: Agreed) -> NDArray[numpy.float64]:
        passed, self._iteration = iteration - self._iteration, iteration
        if self._owners is not None:
            return self._routed(self._owners)
        total: NDArray[numpy.float64] = self._total + agreed.rates[self._is_own] * passed
        return total

    def _routed(self, owners: int) -> NDArray[numpy.float64]:
        routed: NDArray[numpy.float64] = owners * self._tokens.local()[self._is_own].astype(numpy.float64)
        return routed

    def _budget(self, expert_bytes: float) -> Budget:
        if self._by_bytes:
            return Budget(snapshot_bytes=max(1.0, expert_bytes))
        one_of_each = sum(layer.expert_bytes for layer in self._layers) / self._layers[0].expert_parallel.size
        most = max(layer.experts for layer in self._layers)
        return Budget(experts_per_layer=max(1, int(min(expert_bytes / one_of_each, most))))

    def _of_layers(self, values: NDArray[numpy.float64]) -> PerExpert:
        return tuple(numpy.split(values, self._ends))
