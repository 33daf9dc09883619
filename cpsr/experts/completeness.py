"""Whether the ranks of a job together hold every expert."""

import math
from collections.abc import Collection, Iterator, Mapping

from cpsr.experts.naming import Naming

__all__ = ["misfit_experts", "missing_experts", "unlike_experts", "wrong_experts"]

# What a rank holds of a parameter: its whole shape, and the first element and the number of those that it has.
Held = tuple[tuple[int, ...], int, int]
# A layer's name, and the expert's number in it.
_Expert = tuple[str, int]
# Of each parameter of an expert: whose it is, and what each rank holds of it.
_Pieces = Mapping[str, tuple[_Expert, dict[int, Held]]]


def missing_experts(
    parts: Mapping[int, Mapping[str, Held]], naming: Naming, trained: Collection[str] | None = None
) -> str | None:
    """What no rank has of the experts, where parameters are shared out over ranks, whole or in slices.

    Args:
        parts: for each rank, operator name -> (whole shape, first element, elements) of what it has.
        naming: how names tell experts.
        trained: names of the experts' parameters that the optimizer of any rank trains; None: in each layer all experts
            from 0 up to the last that any rank has, which does not see it where the last ones are missing, or some of
            an expert's parameters.

    Returns:
        None where nothing is missing; else one sentence that names the first thing that is, and how much more.
    """
    return _missing(_pieces(parts, naming), naming, trained)


def _missing(pieces: _Pieces, naming: Naming, trained: Collection[str] | None) -> str | None:
    holders: dict[_Expert, set[int]] = {}
    for owner, held in pieces.values():
        holders.setdefault(owner, set()).update(held)
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


def misfit_experts(
    parts: Mapping[int, Mapping[str, Held]], naming: Naming, trained: Collection[str] | None = None
) -> str | None:
    """A parameter of an expert that ranks hold in different shapes, or of which one holds more than there is.

    Args:
        parts: as for `missing_experts`.
        naming: how names tell experts.
        trained: names of the parameters that are looked at, as buffers may be of any size on each rank; None: all.

    Returns:
        None where all fit; else one sentence that names the first that does not.
    """
    return _misfit(_pieces(parts, naming), trained)


def _misfit(pieces: _Pieces, trained: Collection[str] | None) -> str | None:
    for name, ((layer, number), held) in pieces.items():
        if trained is not None and name not in trained:
            continue
        first, (shape, _, _) = next(iter(held.items()))
        what = f"{name!r} (expert {number} of layer {layer!r})"
        for rank, (other, offset, numel) in held.items():
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


def unlike_experts(ages: Mapping[int, Mapping[str, int]], naming: Naming) -> str | None:
    """An expert that ranks hold from different iterations, which is none that the training ever had.

    Args:
        ages: for each rank, operator name -> iteration at which it was taken.
        naming: how names tell experts.

    Returns:
        None where all ranks agree; else one sentence that names the first.
    """
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


def wrong_experts(
    parts: Mapping[int, Mapping[str, Held]],
    ages: Mapping[int, Mapping[str, int]],
    naming: Naming,
    trained: Collection[str] | None = None,
) -> str | None:
    """What does not fit, is missing, or else unlike: see `misfit_experts`, `missing_experts` and `unlike_experts`."""
    pieces = _pieces(parts, naming)
    return _misfit(pieces, trained) or _missing(pieces, naming, trained) or unlike_experts(ages, naming)


def _expert_of(name: str, naming: Naming) -> _Expert | None:
    place = naming.place(name)
    return None if place is None or place.expert is None else (place.layer, place.expert)


def _pieces(parts: Mapping[int, Mapping[str, Held]], naming: Naming) -> _Pieces:
    pieces: dict[str, tuple[_Expert, dict[int, Held]]] = {}
    for rank, operators in parts.items():
        for name, held in operators.items():
            if (expert := _expert_of(name, naming)) is not None:
                pieces.setdefault(name, (expert, {}))[1][rank] = held
    return pieces


def _parameters(absent: Mapping[str, _Expert], holders: Mapping[_Expert, Collection[int]]) -> Iterator[str]:
    """Those of experts that ranks have in part."""
    for name, (layer, number) in sorted(absent.items()):
        if ranks := holders.get((layer, number)):
            yield (
                f"{name!r} of expert {number} of layer {layer!r}, whose other parameters ranks "
                f"{', '.join(map(str, sorted(ranks)))} have (keep in the optimizers all that they trained when this "
                "life of the run began)"
            )


def _elements(pieces: _Pieces) -> Iterator[str]:
    """Ranges of a parameter that lie between those that ranks have; replicas overlap."""
    for name, (_, held) in pieces.items():
        reached, size = 0, max(math.prod(shape) for shape, _, _ in held.values())
        ranges = sorted((offset, offset + numel) for _, offset, numel in held.values() if numel)
        for first, end in [*ranges, (size, size)]:
            if first > reached:
                yield f"elements {reached} to {first - 1} of {name!r}"
            reached = max(reached, end)
