"""Bounds of every rule: from the disk, the predictor and the user."""

import math
from dataclasses import dataclass
from typing import Literal

from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.units import ITERATIONS_MAX, in_iterations, plain

__all__ = ["Bound", "Bounds", "Limits", "Mode", "bounds_of"]

Mode = Literal["predict", "recompute"]
Bound = Literal["none", "minimum", "maximum", "persist", "predictor"]


@dataclass(frozen=True)
class Limits:
    """Limits from the user and the predictor.

    Attributes:
        interval_min_iterations: the user's minimum, at least 1.
        interval_max_iterations: the user's maximum.
        predictable_interval_iterations: longest interval from which the state can be predicted, by recoveries and the
            prior; None if no limit is known.
        predictable_by: the source of that, for the plan's explanation.

    Raises:
        ValueError: the minimum is less than 1 or exceeds the maximum, or the predictable interval is less than 1.
    """

    interval_min_iterations: int = 1
    interval_max_iterations: int = ITERATIONS_MAX
    predictable_interval_iterations: int | None = None
    predictable_by: str = ""

    def __post_init__(self) -> None:
        low, high = self.interval_min_iterations, self.interval_max_iterations
        if not 1 <= low <= high:
            raise ValueError(f"interval_min_iterations ({low}) must be from 1 to interval_max_iterations ({high})")
        if self.predictable_interval_iterations is not None and self.predictable_interval_iterations < 1:
            raise ValueError(
                f"predictable_interval_iterations must be at least 1, not {self.predictable_interval_iterations}; "
                "None means no bound; for no prediction set recovery to None"
            )


@dataclass(frozen=True)
class Bounds:
    """The shortest and the longest interval in one mode, and which rule set each.

    Attributes:
        minimum_iterations: at least 1.
        maximum_iterations: at least the minimum.
        minimum_by: what set the minimum.
        maximum_by: what set the maximum.
        notes: limits that could not be kept, and unknown inputs.
    """

    minimum_iterations: int
    maximum_iterations: int
    minimum_by: Bound = "minimum"
    maximum_by: Bound = "maximum"
    notes: tuple[str, ...] = ()

    def clamp(self, interval_iterations: int) -> tuple[int, Bound]:
        """The nearest interval inside, and the bound that moved it ("none" if it was inside)."""
        if interval_iterations < self.minimum_iterations:
            return self.minimum_iterations, self.minimum_by
        if interval_iterations > self.maximum_iterations:
            return self.maximum_iterations, self.maximum_by
        return interval_iterations, "none"


def bounds_of(inputs: PlannerInputs, limits: Limits, mode: Mode) -> Bounds | None:
    """The bounds of one rank or job in one mode; None if prediction is impossible at every allowed interval.

    A checkpoint must be durable before the next one is due. If the disk needs longer than the user's maximum, that
    maximum cannot be kept. If a checkpoint is never durable, the user's maximum applies and saves are skipped.
    """
    bounds = _disk_and_user(inputs, limits)
    longest = limits.predictable_interval_iterations
    if mode == "recompute" or longest is None or longest >= bounds.maximum_iterations:
        return bounds
    if longest < bounds.minimum_iterations:
        return None
    return Bounds(bounds.minimum_iterations, longest, bounds.minimum_by, "predictor", bounds.notes)


def _disk_and_user(inputs: PlannerInputs, limits: Limits) -> Bounds:
    low, high = limits.interval_min_iterations, limits.interval_max_iterations
    persist = in_iterations(inputs.persist_seconds, inputs.iteration_seconds)
    if math.isnan(persist):
        return Bounds(low, high, notes=("the persist time is not known, so it sets no shortest interval",))
    if persist > ITERATIONS_MAX:
        note = (
            "a checkpoint is never durable before the next is due; the longest interval is taken and saves are skipped"
        )
        return Bounds(high, high, "maximum", "maximum", (note,))
    if persist <= low:
        return Bounds(low, high)
    shortest = math.ceil(persist)
    if shortest <= high:
        return Bounds(shortest, high, "persist", "maximum")
    note = f"a checkpoint is durable after {plain(persist)} iterations: interval_max_iterations cannot be kept"
    return Bounds(shortest, shortest, "persist", "persist", (note,))
