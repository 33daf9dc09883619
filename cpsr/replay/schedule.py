"""Which operators each snapshot of a window holds whole, and where the snapshots of a window lie in their file."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import torch

from cpsr.checkpoint.memory_states import PAGE_BYTES, SlabSize
from cpsr.checkpoint.parts import REST, Parts
from cpsr.checkpoint.tensor_file import PlacedTensor
from cpsr.engines.weight_sample import sampled
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = [
    "SAMPLED_ELEMENTS",
    "Schedule",
    "WindowLayout",
    "compute_key",
    "has_shifted",
    "sample_key",
    "schedule",
    "sparse_window",
    "units_of",
]

# Experts have new turns once the parts of this portion of them have changed by so much (moevement, section 3.5).
SHIFTED_EXPERTS, SHIFT = 0.25, 0.1

Schedule = tuple[tuple[str, ...], ...]  # for each iteration of a window, the operators that its snapshot holds whole


def units_of(
    shard: Shard, experts: Mapping[str, str], popularity: Mapping[str, float] | None = None
) -> dict[str, tuple[str, ...]]:
    """What takes turns, in the order of the turns: name -> operators of this rank.

    Experts come first, the least popular in front, then the layers with their gates, from the back of the model to its
    front: what most tokens pass stays frozen for longest, and so does what lies farthest from the loss.

    Args:
        shard: of this rank, in the model's order.
        experts: operator -> expert, for experts' parameters alone.
        popularity: operator -> score of its expert; None or empty: experts come in the model's order.

    Source: moevement, section 3.5 and appendix E.
    """
    of_experts: dict[str, list[str]] = {}
    of_layers: dict[str, list[str]] = {}
    for name in shard.operators:
        if name in experts:
            of_experts.setdefault(experts[name], []).append(name)
        else:
            of_layers.setdefault(_layer_of(name), []).append(name)
    scores = popularity or {}
    by_score = sorted(of_experts.items(), key=lambda unit: scores.get(unit[1][0], 0.0))  # of equal ones in that order
    ordered = [*by_score, *reversed(of_layers.items())]
    return {unit: tuple(names) for unit, names in ordered}


def has_shifted(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether the experts' parts of all scores have changed by so much that other turns are worth it.

    Args:
        before: operator -> score of its expert when the turns were last ordered; empty where they were not.
        now: the same, of the same operators.

    Source: moevement, section 3.5.
    """
    if not now or not before:
        return bool(now)
    whole_before, whole = sum(before.values()) or 1.0, sum(now.values()) or 1.0
    parts = [(before.get(name, 0.0) / whole_before, score / whole) for name, score in now.items()]
    return sum(abs(new - old) > SHIFT * old for old, new in parts) >= SHIFTED_EXPERTS * len(parts)


def sparse_window(
    active: Sequence[float], frozen: Sequence[float], budget_bytes: float, iterations: int = 1
) -> tuple[list[list[int]], float]:
    """The fewest snapshots over which units can be spread, so that none is larger than the budget.

    A snapshot holds the units whose turn it is, and the compute weights of those whose turn comes later; it takes as
    many of the next units as fit. So the first one has the size that Algorithm 1 computes. The paper then gives every
    snapshot as many units, `W = ceil(N / k)`. Here later ones, which hold fewer compute weights, take more of them, and
    a window is as short or shorter. The paper stops at two operators even where two do not fit; this function at one.
    No other division of the same order has fewer snapshots, if no unit takes more frozen than active.

    Args:
        active: bytes of each unit with its moments, in the order of their turns: the least popular first.
        frozen: bytes of its compute weights.
        budget_bytes: what one forward and backward hides. A unit that does not fit is alone in its snapshot, and
            training waits for it.
        iterations: the fewest snapshots, where there are as many units.

    Returns:
        For each snapshot the places of its units; and the bytes of the largest.

    Source: moevement, section 3.5, Algorithm 1.
    """
    later = float(sum(frozen))
    turns: list[list[int]] = []
    sizes = [0.0]
    for place, (whole, weights) in enumerate(zip(active, frozen, strict=True)):
        needed = iterations - len(turns)  # turns that are still to begin
        later -= weights
        if turns and sizes[-1] + whole - weights <= budget_bytes and needed < len(active) - place:
            turns[-1].append(place)
            sizes[-1] += whole - weights
        else:
            turns.append([place])
            sizes.append(whole + later)
    return turns, max(sizes)


def schedule(
    units: Mapping[str, tuple[str, ...]], active: Sequence[int], frozen: Sequence[int], iterations: int
) -> Schedule:
    """The turns of a window of so many iterations: units in their order, the largest snapshot as small as possible.

    It is the `sparse_window` of the smallest budget that so many iterations meet. So it keeps every budget for which
    `sparse_window` needs no more of them.

    Args:
        units: as `units_of` gives them.
        active: bytes of each with its moments.
        frozen: bytes of its compute weights.
        iterations: of the window; a rank with fewer units spreads them.
    """
    budgets = range(sum(active) + sum(frozen))
    budget_bytes = bisect_left(budgets, True, key=lambda one: _fits(active, frozen, one, iterations))
    turns, _ = sparse_window(active, frozen, budget_bytes, iterations)
    names = list(units.values())
    found: list[tuple[str, ...]] = [()] * iterations
    for number, turn in enumerate(turns):
        spread = (2 * number + 1) * iterations // (2 * len(turns))  # its own number where there are as many
        found[spread] = tuple(name for place in turn for name in names[place])
    return tuple(found)


def _fits(active: Sequence[int], frozen: Sequence[int], budget_bytes: int, iterations: int) -> bool:
    turns, largest = sparse_window(active, frozen, budget_bytes)
    return largest <= budget_bytes and len(turns) <= iterations


def _layer_of(operator: str) -> str:
    """The module of an operator up to its last number, as `transformer.h.0`; else its own module."""
    parts = operator.split(".")[:-1]
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts)


_ALIGNED = 64  # of each tensor, for views of any type
# Another training than the first time differs in all weights: so few elements of so few operators show it.
SAMPLED_OPERATORS, SAMPLED_ELEMENTS = 8, 1024


def compute_key(step: int, operator: str) -> str:
    """Name of an operator's compute weights in a window's file, among what is no operator's."""
    return f"compute/{step}/{operator}"


def sample_key(step: int, operator: str) -> str:
    """Name of a few weights of an operator that is replayed, as they were the first time."""
    return f"sample/{step}/{operator}"


class WindowLayout:
    """The tensors of a window, snapshot after snapshot.

    Each snapshot holds the operators whose turn it is whole, and of those whose turn comes later the compute weights.
    Of some whose turn is over it holds a few weights: a replay must give the same. The first one also holds the
    buffers.

    Args:
        template: the rank's shard.
        turns: which operators each snapshot holds whole; every operator once.
        compute: dtypes of compute weights, of operators whose masters have another one.

    Attributes:
        turns: as given.
        parts: one for each snapshot, but for what is no operator's.
        size: of the file, without the small state.
    """

    def __init__(self, template: Shard, turns: Schedule, compute: Mapping[str, torch.dtype]) -> None:
        self.turns = turns
        self._template = template
        self._places: list[dict[str, PlacedTensor]] = []
        self._ends: list[int] = []
        self._end = 0
        for step, active in enumerate(turns):
            self._places.append({})
            for name in active:
                self._add(f"param/{name}", template.operators[name].parameter.values)
                for moment, values in template.operators[name].moments.items():
                    self._add(f"moment/{moment}/{name}", values)
            for name, values in template.others.items() if step == 0 else ():
                self._add(f"other/{name}", values)
            for name in (name for later in turns[step + 1 :] for name in later):
                weights = template.operators[name].parameter.values
                self._add(f"other/{compute_key(step, name)}", weights, compute.get(name, weights.dtype))
            for name in _spread([name for earlier in turns[:step] for name in earlier]):
                values = template.operators[name].parameter.values
                self._add(f"other/{sample_key(step, name)}", sampled(values, SAMPLED_ELEMENTS))
            self._end = -(-self._end // PAGE_BYTES) * PAGE_BYTES
            self._ends.append(self._end)
        tensors = [(key, one.first, one.end - one.first) for places in self._places for key, one in places.items()]
        units = {name: f"snapshot {step}" for step, active in enumerate(turns) for name in active}
        self.parts = Parts(tensors, self._end, units, self._ends)
        self.size = SlabSize.for_tensors((key for key, _, _ in tensors), self._end)

    def _add(self, key: str, like: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        start = -(-self._end // _ALIGNED) * _ALIGNED
        place = self._places[-1][key] = PlacedTensor(key, tuple(like.shape), dtype or like.dtype, start)
        self._end = place.end

    def copies(self, step: int, shard: Shard, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Target and source of each tensor of one snapshot, but for the buffers.

        Args:
            step: from 0.
            shard: the engine's views.
            content: all bytes of the file.
        """
        tensors = dict(shard.tensors())
        for key, place in self._places[step].items():
            if key.startswith("other/compute/"):
                yield place.view(content), tensors[f"param/{key.split('/', 3)[3]}"]
            elif key.startswith("other/sample/"):
                yield place.view(content), sampled(tensors[f"param/{key.split('/', 3)[3]}"], SAMPLED_ELEMENTS)
            elif not key.startswith("other/"):
                yield place.view(content), tensors[key]

    def copy_others(self, shard: Shard, content: torch.Tensor) -> None:
        """Copy the buffers, which the next forward changes; on a GPU in the order of the current stream."""
        with torch.no_grad():
            for name, values in shard.others.items():
                self._places[0][f"other/{name}"].view(content).copy_(values, non_blocking=True)

    def copied_bytes(self, step: int) -> int:
        """Bytes of one snapshot."""
        return sum(place.end - place.first for place in self._places[step].values())

    def bounds(self, step: int) -> dict[str, int]:
        """Where one snapshot lies: `begin` and `end`, in bytes."""
        return {"begin": self._ends[step - 1] if step else 0, "end": self._ends[step]}

    def taken_at(self, first: int) -> dict[str, int]:
        """Iteration of each part, of a window that begins with this iteration."""
        return {REST: first} | {f"snapshot {step}": first + step for step in range(len(self.turns))}

    def shard(self, content: torch.Tensor) -> Shard:
        """Views of all of it: every operator, and the rest with the compute weights."""
        views = {key: place.view(content) for places in self._places for key, place in places.items()}
        operators = {}
        for name, operator in self._template.operators.items():
            one = operator.parameter
            parameter = ParamSlice(views[f"param/{name}"], one.global_shape, one.offset, one.block)
            moments = {moment: views[f"moment/{moment}/{name}"] for moment in operator.moments}
            operators[name] = OperatorState(name, parameter, moments, 0)
        return Shard(operators, {key[6:]: view for key, view in views.items() if key.startswith("other/")})


def _spread(names: list[str]) -> list[str]:
    """A few of them, from all over."""
    count = min(len(names), SAMPLED_OPERATORS)
    return [names[place * len(names) // count] for place in range(count)]
