"""Which experts a checkpoint saves: the policies of PEC; that of MOETION is in `cpsr.experts.moetion`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy
from numpy.typing import ArrayLike, NDArray

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.engines.moe.token_counts import PerExpert, per_expert
from cpsr.errors import ConfigError

__all__ = ["Budget", "DynamicK", "Load", "LoadAware", "Policy", "Sequential", "overdue"]

# An expert that was in no checkpoint for so many rounds goes first, whatever its load; a round saves all experts of
# its layer once. So at most about a sixteenth of the places go to such experts.
OVERDUE_ROUNDS = 16


@dataclass(frozen=True)
class Load:
    """The load of the experts, the same on all ranks.

    Attributes:
        unsaved_tokens: routed to each expert since its last checkpoint.
        ages: checkpoints since each expert's last one. Older ones go first where the tokens are equal, and so does the
            oldest of a layer when it is `overdue`: experts to which nothing is routed have their turn too.
        interval_tokens: routed to all experts since the checkpoint before.
        run_tokens: in the whole run; each iteration counts once even if it was repeated, and so do tokens that experts
            dropped for lack of capacity.
        lost_tokens: that all recoveries of the run took.
    """

    unsaved_tokens: PerExpert
    ages: PerExpert
    interval_tokens: float = 0.0
    run_tokens: float = math.inf
    lost_tokens: float = 0.0

    def at_risk(self, layers: Sequence[ExpertLayer]) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """Unsaved tokens and ages, `(experts of all layers,)` each.

        Raises:
            ValueError: they do not fit these layers, or a number is negative or not finite.
        """
        tokens = per_expert(layers, self.unsaved_tokens, "unsaved tokens")
        ages = per_expert(layers, self.ages, "ages")
        # The empty array is for a model without layers.
        return numpy.concatenate([*tokens, []]), numpy.concatenate([*ages, []])


@dataclass(frozen=True)
class Budget:
    """Bytes of experts that one rank can write until the next checkpoint (moetion, section 4.2), or experts by number.

    A policy saves at least one expert even where the budget holds none: a checkpoint that is late costs less than
    experts which are never saved.

    Attributes:
        snapshot_bytes: that one rank can write.
        experts_per_layer: K, which overrides bytes; None: as many as the bytes hold.
    """

    snapshot_bytes: float = math.inf
    experts_per_layer: int | None = None

    def experts_in_each(self, layers: Sequence[ExpertLayer]) -> int:
        """K: experts to save of each layer, over all ranks; at most those of the largest layer.

        Policies that save equally many of each layer go by this number alone, and save all experts without it.
        """
        most = max((layer.experts for layer in layers), default=0)
        return most if self.experts_per_layer is None else min(self.experts_per_layer, most)


class Policy(Protocol):
    """Chooses the experts of the next checkpoint; equal on all ranks for equal arguments."""

    def select(self, step: int, load: Load, budget: Budget) -> Sequence[Expert]:
        """The experts whose whole state the checkpoint holds, each once; none for a model without experts.

        Args:
            step: number of the checkpoint, from 0, each one more than the last.
            load: of the experts, up to this step.
            budget: of this checkpoint.
        """


class Sequential:
    """The next K experts of every layer, whatever their load.

    Layers are interleaved: each begins in the round where the layer before ends, and the round goes from rank to rank.
    So all ranks save equally many experts, to within one, and an unchanged K saves each expert once in `ceil(E / K)`
    checkpoints. Where every rank owns one expert this is the paper's order. The paper goes through all experts of one
    rank before the next rank's. Where each rank owns several, one rank would then do the work of all.

    Source: pec, section 3.1.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = layers

    def select(self, step: int, load: Load, budget: Budget) -> tuple[Expert, ...]:
        """K experts of each layer, or all of a smaller one, over all ranks."""
        count = budget.experts_in_each(self._layers)
        chosen: list[Expert] = []
        first = step * count
        for place, layer in enumerate(self._layers):
            taken = min(count, layer.experts)
            chosen += (Expert(place, layer.in_turn(first + offset)) for offset in range(taken))
            # A layer that is saved whole loads all ranks equally, and does not change the turn.
            if taken < layer.experts:
                first += count
        return tuple(chosen)


class LoadAware:
    """The K experts of every layer with the most unsaved tokens, equally many on each rank where that is possible.

    Experts are taken by unsaved tokens over all layers, while their layer needs more and their rank has room. A rank's
    room is its equal part of all saved experts, rounded up. A layer that is then short, because its other experts are
    all on full ranks, takes the first of these.

    Before all of them, the oldest expert of each layer that is `overdue` is taken, older ones first: the paper's rule
    alone never saves an expert again to which nothing is routed, though the optimizer moves it all the same.

    Args:
        layers: of the model; all over the same expert-parallel ranks.

    Raises:
        ConfigError: the layers are spread over groups of different sizes.

    Source: pec, section 3.1.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        sizes = {layer.expert_parallel.size for layer in layers}
        if len(sizes) > 1:
            raise ConfigError(
                f"load-aware selection balances one expert-parallel group, and the layers have groups of {sizes} "
                "ranks: choose one size for all layers, or sequential selection"
            )
        self._layers = layers
        self._ranks = max(sizes, default=1)
        self._experts = [Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts)]
        self._layer_of = [expert.layer for expert in self._experts]
        self._owner_of = [layers[expert.layer].owner(expert.index) for expert in self._experts]
        # A rank's experts of one layer: of these, selected are the first ones in order.
        self._part_of = numpy.array(self._layer_of, dtype=numpy.int64) * self._ranks + self._owner_of

    def select(self, step: int, load: Load, budget: Budget) -> tuple[Expert, ...]:
        """K experts of each layer, or all of a smaller one, over all ranks."""
        count = budget.experts_in_each(self._layers)
        wanted = [min(count, layer.experts) for layer in self._layers]
        room = [-(-sum(wanted) // self._ranks)] * self._ranks
        chosen, others = list[int](), list[int]()
        for expert in self._in_order(load, wanted):
            layer, rank = self._layer_of[expert], self._owner_of[expert]
            if wanted[layer] and room[rank]:
                wanted[layer] -= 1
                room[rank] -= 1
                chosen.append(expert)
            else:
                others.append(expert)
        for expert in others if any(wanted) else ():
            if wanted[layer := self._layer_of[expert]]:
                wanted[layer] -= 1
                chosen.append(expert)
        return tuple(self._experts[expert] for expert in sorted(chosen, key=self._layer_of.__getitem__))

    def _in_order(self, load: Load, wanted: Sequence[int]) -> list[int]:
        """Experts in order of selection: overdue ones, then the others; K of each part, since no more are selected."""
        tokens, ages = load.at_risk(self._layers)
        marks = [
            overdue(old, -(-layer.experts // want))
            for layer, want, old in zip(self._layers, wanted, load.ages, strict=True)
        ]
        late = numpy.concatenate([*marks, numpy.zeros(0, dtype=bool)])
        order = numpy.lexsort((-ages, numpy.where(late, 0.0, -tokens), ~late))
        parts = numpy.sort(self._part_of)
        by_part = numpy.argsort(self._part_of[order], kind="stable")
        place = numpy.empty_like(by_part)
        place[by_part] = numpy.arange(len(parts)) - numpy.searchsorted(parts, parts)
        found: list[int] = order[place < max(wanted, default=0)].tolist()
        return found


class DynamicK:
    """Another policy under a K that doubles before failures could take too much of the run.

    Lost so far are the tokens that all recoveries of the run took. A failure now takes those at risk as well: unsaved
    ones of experts that are left out, and of each expert as many as in an interval, since a prediction beyond the
    checkpoint keeps experts as they were saved. The checkpoint saves the least of K, 2 K, 4 K, ... experts with which
    both together stay within the limit, as a portion of all tokens so far; or all.

    So a recovery at its newest checkpoint never brings the run's portion of lost tokens above the limit. A prediction
    does so by no more than what the steps since that checkpoint had routed beyond the interval before it. The paper
    doubles K after failures, when the limit is passed. K falls again as the run grows.

    Args:
        layers: of the model.
        policy: that selects at most K experts of each layer.
        limit: portion of lost tokens (PLT), the paper's 5% by default. Its denominator is the tokens of the run so far,
            T x TopK of each layer: the whole run has more.

    Source: pec, section 3.1, "Dynamic-K", and Eq. 4.
    """

    def __init__(self, layers: Sequence[ExpertLayer], policy: Policy, limit: float = 0.05) -> None:
        self._policy, self._limit = policy, limit
        self._layers = tuple(layers)
        self._most = max((layer.experts for layer in layers), default=0)

    def select(self, step: int, load: Load, budget: Budget) -> Sequence[Expert]:
        """Selection of the other policy with the budget's K, or a multiple of it."""
        least = self._least_at_risk(load)
        # A sum in another order may be less by a rounding error; then one selection is made in vain.
        allowed = self._limit * load.run_tokens - load.lost_tokens + 1e-9 * float(least[0])
        count = budget.experts_in_each(self._layers)
        while True:
            if count >= self._most or least[count] <= allowed:
                chosen = self._policy.select(step, load, replace(budget, experts_per_layer=count))
                if count >= self._most or self._is_within(load, chosen):
                    return chosen
            count = min(2 * count, self._most)

    def _least_at_risk(self, load: Load) -> NDArray[numpy.float64]:
        """With 0, 1, 2, ... experts of each layer, if those with the most unsaved tokens are saved."""
        saved = numpy.zeros(self._most + 1)
        for layer in load.unsaved_tokens:
            saved[1 : len(layer) + 1] += numpy.sort(layer)[::-1]
        return sum(float(layer.sum()) for layer in load.unsaved_tokens) - numpy.cumsum(saved) + load.interval_tokens

    def _is_within(self, load: Load, chosen: Sequence[Expert]) -> bool:
        left = [layer.copy() for layer in load.unsaved_tokens]
        for expert in chosen:
            left[expert.layer][expert.index] = 0.0
        at_risk = sum(float(layer.sum()) for layer in left) + load.interval_tokens
        return load.lost_tokens + at_risk <= self._limit * load.run_tokens


def overdue(ages: NDArray[numpy.float64], rounds: ArrayLike) -> NDArray[numpy.bool_]:
    """Marks the expert of each row that goes first whatever its load: the oldest, after `OVERDUE_ROUNDS` rounds.

    One a row at most, so that popularity decides where the rest of a layer's places go.

    Args:
        ages: snapshots since each expert's last one, `(..., experts)`.
        rounds: snapshots in which all experts of a row would be saved once, `(...)`.
    """
    found = ages >= OVERDUE_ROUNDS * numpy.asarray(rounds)[..., None]
    found &= numpy.arange(ages.shape[-1]) == numpy.expand_dims(ages.argmax(axis=-1), -1)
    return found
