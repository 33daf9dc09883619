"""The policies that choose experts by number, by name."""

from collections.abc import Callable, Mapping, Sequence

from cpsr.benchmarks.experts.names import MOETION
from cpsr.experts.age_weighted import AgeWeighted
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.moetion import Moetion
from cpsr.experts.policy import Policy
from cpsr.experts.sequential import Sequential

__all__ = ["IN_TURN", "POLICIES"]

IN_TURN = "in turn (PEC)"

POLICIES: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
    IN_TURN: Sequential,
    "by load (PEC)": LoadAware,
    MOETION: Moetion,
    f"{MOETION}, by age": lambda layers: AgeWeighted(Moetion(layers)),
}
"""Name -> makes the policy. MoEvement's windows lose no token and are measured apart."""
