"""The section of mixtures of experts: which of them a checkpoint saves."""

from typing import Literal

from pydantic import Field

from cpsr.config.sections import Section

__all__ = ["ExpertsConfig"]


class ExpertsConfig(Section):
    """Which experts of a mixture a checkpoint saves, and what becomes of the others after a failure."""

    policy: Literal["none", "sequential", "load_aware", "dynamic_k", "moetion", "window"] = Field(
        default="none",
        description="Which experts a checkpoint saves. none: all; sequential: K of each layer in turn; load_aware: the "
        "K with the most unsaved tokens; dynamic_k: the same, with a K that doubles as failures take tokens; moetion: "
        "as many with the most unsaved tokens as the disk takes in an interval; window: each once in the shortest "
        "round whose checkpoints it takes, the least popular first.",
    )
    experts_per_layer: int = Field(
        default=1,
        ge=1,
        description="K, experts of each layer in a checkpoint, over all ranks; for moetion and window until the disk's "
        "bandwidth has been measured.",
    )
    lost_portion_limit: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="dynamic_k doubles K once the recoveries under it have lost more than this portion of all tokens.",
    )
    popularity: Literal["hard", "soft", "decayed", "capacity"] = Field(
        default="hard",
        description="What window orders experts by: tokens, gating probability, tokens of late, tokens over capacity.",
    )
    stale: Literal["stale", "catch_up"] = Field(
        default="stale",
        description="What becomes of experts older than the checkpoint that the run goes on from. stale: they stay as "
        "saved, with more capacity until the lost tokens are made up; catch_up: also with longer steps, until the "
        "missed iterations are made up.",
    )
    catch_up_step_factor: float = Field(
        default=2.0,
        gt=1,
        le=4,
        description="How many times as far as the optimizer's own the steps of experts go that catch up; each makes up "
        "for the factor less one of the iterations that they missed. It is as if their learning rate was higher.",
    )
    recovering_capacity_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Capacity that layers with stale experts have in addition until the lost tokens are made up; 0 is "
        "off.",
    )
