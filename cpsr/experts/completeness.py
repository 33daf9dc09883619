"""Whether the ranks of a job together hold every expert."""

import math
from collections.abc import Collection, Iterator, Mapping

from cpsr.experts.naming import Naming

__all__ = ["missing_experts", "unlike_experts", "wrong_experts"]

# What a rank holds of a parameter: its whole shape, and the first element and the number of those that it has.
Held = tuple[tuple[int, ...], int, int]


def missing_experts(
    parts: Mapping[int, Mapping[str, Held]], naming: Naming, trained: Mapping[str, Collection[int]] | None = None
) -> str | None:
    """What no rank has of the experts, where parameters are shared out over ranks, whole or in slices.

    Args:
        parts: for each rank, operator name -> (whole shape, first element, elements) of what it has.
        naming: how names tell experts.
        trained: layer -> experts that the optimizer trains (`ModelOperators.layer_names`); None: in each layer all
            from 0 up to the last that any rank has, which does not see it where the last ones are missing.

    Returns:
        None where nothing is missing; else one sentence that names the first thing that is, and how much more.
    """
    ranges: dict[str, list[tuple[int, int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    held: dict[str, set[int]] = {}
    for operators in parts.values():
        for name, (shape, offset, numel) in operators.items():
            place = naming.place(name)
            if place is not None and place.expert is not None:
                held.setdefault(place.layer, set()).add(place.expert)
                shapes[name] = shape
                ranges.setdefault(name, []).append((offset, offset + numel))
    wanted = {layer: range(max(found) + 1) for layer, found in held.items()} if trained is None else trained
    lacking = [*_experts(wanted, held), *_elements(ranges, shapes)]
    if not lacking:
        return None
    more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"no rank has {lacking[0]}{more}"


def unlike_experts(ages: Mapping[int, Mapping[str, int]], naming: Naming) -> str | None:
    """An expert that ranks hold from different iterations, which is none that the training ever had.

    Args:
        ages: for each rank, operator name -> iteration at which it was taken.
        naming: how names tell experts.

    Returns:
        None where all ranks agree; else one sentence that names the first.
    """
    taken: dict[tuple[str, int], tuple[int, int]] = {}
    for rank, operators in ages.items():
        for name, iteration in operators.items():
            place = naming.place(name)
            if place is None or place.expert is None:
                continue
            first, other = taken.setdefault((place.layer, place.expert), (iteration, rank))
            if first != iteration:
                return (
                    f"rank {other} has expert {place.expert} of layer {place.layer!r} from iteration {first}, and rank "
                    f"{rank} from {iteration}"
                )
    return None


def wrong_experts(
    parts: Mapping[int, Mapping[str, Held]],
    ages: Mapping[int, Mapping[str, int]],
    naming: Naming,
    trained: Mapping[str, Collection[int]] | None = None,
) -> str | None:
    """What is missing, or else unlike: see `missing_experts` and `unlike_experts`."""
    return missing_experts(parts, naming, trained) or unlike_experts(ages, naming)


def _experts(wanted: Mapping[str, Collection[int]], held: Mapping[str, set[int]]) -> Iterator[str]:
    for layer, experts in wanted.items():
        for expert in sorted(set(experts) - held.get(layer, set())):
            yield f"expert {expert} of layer {layer!r}"


def _elements(ranges: Mapping[str, list[tuple[int, int]]], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Ranges of a parameter that lie between those that ranks have; replicas overlap."""
    for name, pieces in ranges.items():
        reached = 0
        for first, end in [*sorted(pieces), (math.prod(shapes[name]),) * 2]:
            if first > reached:
                yield f"elements {reached} to {first - 1} of {name!r}"
            reached = max(reached, end)
