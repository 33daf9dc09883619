"""The section of mixtures of experts: which of them a checkpoint saves."""

from typing import Literal

from pydantic import Field

from cpsr.config.sections import Section

__all__ = ["ExpertsConfig"]


class ExpertsConfig(Section):
    """Which experts of a mixture a checkpoint saves, and what becomes of the others after a failure."""

    policy: Literal["none", "sequential", "load_aware", "dynamic_k", "moetion"] = Field(
        default="none",
        description="Which experts a checkpoint saves. none: all; sequential: K of each layer in turn; load_aware: the "
        "K with the most unsaved tokens; dynamic_k: the same, with a K that doubles as failures take tokens; moetion: "
        "as many with the most unsaved tokens as the disk takes in an interval.",
    )
    experts_per_layer: int = Field(
        default=1,
        ge=1,
        description="K, experts of each layer in a checkpoint, over all ranks; for moetion until the disk's "
        "bandwidth has been measured.",
    )
    lost_portion_limit: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="dynamic_k doubles K once the recoveries under it have lost more than this portion of all tokens.",
    )
    recovering_capacity_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Capacity that layers with stale experts have in addition until the lost tokens are made up; 0 is "
        "off.",
    )
