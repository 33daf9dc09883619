"""Whether the ranks of a job together hold every expert."""

import math
import re
from collections.abc import Collection, Iterator, Mapping

from cpsr.engines.moe.operators import Place, place_of

__all__ = ["SavedSlice", "wrong_experts"]

# A rank's slice of a parameter: the global shape, the first element and the number of elements.
SavedSlice = tuple[tuple[int, ...], int, int]


def wrong_experts(
    parts: Mapping[int, Mapping[str, SavedSlice]],
    ages: Mapping[int, Mapping[str, int]],
    naming: re.Pattern[str],
    trained: Collection[str] | None = None,
) -> str | None:
    """The first problem of the experts in a checkpoint, as one sentence; None where there is none.

    In this order: a parameter of an expert has different shapes on two ranks; no rank has an expert, or a part of it;
    slices of an expert are from different iterations, a state that training never had.

    Args:
        parts: for each rank, operator name -> (global shape, first element, elements) of its slice.
        ages: for each rank, operator name -> iteration at which it was taken.
        naming: how names identify experts.
        trained: names of the experts' parameters that the optimizer of any rank trains. Shapes of others are not
            compared: buffers may be of any size on each rank. None: in each layer all experts from 0 up to the last
            that any rank has. That does not see missing last experts, or missing parameters.
    """
    slices: dict[str, dict[int, SavedSlice]] = {}
    for rank, operators in parts.items():
        for name, saved in operators.items():
            slices.setdefault(name, {})[rank] = saved
    experts = {name: place for name in slices if (place := place_of(name, naming)) is not None}
    own = {name: slices[name] for name in experts}
    for name in experts:
        shapes = {shape: rank for rank, (shape, _, _) in reversed(own[name].items())}
        if len(shapes) > 1 and (trained is None or name in trained):
            found = " and ".join(f"{shape} on rank {rank}" for shape, rank in shapes.items())
            return (
                f"{_said(name, experts[name])} is {found}: build the same model on all ranks, and give each expert its "
                "number over all ranks in its name"
            )
    lacking = [*_missing(experts, naming, trained), *_gaps(own)]
    if lacking:
        return f"no rank has {lacking[0]}" + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else "")
    return _mixed_iterations(ages, naming)


def _said(name: str, place: Place) -> str:
    return f"{name!r} (expert {place.expert} of layer {place.layer!r})"


def _missing(experts: Mapping[str, Place], naming: re.Pattern[str], trained: Collection[str] | None) -> Iterator[str]:
    """Experts of which no rank has anything, then parameters of others."""
    there = set(experts.values())
    wanted = {name: place for name in trained or () if (place := place_of(name, naming)) is not None}
    every = set(wanted.values())
    if trained is None:
        every = {Place(last.layer, number) for last in there for number in range(last.expert)}
    for place in sorted(every - there, key=lambda one: (one.layer, one.expert)):
        yield f"expert {place.expert} of layer {place.layer!r}"
    for name in sorted(wanted.keys() - experts.keys()):
        if wanted[name] in there:
            yield _said(name, wanted[name])


def _gaps(slices: Mapping[str, Mapping[int, SavedSlice]]) -> Iterator[str]:
    """Ranges of a parameter that lie between those that ranks have; replicas overlap."""
    for name, of_ranks in slices.items():
        reached, size = 0, max(math.prod(shape) for shape, _, _ in of_ranks.values())
        ranges = sorted((offset, offset + numel) for _, offset, numel in of_ranks.values() if numel)
        for first, end in [*ranges, (size, size)]:
            if first > reached:
                yield f"elements {reached} to {first - 1} of {name!r}"
            reached = max(reached, end)


def _mixed_iterations(ages: Mapping[int, Mapping[str, int]], naming: re.Pattern[str]) -> str | None:
    taken: dict[Place, tuple[int, int]] = {}
    for rank, operators in ages.items():
        for name, iteration in operators.items():
            if (place := place_of(name, naming)) is None:
                continue
            first, other = taken.setdefault(place, (iteration, rank))
            if first != iteration:
                return (
                    f"rank {other} has expert {place.expert} of layer {place.layer!r} from iteration {first}, and rank "
                    f"{rank} from {iteration}"
                )
    return None
