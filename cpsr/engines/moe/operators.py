"""What a sparse snapshot saves or leaves out as one: experts, gates, and parts that every token passes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cpsr.engines.moe.layers import ExpertLayer, ExpertParallel
from cpsr.engines.moe.naming import Naming, Place
from cpsr.errors import UnsupportedEngineError

__all__ = ["Expert", "Gate", "ModelOperators", "NonExpert", "Operator", "check_shared", "operators_of"]


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
