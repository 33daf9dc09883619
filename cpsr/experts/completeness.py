"""Whether the ranks of a job together hold every expert."""

import math
from collections.abc import Collection, Iterator, Mapping

from cpsr.engines.moe.operators import Naming

__all__ = ["wrong_experts"]

# A rank's slice of a parameter: the global shape, the first element and the number of elements.
SavedSlice = tuple[tuple[int, ...], int, int]
# Name of a layer, and number of the expert in it.
_Expert = tuple[str, int]
# Parameter of an expert -> its expert, and each rank's slice.
_Pieces = Mapping[str, tuple[_Expert, dict[int, SavedSlice]]]


def wrong_experts(
    parts: Mapping[int, Mapping[str, SavedSlice]],
    ages: Mapping[int, Mapping[str, int]],
    naming: Naming,
    trained: Collection[str] | None = None,
) -> str | None:
    """The first problem of the experts in a checkpoint, as one sentence; None where there is none.

    In this order: a parameter of an expert has different shapes on two ranks, or a slice beyond its shape; no rank has
    an expert, or a part of it; slices of an expert are from different iterations, a state that training never had.

    Args:
        parts: for each rank, operator name -> (global shape, first element, elements) of its slice.
        ages: for each rank, operator name -> iteration at which it was taken.
        naming: how names identify experts.
        trained: names of the experts' parameters that the optimizer of any rank trains. Shapes of others are not
            compared: buffers may be of any size on each rank. None: in each layer all experts from 0 up to the last
            that any rank has. That does not see missing last experts, or missing parameters.
    """
    pieces = _pieces(parts, naming)
    return _misfit(pieces, trained) or _missing(pieces, naming, trained) or _unlike(ages, naming)


def _missing(pieces: _Pieces, naming: Naming, trained: Collection[str] | None) -> str | None:
    holders: dict[_Expert, set[int]] = {}
    for owner, slices in pieces.values():
        holders.setdefault(owner, set()).update(slices)
    if trained is None:
        last = dict(sorted(holders))
        names: dict[str, _Expert] = {}
        wanted = {(layer, number) for layer in last for number in range(last[layer] + 1)}
    else:
        names = {name: expert for name in trained if (expert := _expert_of(name, naming)) is not None}
        wanted = set(names.values())
    lacking = [
        *(f"expert {number} of layer {layer!r}" for layer, number in sorted(wanted - holders.keys())),
        *_parameters({name: expert for name, expert in names.items() if name not in pieces}, holders),
        *_elements(pieces),
    ]
    if not lacking:
        return None
    more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"no rank has {lacking[0]}{more}"


def _misfit(pieces: _Pieces, trained: Collection[str] | None) -> str | None:
    for name, ((layer, number), slices) in pieces.items():
        if trained is not None and name not in trained:
            continue
        first, (shape, _, _) = next(iter(slices.items()))
        what = f"{name!r} (expert {number} of layer {layer!r})"
        for rank, (other, offset, numel) in slices.items():
            if other != shape:
                return (
                    f"rank {rank} has {what} in shape {other}, and rank {first} in {shape}: build the same model on "
                    "all ranks, and give each expert its number over all ranks in its name"
                )
            if numel and not 0 <= offset < offset + numel <= math.prod(shape):
                return (
                    f"rank {rank} has elements {offset} to {offset + numel - 1} of {what}, whose shape {shape} has "
                    f"{math.prod(shape)}: the engine's slices were misread; this is a defect, please report it"
                )
    return None


def _unlike(ages: Mapping[int, Mapping[str, int]], naming: Naming) -> str | None:
    taken: dict[_Expert, tuple[int, int]] = {}
    for rank, operators in ages.items():
        for name, iteration in operators.items():
            expert = _expert_of(name, naming)
            if expert is None:
                continue
            first, other = taken.setdefault(expert, (iteration, rank))
            if first != iteration:
                layer, number = expert
                return (
                    f"rank {other} has expert {number} of layer {layer!r} from iteration {first}, and rank {rank} from "
                    f"{iteration}"
                )
    return None


def _expert_of(name: str, naming: Naming) -> _Expert | None:
    place = naming.place(name)
    return None if place is None else (place.layer, place.expert)


def _pieces(parts: Mapping[int, Mapping[str, SavedSlice]], naming: Naming) -> _Pieces:
    pieces: dict[str, tuple[_Expert, dict[int, SavedSlice]]] = {}
    for rank, operators in parts.items():
        for name, slices in operators.items():
            if (expert := _expert_of(name, naming)) is not None:
                pieces.setdefault(name, (expert, {}))[1][rank] = slices
    return pieces


def _parameters(absent: Mapping[str, _Expert], holders: Mapping[_Expert, Collection[int]]) -> Iterator[str]:
    """Missing parameters of experts that ranks have in part."""
    for name, (layer, number) in sorted(absent.items()):
        if ranks := holders.get((layer, number)):
            yield (
                f"{name!r} of expert {number} of layer {layer!r}, whose other parameters ranks "
                f"{', '.join(map(str, sorted(ranks)))} have (keep in the optimizers all that they trained when this "
                "life of the run began)"
            )


def _elements(pieces: _Pieces) -> Iterator[str]:
    """Ranges of a parameter that lie between those that ranks have; replicas overlap."""
    for name, (_, slices) in pieces.items():
        reached, size = 0, max(math.prod(shape) for shape, _, _ in slices.values())
        ranges = sorted((offset, offset + numel) for _, offset, numel in slices.values() if numel)
        for first, end in [*ranges, (size, size)]:
            if first > reached:
                yield f"elements {reached} to {first - 1} of {name!r}"
            reached = max(reached, end)
