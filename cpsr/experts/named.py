"""Policies and popularity measures by their configured names."""

from collections.abc import Sequence

import numpy

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.measures import CapacityAware, HardCount, Measure, Routed, SoftCount, TimeDecayed
from cpsr.engines.moe.operators import Expert, Operator
from cpsr.experts.dynamic_k import DynamicK
from cpsr.experts.each_rank import EachRank, as_on_each_rank
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.moetion import Moetion
from cpsr.experts.moevement import MoEvement, OperatorBytes
from cpsr.experts.policy import Policy
from cpsr.experts.sequential import Sequential

__all__ = ["measure_named", "policy_named"]

# A running mean over about 100 iterations.
POPULARITY_DECAY = 0.99


def policy_named(name: str, layers: Sequence[ExpertLayer], experts_per_layer: int, lost_portion_limit: float) -> Policy:
    """A policy that selects among the experts of all ranks.

    Args:
        name: of `ExpertsConfig.policy`, but for `none`.
        layers: of the model.
        experts_per_layer: K with which `dynamic_k` starts.
        lost_portion_limit: at which it doubles.
    """
    if name == "sequential":
        return Sequential(layers)
    if name == "load_aware":
        return LoadAware(layers)
    if name == "dynamic_k":
        return DynamicK(layers, LoadAware(layers), experts_per_layer, lost_portion_limit)
    if name == "moetion":
        return Moetion(layers, every_rank=True)
    if name == "window":
        return EachRank([MoEvement(_owned(own)) for own in as_on_each_rank(layers)])
    raise ValueError(f"there is no policy {name!r}")


def _owned(layers: Sequence[ExpertLayer]) -> dict[Operator, OperatorBytes]:
    """A rank's experts; unsaved ones take no bytes, since a checkpoint links their earlier files."""
    return {
        Expert(place, index): OperatorBytes(active=layer.expert_bytes, frozen=0)
        for place, layer in enumerate(layers)
        for index in layer.owned
    }


def measure_named(
    name: str, layers: Sequence[ExpertLayer], capacity_factors: Sequence[float], routed: Routed
) -> Measure:
    """A new measure of popularity.

    Args:
        name: of `ExpertsConfig.popularity`.
        layers: of the model.
        capacity_factors: of each layer: most tokens that an expert takes, over its equal part of them.
        routed: in the first iteration, from which the experts' capacities are worked out.
    """
    if name == "hard":
        return HardCount(layers)
    if name == "soft":
        return SoftCount(layers)
    if name == "decayed":
        return TimeDecayed(layers, POPULARITY_DECAY)
    if name == "capacity":
        capacities = [
            numpy.full(layer.experts, max(1.0, factor * float(numpy.sum(tokens)) / layer.experts))
            for layer, factor, tokens in zip(layers, capacity_factors, routed.tokens, strict=True)
        ]
        return CapacityAware(layers, HardCount(layers), capacities)
    raise ValueError(f"there is no measure {name!r}")
