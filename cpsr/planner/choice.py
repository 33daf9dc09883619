"""What a rule says: an interval and why."""

from dataclasses import dataclass
from typing import Protocol

from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.units import ITERATIONS_MAX

__all__ = ["LONGEST", "LONGEST_TAKEN", "SHORTEST", "SHORTEST_TAKEN", "Choice", "Rule"]

SHORTEST = 1
LONGEST = ITERATIONS_MAX
# What becomes of them, for people.
SHORTEST_TAKEN = "the shortest allowed interval is taken"
LONGEST_TAKEN = "the longest allowed interval is taken"


@dataclass(frozen=True)
class Choice:
    """An interval before any bound.

    Attributes:
        interval_iterations: at least 1. Where a rule has no optimum of its own it is SHORTEST or LONGEST, so that the
            bounds decide.
        note: what is unusual about it; empty where nothing is.
    """

    interval_iterations: int
    note: str = ""


class Rule(Protocol):
    """Chooses an interval from what is known of a job."""

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The interval that the rule would take, whatever the bounds."""
