"""What failures leave, and what each class of them is expected to cost under a plan."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

from cpsr.journal import FailureScope

__all__ = ["CLASSES_EXAMPLE", "ClassPlan", "WayBack", "classes_of"]

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
        "ways": [
            {
                "way": "memory",
                "loss_iterations": 3.5,
                "deviation_iterations": 0.0,
                "load_seconds": 1.2,
                "seconds": 3.3,
                "how": "exact, from the newest snapshot in host memory",
            }
        ],
    }
]


class WayBack(BaseModel):
    """One way back from such a failure."""

    way: Literal["memory", "replica", "window", "predicted", "disk"]
    loss_iterations: float | str = Field(description="Expected: repeated, or the end cost with the time to predict.")
    deviation_iterations: float | str = Field(description="Standard deviation of an expected end cost; else 0.")
    load_seconds: float | str = Field(description="Until the state is read; 0 where it was not measured.")
    seconds: float | str = Field(description="Loss and load.")
    how: str


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
    back_to: Literal["memory", "replica", "window", "disk"] = Field(
        description="What such a failure goes back to; `disk` also where it is predicted from there."
    )
    loss_iterations: float | str = Field(description="Expected loss of one such failure; below zero the run gains.")
    loss_per_second: float | str = Field(description="Seconds lost to them per second of wall time.")
    ways: list[WayBack] = Field(
        default=[],
        description="Ways back in the order of the plan; a restart takes a newer window before an older checkpoint. "
        "Empty in older plans.",
    )


def classes_of(explanation: Mapping[str, Any]) -> list[ClassPlan]:
    """The classes in a plan's explanation; none in plans of older versions, and of a fixed interval without memory."""
    found = explanation.get("classes", {})
    return [ClassPlan(scope=scope, **found[scope]) for scope in get_args(FailureScope) if scope in found]
