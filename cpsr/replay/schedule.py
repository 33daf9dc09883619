"""Which operators each snapshot of a window holds whole."""

from collections.abc import Mapping, Sequence

from cpsr.experts.window import sparse_window
from cpsr.state.shard import Shard

__all__ = ["Schedule", "schedule", "units_of", "window_iterations"]

Schedule = tuple[tuple[str, ...], ...]  # for each iteration of a window, the operators that its snapshot holds whole


def units_of(shard: Shard, experts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """What takes turns, in the order of the turns: name -> operators of this rank.

    Experts come first, then the layers with their gates, from the back of the model to its front: what every token
    passes stays frozen for longest, and so does what lies farthest from the loss.

    Args:
        shard: of this rank, in the model's order.
        experts: operator -> expert, for experts' parameters alone.

    Source: moevement, section 3.5 and appendix E.
    """
    of_experts: dict[str, list[str]] = {}
    of_layers: dict[str, list[str]] = {}
    for name in shard.operators:
        if name in experts:
            of_experts.setdefault(experts[name], []).append(name)
        else:
            of_layers.setdefault(_layer_of(name), []).append(name)
    ordered = [*of_experts.items(), *reversed(of_layers.items())]
    return {unit: tuple(names) for unit, names in ordered}


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
