"""The policies by name: those that choose experts by number, and all that a run with failures follows."""

from collections.abc import Callable, Mapping, Sequence

from cpsr.benchmarks.experts.age_weighted import AgeWeighted
from cpsr.benchmarks.experts.names import MOETION
from cpsr.config import ExpertsConfig
from cpsr.engines.moe.layers import ExpertLayer
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.moetion import Moetion
from cpsr.experts.named import policy_named
from cpsr.experts.policy import Policy
from cpsr.experts.sequential import Sequential

__all__ = [
    "BY_BYTES",
    "BY_LOAD",
    "BY_NUMBER",
    "CONFIGURED",
    "DYNAMIC_K",
    "IN_TURN",
    "IN_WINDOW",
    "POLICIES",
    "policy_of_job",
]

IN_TURN, BY_LOAD, BY_AGE = "in turn (PEC)", "by load (PEC)", f"{MOETION}, by age"
DYNAMIC_K, IN_WINDOW = "Dynamic-K (PEC)", "window (MoEvement)"

POLICIES: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
    IN_TURN: Sequential,
    BY_LOAD: LoadAware,
    MOETION: Moetion,
    BY_AGE: lambda layers: AgeWeighted(Moetion(layers)),
}
"""Name -> makes the policy. As MoEvement has them, windows lose no token: their bytes are worked out apart."""

BY_NUMBER: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {IN_TURN: Sequential, BY_LOAD: LoadAware}
"""Those that choose for all expert-parallel ranks, K of each layer."""

BY_BYTES: Mapping[str, Callable[[Sequence[ExpertLayer]], Policy]] = {
    MOETION: lambda layers: Moetion(layers, every_rank=True),
    BY_AGE: lambda layers: AgeWeighted(Moetion(layers, every_rank=True)),
    "window": lambda layers: policy_named("window", layers, experts_per_layer=1, lost_portion_limit=1.0),
}
"""Those that choose for all of them what each rank's link takes, with the window of a job."""

CONFIGURED: Mapping[str, str] = {
    "sequential": IN_TURN,
    "load_aware": BY_LOAD,
    "dynamic_k": DYNAMIC_K,
    "moetion": MOETION,
    "window": IN_WINDOW,
}
"""Names of `ExpertsConfig.policy` -> those here, in the order in which they are measured."""


def policy_of_job(name: str, layers: Sequence[ExpertLayer], experts_per_layer: int) -> Policy:
    """What a job's checkpoints choose by, for all ranks.

    Args:
        name: among those of `CONFIGURED`.
        layers: of the model.
        experts_per_layer: K with which Dynamic-K starts; its limit is the configuration's default.
    """
    configured = next(key for key, label in CONFIGURED.items() if label == name)
    return policy_named(configured, layers, experts_per_layer, ExpertsConfig().lost_portion_limit)
