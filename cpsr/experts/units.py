"""Experts as checkpoints name them (*units*): their operators and their bytes."""

from dataclasses import replace

import numpy
import torch

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.engines.moe.naming import Naming, experts_of
from cpsr.engines.moe.operators import Expert, ModelOperators
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard

__all__ = ["sized_layers", "trained_experts", "unit_name", "units_of"]


def unit_name(expert: Expert) -> str:
    """Name of an expert in checkpoints: layer and index, `00000-00012`."""
    return f"{expert.layer:05d}-{expert.index:05d}"


def units_of(operators: ModelOperators, shard: Shard) -> dict[str, str]:
    """Operator name in the shard -> `unit_name` of its expert, for experts' parameters alone."""
    return {
        name: unit_name(operator)
        for operator, names in operators.parameters.items()
        for name in names
        if isinstance(operator, Expert) and name in shard.operators
    }


def trained_experts(naming: Naming, shard: Shard, group: Group) -> frozenset[str]:
    """Names of the experts' parameters that some rank trains, which `wrong_experts` must find; a collective."""
    gathered = group.gather(list(experts_of(naming, shard.operators)))
    return frozenset(name for names in gathered for name in names)


def sized_layers(operators: ModelOperators, shard: Shard, group: Group) -> tuple[ExpertLayer, ...]:
    """The layers over all ranks, each with the bytes of its largest expert; a collective.

    An expert belongs to the rank that has most of it. Experts that no rank trains count one byte: policies need a
    positive size.
    """
    layers = operators.layers({name: 1 for names in operators.parameters.values() for name in names})
    sizes = [torch.zeros(layer.experts, dtype=torch.int64, device="cpu") for layer in layers]
    for operator, names in operators.parameters.items():
        if isinstance(operator, Expert):
            trained = (shard.operators[name] for name in names if name in shard.operators)
            sizes[operator.layer][operator.index] = sum(one.state_bytes for one in trained)
    table = group.reduce(torch.cat(sizes), "max")
    by_layer = numpy.split(table.numpy(), numpy.cumsum([layer.experts for layer in layers])[:-1])
    return tuple(
        replace(layer, expert_bytes=max(1, *size.tolist())) for layer, size in zip(layers, by_layer, strict=True)
    )
