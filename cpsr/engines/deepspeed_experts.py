"""DeepSpeed's MoE layers: what their experts are called, what is routed to them, and which of them CPSR refuses."""

from operator import attrgetter
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.moe.utils import is_moe_param

from cpsr.engines.naming import Rename, plain_name
from cpsr.experts.token_counts import HookedTokenCounts, RoutingLayer

__all__ = ["expert_names", "token_counts", "unsupported_experts"]

_EXPERTS = "experts.deepspeed_experts."


def expert_names(module: torch.nn.Module) -> Rename:
    """Names in which every expert has its number over all ranks.

    DeepSpeed numbers a rank's own experts from 0, so that one name stands for another expert on each rank of the
    expert-parallel group. Rank r of that group owns the n experts from `r n` on: tokens are sent by that order.

    Args:
        module: of an engine, whose layers know their expert-parallel groups.
    """
    first = {
        f"{plain_name(name)}.{_EXPERTS}": deepspeed.comm.get_rank(group=layer.ep_group) * layer.num_local_experts
        for name, layer in module.named_modules()
        if isinstance(layer, MOELayer)
    }

    def rename(name: str) -> str:
        plain = plain_name(name)
        for experts, number in first.items():
            if plain.startswith(experts):
                index, _, rest = plain.removeprefix(experts).partition(".")
                return f"{experts}{int(index) + number}.{rest}"
        return plain

    return rename


def token_counts(engine: Any) -> HookedTokenCounts:
    """Tokens that the gates of all ranks route to each expert of an engine's MoE layers.

    Whoever watches the engine's steps tells it of them; the hooks on the layers are there at once.

    Raises:
        ValueError: the engine has no MoE layers.
    """
    layers = [
        RoutingLayer(plain_name(name), layer.deepspeed_moe, layer.num_experts)
        for name, layer in engine.module.named_modules()
        if isinstance(layer, MoE)
    ]
    return HookedTokenCounts(layers, attrgetter("exp_counts"), engine.seq_data_parallel_group)


def unsupported_experts(engine: Any) -> list[tuple[str, bool]]:
    """What of an engine's MoE layers is refused, by name, and whether it is used.

    ZeRO-3 is not among it: `deepspeed.initialize` refuses it itself.
    """
    layers = [module for module in engine.module.modules() if isinstance(module, MoE)]
    named = {id(parameter) for layer in layers for parameter in layer.deepspeed_moe.experts.parameters()}
    marked = [parameter for parameter in engine.module.parameters() if is_moe_param(parameter)]
    return [
        ("expert_parallel (AutoEP)", bool(engine._config.expert_parallel_config.enabled)),
        ("MoE layers in a pipeline", bool(layers) and isinstance(engine, deepspeed.PipelineEngine)),
        ("MoE layers with tensor parallelism", bool(layers) and engine.mp_world_size > 1),
        (
            "MoE layers with enable_expert_tensor_parallelism",
            any(layer.enable_expert_tensor_parallelism for layer in layers),
        ),
        ("MoE layers with use_tutel", any(layer.deepspeed_moe.use_tutel for layer in layers)),
        (
            "parameters of experts (allreduce=False) outside deepspeed.moe.layer.MoE",
            any(id(parameter) not in named for parameter in marked),
        ),
    ]
