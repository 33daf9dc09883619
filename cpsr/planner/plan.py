"""The plan that a job follows, what the training thread tells the planner, and prices of failures in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpsr.journal import PlanRow
from cpsr.planner.inputs import Mode

__all__ = ["Plan", "Situation", "exact_price", "fixed_plan", "predicted_price"]


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
class Situation:
    """The training when its thread asks for a plan.

    Attributes:
        iteration: completed steps.
        learning_rate: of the next one.
        peak_learning_rate: largest so far.
        iteration_seconds: median of the newest iterations.
        plan: the current one.
    """

    iteration: int
    learning_rate: float
    peak_learning_rate: float
    iteration_seconds: float
    plan: Plan


def exact_price(iterations: float) -> str:
    """The price, in words, of going back to a checkpoint that many iterations before the failure."""
    count = f"{iterations:.0f}"
    return f"exact: {count} iteration{'' if count == '1' else 's'} later"


def predicted_price(end_cost_iterations: float, deviation_iterations: float, state: str = "predicted") -> str:
    """The price, in words, of a prediction; below 0 the run ends with a lower loss.

    Args:
        end_cost_iterations: expected.
        deviation_iterations: standard deviation of that.
        state: what it is called.
    """
    spread = f" ± {deviation_iterations:.0f}" if deviation_iterations >= 0.5 else ""
    return f"{state} state; expected cost {end_cost_iterations:z.0f}{spread} iterations"
