"""Layers of experts: how parameters are named, which experts there are, and which ranks own them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cpsr.errors import ConfigError, UnsupportedEngineError

__all__ = [
    "DEEPSPEED",
    "MODULE_LIST",
    "Expert",
    "ExpertLayer",
    "ExpertParallel",
    "ModelOperators",
    "Place",
    "check_shared",
    "experts_of",
    "operators_of",
    "place_of",
]


@dataclass(frozen=True)
class Place:
    """The expert to which a parameter belongs.

    Attributes:
        layer: name of the layer's module; empty where the model is the layer.
        expert: the expert's number in the name.
    """

    layer: str
    expert: int


class Named(Protocol):
    """What knows how experts are named, as a `Mixture`."""

    naming: re.Pattern[str]


def place_of(parameter: str, naming: re.Pattern[str]) -> Place | None:
    """Where a parameter belongs; None for what every token passes: attention, norms, gates, shared experts.

    Args:
        parameter: its name.
        naming: matches from the start of an expert's parameter; its groups are `layer` and `index`.
    """
    found = naming.match(parameter)
    return None if found is None else Place(found["layer"] or "", int(found["index"]))


def experts_of(mixture: Named | None, parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> its expert, as layer and number, of experts' parameters alone; none without a mixture."""
    places = {} if mixture is None else {name: place_of(name, mixture.naming) for name in parameters}
    return {name: f"{place.layer}/{place.expert}" for name, place in places.items() if place is not None}


# DeepSpeed's MoE; its residual branch (`mlp`, `coefficient`) is a shared expert and does not match.
DEEPSPEED = re.compile(r"(?:(?P<layer>.+?)\.)?deepspeed_moe\.experts\.deepspeed_experts\.(?P<index>\d+)\.")

# A `torch.nn.ModuleList` called `experts`, as most MoE models in plain torch have it, but for those in a module whose
# name ends in `shared`. Experts that are stacked in one tensor have no names of their own: every token passes them.
MODULE_LIST = re.compile(r"(?:(?P<layer>.+?)\.)?(?<!shared\.)experts\.(?P<index>\d+)\.")


@dataclass(frozen=True)
class ExpertParallel:
    """The group of ranks that share a layer's experts: equally many each, in the order of their indices.

    Attributes:
        size: ranks in the group.
        rank: this process's place in it.

    Raises:
        ConfigError: there is no such rank.
    """

    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"an expert-parallel group of {self.size} ranks has no rank {self.rank}")


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of routed experts, over all ranks.

    Attributes:
        name: of the layer's module.
        experts: how many there are, on all ranks together.
        expert_bytes: of one expert's weights and moments.
        expert_parallel: who owns them.

    Raises:
        ConfigError: a size is not positive, or the ranks cannot share the experts equally.
    """

    name: str
    experts: int
    expert_bytes: int
    expert_parallel: ExpertParallel = field(default_factory=ExpertParallel)

    def __post_init__(self) -> None:
        if self.experts < 1 or self.expert_bytes < 1:
            raise ConfigError(
                f"layer {self.name!r} needs at least one expert of at least one byte, "
                f"not {self.experts} of {self.expert_bytes}"
            )
        if self.experts % self.expert_parallel.size:
            fitting = [size for size in range(1, self.experts + 1) if self.experts % size == 0]
            raise ConfigError(
                f"layer {self.name!r} has {self.experts} experts, which {self.expert_parallel.size} expert-parallel "
                f"ranks cannot share equally; sizes that can: {', '.join(map(str, fitting))}"
            )

    @property
    def experts_per_rank(self) -> int:
        """Experts of this layer that each rank owns."""
        return self.experts // self.expert_parallel.size

    @property
    def owned(self) -> range:
        """Indices of the experts that this rank owns."""
        first = self.expert_parallel.rank * self.experts_per_rank
        return range(first, first + self.experts_per_rank)

    def owner(self, index: int) -> int:
        """The rank of the group that owns an expert."""
        return index // self.experts_per_rank

    def in_turn(self, position: int) -> int:
        """The expert at a position of an endless round in which each next one belongs to the next rank."""
        turn, rank = divmod(position % self.experts, self.expert_parallel.size)
        return rank * self.experts_per_rank + turn


@dataclass(frozen=True)
class Expert:
    """A routed expert.

    Attributes:
        layer: place of its layer among the model's layers of experts.
        index: its number in the layer, over all ranks.
    """

    layer: int
    index: int


@dataclass(frozen=True)
class ModelOperators:
    """The experts of which one rank holds parameters.

    Attributes:
        layer_names: of the layers of experts, in the model's order.
        parameters: names of each expert's parameters, in the model's order.
        expert_parallel: who owns which experts.
        elsewhere: layer -> its experts, of the layers that other stages of a pipeline have.
    """

    layer_names: tuple[str, ...]
    parameters: dict[Expert, tuple[str, ...]]
    expert_parallel: ExpertParallel
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    def among(self, layers: Mapping[str, int]) -> "ModelOperators":
        """The same operators as a part of a model with these layers, by whose order they are counted.

        Args:
            layers: name -> experts, of all stages of a pipeline.

        Raises:
            KeyError: a layer of this rank is not among them.
        """
        place = {name: position for position, name in enumerate(layers)}
        own = [place[name] for name in self.layer_names]
        moved = {replace(one, layer=own[one.layer]): names for one, names in self.parameters.items()}
        elsewhere = {name: experts for name, experts in layers.items() if name not in self.layer_names}
        return ModelOperators(tuple(layers), moved, self.expert_parallel, elsewhere)

    @property
    def experts(self) -> dict[str, list[int]]:
        """Layer -> numbers, ascending, of the experts of which this rank has parameters; none elsewhere."""
        found: dict[str, list[int]] = {name: [] for name in self.layer_names}
        for expert in self.parameters:
            found[self.layer_names[expert.layer]].append(expert.index)
        return {name: sorted(numbers) for name, numbers in found.items()}

    def layers(self) -> tuple[ExpertLayer, ...]:
        """The layers of experts, with experts of one byte.

        How many a layer has follows from those of this rank: `check_shared` checks that the others have as many.

        Raises:
            UnsupportedEngineError: a layer's experts are not those of this rank.
        """
        group = self.expert_parallel
        for name, numbers in self.experts.items():
            if name not in self.elsewhere:
                _require_own(name, numbers, range(group.rank * len(numbers), (group.rank + 1) * len(numbers)), group)
        return tuple(
            ExpertLayer(name, self.elsewhere.get(name, len(numbers) * group.size), 1, group)
            for name, numbers in self.experts.items()
        )


def operators_of(
    parameters: Iterable[str], naming: re.Pattern[str], expert_parallel: ExpertParallel | None = None
) -> ModelOperators:
    """The experts by the names of a model's parameters; layers may have different numbers of them.

    `check_shared` and `ModelOperators.layers` check that the experts are those of this rank.

    Args:
        parameters: all names that the model on this rank has, in its own order, so that all ranks count its layers
            alike. Experts have their numbers over all ranks in them, as engine adapters name them. The names of a shard
            will not do: a rank may own no part of some layer.
        naming: see `place_of`.
        expert_parallel: the group that shares the experts of every layer; None where each rank holds all.
    """
    found: dict[str, dict[int, list[str]]] = {}
    for name in parameters:
        if (place := place_of(name, naming)) is not None:
            found.setdefault(place.layer, {}).setdefault(place.expert, []).append(name)
    parts = {
        Expert(position, number): tuple(names)
        for position, experts in enumerate(found.values())
        for number, names in experts.items()
    }
    return ModelOperators(tuple(found), parts, expert_parallel or ExpertParallel())


def check_shared(operators: ModelOperators | None, gather: Callable[[Any], list[Any]]) -> None:
    """Refuse layers that the ranks do not share equally, in the same words on all of them; a collective.

    Args:
        operators: of this rank; None where its model has no layers of experts.
        gather: gives every rank's plain data to all, in rank order.

    Raises:
        ConfigError: there is a layer that the expert-parallel ranks cannot share equally.
        UnsupportedEngineError: ranks have other layers or groups, or other experts than their place implies.
    """
    own = operators or ModelOperators((), {}, ExpertParallel())
    gathered = gather([own.expert_parallel.size, own.expert_parallel.rank, list(own.experts.items())])
    groups = [ExpertParallel(size, rank) for size, rank, _ in gathered]
    ranks = [dict(experts) for _, _, experts in gathered]
    size = groups[0].size
    for rank, (group, experts) in enumerate(zip(groups, ranks, strict=True)):
        if list(experts) != list(ranks[0]):
            raise UnsupportedEngineError(
                f"rank {rank} has the layers of experts {list(experts)}, and rank 0 {list(ranks[0])}: build the same "
                "layers on all ranks, and name them to the engine adapters of all ranks"
            )
        if group.size != size:
            raise UnsupportedEngineError(
                f"rank {rank} shares experts with groups of {group.size}, and rank 0 of {size}: give expert_parallel "
                "the same size on all ranks"
            )
    if not ranks[0] or len(gathered) < size:
        return
    for place in sorted(set(range(size)) - {group.rank for group in groups}):
        raise UnsupportedEngineError(
            f"expert_parallel: no rank is {place} of its {size}: give each rank its own place in its group, "
            f"ExpertParallel({size}, place)"
        )
    for layer in ranks[0]:
        # Ranks of other stages of a pipeline have none: a layer is listed only where some rank has an expert of it.
        there = [(experts[layer], group) for experts, group in zip(ranks, groups, strict=True) if experts[layer]]
        count = len({number for own, _ in there for number in own})
        for own, group in there:
            _require_own(layer, own, ExpertLayer(layer, count, 1, group).owned, group)


def _require_own(layer: str, numbers: Sequence[int], own: range, group: ExpertParallel) -> None:
    if list(numbers) != list(own):
        raise UnsupportedEngineError(
            f"layer {layer!r} has parameters of experts {_listed(numbers)} on rank {group.rank} of {group.size} "
            f"expert-parallel ranks, whose own would be {_listed(own)}; nothing was read: give experts their numbers "
            "over all ranks in their names, and every parameter of the model, frozen ones too; or, where each rank "
            "holds all experts, leave expert_parallel out"
        )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
