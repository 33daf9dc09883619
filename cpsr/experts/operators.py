"""What a sparse snapshot saves or leaves out as one: experts, gates, and parts that every token passes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cpsr.errors import UnsupportedEngineError
from cpsr.experts.layers import ExpertLayer, ExpertParallel
from cpsr.experts.naming import Naming, Place

__all__ = ["Expert", "Gate", "ModelOperators", "NonExpert", "Operator", "operators_of"]


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
    """

    layer_names: tuple[str, ...]
    parameters: dict[Operator, tuple[str, ...]]
    expert_parallel: ExpertParallel

    def bytes_of(self, parameter_bytes: Mapping[str, int]) -> dict[Operator, int]:
        """What each operator takes when each of its parameters takes so much.

        Raises:
            KeyError: a parameter is not in `parameter_bytes`.
        """
        return {operator: sum(parameter_bytes[name] for name in names) for operator, names in self.parameters.items()}

    def layers(self, parameter_bytes: Mapping[str, int]) -> tuple[ExpertLayer, ...]:
        """The layers of experts, each expert as large as the largest that this rank owns.

        Args:
            parameter_bytes: of the weights and moments of each parameter.
        """
        owned: list[list[int]] = [[] for _ in self.layer_names]
        for operator, size in self.bytes_of(parameter_bytes).items():
            if isinstance(operator, Expert):
                owned[operator.layer].append(size)
        return tuple(
            ExpertLayer(name, len(sizes) * self.expert_parallel.size, max(sizes), self.expert_parallel)
            for name, sizes in zip(self.layer_names, owned, strict=True)
        )


def operators_of(
    parameters: Iterable[str], naming: Naming, expert_parallel: ExpertParallel | None = None
) -> ModelOperators:
    """Reads the operators from the names of a model's parameters.

    Layers may have different numbers of experts. A gate whose layer has no experts is an ordinary module.

    Args:
        parameters: all names that the model on this rank has, in its own order, so that all ranks count its layers
            alike. Experts have their numbers over all ranks, as engine adapters name them, or each rank's own ones are
            numbered from 0, as DeepSpeed does. The names of a shard will not do: a rank may own no part of some layer.
        naming: how names tell experts and gates.
        expert_parallel: the group that shares the experts of every layer; None where each rank holds all.

    Raises:
        UnsupportedEngineError: a layer's experts are not numbered without a gap.
        ValueError: a name comes twice.
    """
    group = expert_parallel or ExpertParallel()
    places = _places(parameters, naming)
    experts = _owned(places, group)
    order = {layer: position for position, layer in enumerate(experts)}
    found: dict[Operator, list[str]] = {}
    for name, place in places.items():
        if place is None or place.layer not in experts:
            operator: Operator = NonExpert(name.rpartition(".")[0] or name)
        elif place.expert is None:
            operator = Gate(order[place.layer])
        else:
            numbers = experts[place.layer]
            first = group.rank * len(numbers)
            operator = Expert(order[place.layer], first + place.expert - numbers.start)
        found.setdefault(operator, []).append(name)
    return ModelOperators(tuple(experts), {operator: tuple(names) for operator, names in found.items()}, group)


def _places(parameters: Iterable[str], naming: Naming) -> dict[str, Place | None]:
    places: dict[str, Place | None] = {}
    for name in parameters:
        if name in places:
            raise ValueError(f"the parameter {name!r} is named twice")
        places[name] = naming.place(name)
    return places


def _owned(places: Mapping[str, Place | None], group: ExpertParallel) -> dict[str, range]:
    """Layer -> numbers, as they are in names, of the experts that this rank has of it."""
    numbers: dict[str, set[int]] = {}
    for place in places.values():
        if place is not None and place.expert is not None:
            numbers.setdefault(place.layer, set()).add(place.expert)
    owned = {}
    for layer, found in numbers.items():
        first = group.rank * len(found) if min(found) else 0
        owned[layer] = range(first, first + len(found))
        if found != set(owned[layer]):
            raise UnsupportedEngineError(
                f"layer {layer!r} has parameters of experts {_listed(found)}, and so many on rank {group.rank} of "
                f"{group.size} would be {_listed(owned[layer])}; nothing was read: give every parameter of the model, "
                "frozen ones too"
            )
    return owned


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
