"""The policies that choose experts by number, by name."""

from collections.abc import Callable, Mapping, Sequence

from cpsr.benchmarks.experts.names import MOETION
from cpsr.experts.age_weighted import AgeWeighted
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.moetion import Moetion
from cpsr.experts.named import policy_named
from cpsr.experts.policy import Policy
from cpsr.experts.sequential import Sequential

__all__ = ["BY_BYTES", "BY_NUMBER", "IN_TURN", "POLICIES"]

IN_TURN, BY_LOAD, BY_AGE = "in turn (PEC)", "by load (PEC)", f"{MOETION}, by age"

POLICIES: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
    IN_TURN: Sequential,
    BY_LOAD: LoadAware,
    MOETION: Moetion,
    BY_AGE: lambda layers: AgeWeighted(Moetion(layers)),
}
"""Name -> makes the policy. MoEvement's windows lose no token and are measured apart."""

BY_NUMBER: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {IN_TURN: Sequential, BY_LOAD: LoadAware}
"""Those that choose for all expert-parallel ranks, K of each layer."""

BY_BYTES: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
    MOETION: lambda layers: Moetion(layers, every_rank=True),
    BY_AGE: lambda layers: AgeWeighted(Moetion(layers, every_rank=True)),
    "window": lambda layers: policy_named("window", layers, experts_per_layer=1, lost_portion_limit=1.0),
}
"""Those that choose for all of them what each rank's link takes, with the window of a job."""
