"""Which operators each snapshot of a window holds whole."""

from collections.abc import Mapping, Sequence

from cpsr.experts.window import sparse_window
from cpsr.state.shard import Shard

__all__ = ["Schedule", "has_shifted", "schedule", "units_of", "window_iterations"]

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


def window_iterations(active: Sequence[int], frozen: Sequence[int], budget_bytes: float) -> int:
    """The fewest iterations over which the units can be spread, so that no snapshot is larger than the budget.

    Args:
        active: bytes of each unit with its moments, in the order of their turns.
        frozen: bytes of its compute weights.
        budget_bytes: what one forward and backward hides.

    Source: moevement, section 3.5, Algorithm 1.
    """
    return sparse_window(active, frozen, 1.0, max(1.0, budget_bytes)).window if active else 1


def schedule(units: Mapping[str, tuple[str, ...]], active: Sequence[int], iterations: int) -> Schedule:
    """The turns of a window of so many iterations: units in their order, about as many bytes in each.

    Args:
        units: as `units_of` gives them.
        active: bytes of each.
        iterations: of the window; a rank with fewer units has iterations without one.
    """
    turns: list[list[str]] = [[] for _ in range(iterations)]
    whole, before = max(1, sum(active)), 0
    for names, size in zip(units.values(), active, strict=True):
        middle = before + size / 2
        turns[min(int(middle / whole * iterations), iterations - 1)] += names
        before += size
    return tuple(map(tuple, turns))


def _layer_of(operator: str) -> str:
    """The module of an operator up to its last number, as `transformer.h.0`; else its own module."""
    parts = operator.split(".")[:-1]
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts)
