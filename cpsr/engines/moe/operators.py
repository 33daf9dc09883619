"""Layers of experts: how parameters are named, which ranks own which experts, and the operators that result."""

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
    "Gate",
    "ModelOperators",
    "Naming",
    "NonExpert",
    "Operator",
    "PatternNaming",
    "Place",
    "check_shared",
    "experts_of",
    "operators_of",
]


@dataclass(frozen=True)
class Place:
    """Where in a layer of experts a parameter belongs.

    Attributes:
        layer: name of the layer's module; empty where the model is the layer.
        expert: the expert's number in the name; None for the layer's gate.
    """

    layer: str
    expert: int | None


class Naming(Protocol):
    """What a model with layers of its own has to provide."""

    def place(self, parameter: str) -> Place | None:
        """Where a parameter belongs; None for what every token passes: attention, norms, shared experts."""


@dataclass(frozen=True)
class PatternNaming:
    """Names that follow a pattern.

    Attributes:
        expert: matches from the start of an expert's parameter; its groups are `layer` and `index`.
        gate: matches from the start of a gate's parameter; its group is `layer`.
    """

    expert: re.Pattern[str]
    gate: re.Pattern[str]

    def place(self, parameter: str) -> Place | None:
        """The expert's pattern goes first: experts may hold a gate of their own."""
        if found := self.expert.match(parameter):
            return Place(found["layer"] or "", int(found["index"]))
        if found := self.gate.match(parameter):
            return Place(found["layer"] or "", None)
        return None


class Named(Protocol):
    """What knows how experts are named, as a `Mixture`."""

    naming: Naming


def experts_of(mixture: Named | None, parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> its expert, as layer and number, of experts' parameters alone; none without a mixture."""
    places = {} if mixture is None else {name: mixture.naming.place(name) for name in parameters}
    return {
        name: f"{place.layer}/{place.expert}"
        for name, place in places.items()
        if place is not None and place.expert is not None
    }


# DeepSpeed's MoE; its residual branch (`mlp`, `coefficient`) is a shared expert and matches neither.
DEEPSPEED = PatternNaming(
    re.compile(r"(?:(?P<layer>.+?)\.)?deepspeed_moe\.experts\.deepspeed_experts\.(?P<index>\d+)\."),
    re.compile(r"(?:(?P<layer>.+?)\.)?deepspeed_moe\.gate\."),
)

# A `torch.nn.ModuleList` called `experts`, as most MoE models in plain torch have it, but for those in a module whose
# name ends in `shared`. A `gate` or `router` beside it is its gate; there may be none, as gates have other names too,
# or no parameters. What is not known as a gate is a part that every token passes, and so are experts that are stacked
# in one tensor, which have no names of their own.
MODULE_LIST = PatternNaming(
    re.compile(r"(?:(?P<layer>.+?)\.)?(?<!shared\.)experts\.(?P<index>\d+)\."),
    re.compile(r"(?:(?P<layer>.+?)\.)?(?:gate|router)(?:\.|$)"),
)


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
class Gate:
    """What routes the tokens of a layer; every rank holds it.

    Attributes:
        layer: place of its layer among the model's layers of experts.
    """

    layer: int


@dataclass(frozen=True)
class NonExpert:
    """A module that every token passes; shared experts are such modules.

    Attributes:
        name: of the module that holds the parameters, or of a parameter of the model itself.
    """

    name: str


Operator = Expert | Gate | NonExpert


@dataclass(frozen=True)
class ModelOperators:
    """The operators of which one rank holds parameters.

    Attributes:
        layer_names: of the layers of experts, in the model's order.
        parameters: names of each operator's parameters, in the model's order.
        expert_parallel: who owns which experts.
        elsewhere: layer -> its experts, of the layers that other stages of a pipeline have.
    """

    layer_names: tuple[str, ...]
    parameters: dict[Operator, tuple[str, ...]]
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
        moved = {
            replace(one, layer=own[one.layer]) if isinstance(one, Expert | Gate) else one: names
            for one, names in self.parameters.items()
        }
        elsewhere = {name: experts for name, experts in layers.items() if name not in self.layer_names}
        return ModelOperators(tuple(layers), moved, self.expert_parallel, elsewhere)

    @property
    def experts(self) -> dict[str, list[int]]:
        """Layer -> numbers, ascending, of the experts of which this rank has parameters; none elsewhere."""
        found: dict[str, list[int]] = {name: [] for name in self.layer_names}
        for operator in self.parameters:
            if isinstance(operator, Expert):
                found[self.layer_names[operator.layer]].append(operator.index)
        return {name: sorted(numbers) for name, numbers in found.items()}

    def bytes_of(self, parameter_bytes: Mapping[str, int]) -> dict[Operator, int]:
        """What each operator takes when each of its parameters takes so much.

        Raises:
            KeyError: a parameter is not in `parameter_bytes`.
        """
        return {operator: sum(parameter_bytes[name] for name in names) for operator, names in self.parameters.items()}

    def layers(self, parameter_bytes: Mapping[str, int]) -> tuple[ExpertLayer, ...]:
        """The layers of experts, each expert as large as the largest that this rank owns; of other stages one byte.

        How many a layer has follows from those of this rank: `check_shared` checks that the others have as many.

        Args:
            parameter_bytes: of the weights and moments of each parameter.

        Raises:
            UnsupportedEngineError: a layer's experts are not those of this rank.
        """
        group = self.expert_parallel
        for name, numbers in self.experts.items():
            if name in self.elsewhere:
                continue
            _check_begin(name, numbers, group)
            _check_own(name, numbers, range(group.rank * len(numbers), (group.rank + 1) * len(numbers)), group)
        owned: list[list[int]] = [[] for _ in self.layer_names]
        for operator, size in self.bytes_of(parameter_bytes).items():
            if isinstance(operator, Expert):
                owned[operator.layer].append(size)
        return tuple(
            ExpertLayer(name, self.elsewhere.get(name, len(sizes) * group.size), max(sizes, default=1), group)
            for name, sizes in zip(self.layer_names, owned, strict=True)
        )


def operators_of(
    parameters: Iterable[str], naming: Naming, expert_parallel: ExpertParallel | None = None
) -> ModelOperators:
    """Reads the operators from the names of a model's parameters.

    Layers may have different numbers of experts. A gate whose layer has no experts is an ordinary module. Whether the
    experts are those of this rank is looked at by `check_shared` and `ModelOperators.layers`.

    Args:
        parameters: all names that the model on this rank has, in its own order, so that all ranks count its layers
            alike. Experts have their numbers over all ranks in them, as engine adapters name them. The names of a shard
            will not do: a rank may own no part of some layer.
        naming: how names mark experts and gates.
        expert_parallel: the group that shares the experts of every layer; None where each rank holds all.

    Raises:
        ValueError: a name comes twice.
    """
    places = _places(parameters, naming)
    layers = dict.fromkeys(place.layer for place in places.values() if place is not None and place.expert is not None)
    order = {layer: position for position, layer in enumerate(layers)}
    found: dict[Operator, list[str]] = {}
    for name, place in places.items():
        if place is None or place.layer not in order:
            operator: Operator = NonExpert(name.rpartition(".")[0] or name)
        elif place.expert is None:
            operator = Gate(order[place.layer])
        else:
            operator = Expert(order[place.layer], place.expert)
        found.setdefault(operator, []).append(name)
    parts = {operator: tuple(names) for operator, names in found.items()}
    return ModelOperators(tuple(layers), parts, expert_parallel or ExpertParallel())


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
        _check_layer(layer, [experts for experts, _ in there], [group for _, group in there])


def _check_layer(layer: str, numbers: Sequence[list[int]], groups: Sequence[ExpertParallel]) -> None:
    """Whether these experts, which ranks have, are each rank's own."""
    for own, group in zip(numbers, groups, strict=True):
        _check_begin(layer, own, group)
    experts = len({number for own in numbers for number in own})
    for own, group in zip(numbers, groups, strict=True):
        _check_own(layer, own, ExpertLayer(layer, experts, 1, group).owned, group)


def _check_begin(layer: str, numbers: Sequence[int], group: ExpertParallel) -> None:
    if group.rank and numbers[0] == 0:
        raise UnsupportedEngineError(
            f"layer {layer!r} has parameters of experts {_listed(numbers)} on rank {group.rank} of {group.size} "
            "expert-parallel ranks, where a name would stand for another expert than on rank 0: give experts their "
            f"numbers over all ranks in their names, so that those of {len(numbers)} on each rank begin at "
            f"{group.rank * len(numbers)} there; or, where each rank holds all experts, leave expert_parallel out"
        )


def _check_own(layer: str, numbers: Sequence[int], own: range, group: ExpertParallel) -> None:
    if list(numbers) != list(own):
        raise UnsupportedEngineError(
            f"layer {layer!r} has parameters of experts {_listed(numbers)} on rank {group.rank} of {group.size} "
            f"expert-parallel ranks, and so many shared equally would be {_listed(own)}; nothing was read: give every "
            "parameter of the model, frozen ones too, and experts their numbers over all ranks"
        )


def _places(parameters: Iterable[str], naming: Naming) -> dict[str, Place | None]:
    places: dict[str, Place | None] = {}
    for name in parameters:
        if name in places:
            raise ValueError(f"the parameter {name!r} is named twice")
        places[name] = naming.place(name)
    return places


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
