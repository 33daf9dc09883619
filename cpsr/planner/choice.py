"""The result of a rule: an interval, and what is unusual about it."""

from dataclasses import dataclass
from typing import Protocol

from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.units import ITERATIONS_MAX

__all__ = ["LONGEST", "LONGEST_TAKEN", "SHORTEST", "SHORTEST_TAKEN", "Choice", "Rule"]

SHORTEST = 1
LONGEST = ITERATIONS_MAX
# Their effect, for messages.
SHORTEST_TAKEN = "the shortest allowed interval is taken"
LONGEST_TAKEN = "the longest allowed interval is taken"


@dataclass(frozen=True)
class Choice:
    """An interval before any bound.

    Attributes:
        interval_iterations: at least 1. If a rule has no optimum this is SHORTEST or LONGEST, so that the bounds
            decide.
        note: what is unusual about it; may be empty.
    """

    interval_iterations: int
    note: str = ""


class Rule(Protocol):
    """Chooses an interval from the inputs of a job."""

    def choose(self, inputs: PlannerInputs) -> Choice:
        """The interval by the rule, before any bound."""
