"""What failures leave, and what each class of them is expected to cost under a plan."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

from cpsr.journal import FailureScope

__all__ = ["CLASSES_EXAMPLE", "ClassPlan", "classes_of"]

CLASSES_EXAMPLE = [
    {
        "scope": "process",
        "failures_per_second": 5.4e-6,
        "share": 0.234,
        "prior_share": 0.234,
        "seen": 0,
        "back_to": "memory",
        "loss_iterations": 3.5,
        "loss_per_second": 1.1e-5,
    }
]


class ClassPlan(BaseModel):
    """The failures that leave the same."""

    scope: FailureScope = Field(
        description="`process`: the memory of every machine; `machine`: replicas of what was lost with one; "
        "`everything`: the disk alone."
    )
    failures_per_second: float | str = Field(description="Expected: prior and observed failures.")
    share: float | str = Field(description="Of all failures, expected.")
    prior_share: float = Field(description="Of all failures, before any was seen.")
    seen: int = Field(description="Failures of the run that are known to be of this class.")
    back_to: Literal["memory", "replica", "disk"] = Field(description="What such a failure goes back to.")
    loss_iterations: float | str = Field(description="Expected loss of one such failure; below zero the run gains.")
    loss_per_second: float | str = Field(description="Seconds lost to them per second of wall time.")


def classes_of(explanation: Mapping[str, Any]) -> list[ClassPlan]:
    """The classes in a plan's explanation; none in plans of older versions, and of a fixed interval without memory."""
    found = explanation.get("classes", {})
    return [ClassPlan(scope=scope, **found[scope]) for scope in get_args(FailureScope) if scope in found]
