"""The plan that a job follows, and what the training thread tells the planner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpsr.journal import PlanRow
from cpsr.planner.inputs import Mode

__all__ = ["Plan", "Schedule", "Situation", "fixed_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A checkpoint interval with its origin and its explanation (plain data, no NaN, units in the keys).

    Attributes:
        interval_iterations: between checkpoints.
        origin: the policy that chose it.
        explanation: inputs, rule, bounds, costs and the choices of other rules.
        mode: how a failure is expected to be recovered; None if the plan did not choose.
        memory_interval_iterations: between snapshots in host memory, from 1 to the interval between checkpoints; of
            windows their length; None: there are none.
    """

    interval_iterations: int
    origin: str
    explanation: Mapping[str, Any]
    mode: Mode | None = None
    memory_interval_iterations: int | None = None

    def row(self, life: int, from_iteration: int) -> PlanRow:
        """Its row in the journal."""
        return PlanRow(
            life=life,
            from_iteration=from_iteration,
            interval_iterations=self.interval_iterations,
            origin=self.origin,
            memory_interval_iterations=self.memory_interval_iterations,
            mode=self.mode,
            explanation=self.explanation,
        )


def fixed_plan(interval_iterations: int) -> Plan:
    """The interval between checkpoints that the user set; no bound and no measurement changes it."""
    explanation = {"rule": "fixed by the configuration key checkpoint.interval_iterations", "bound": "none"}
    return Plan(interval_iterations, "fixed", explanation)


@dataclass(frozen=True)
class Schedule:
    """Progress of the training, as far as the expected end cost depends on it.

    Attributes:
        iteration: completed steps.
        learning_rate: of the next one.
        peak_learning_rate: largest so far.
    """

    iteration: int
    learning_rate: float
    peak_learning_rate: float


@dataclass(frozen=True)
class Situation:
    """The state of the training thread when it asks for a plan.

    Attributes:
        schedule: progress of the training.
        iteration_seconds: median of the newest iterations.
        plan: the current one.
    """

    schedule: Schedule
    iteration_seconds: float
    plan: Plan
