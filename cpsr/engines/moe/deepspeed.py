"""DeepSpeed's MoE layers: what their experts are called, what is routed to them, and which of them CPSR refuses."""

from operator import attrgetter
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.moe.utils import is_moe_param

from cpsr.engines.moe.layers import ExpertParallel
from cpsr.engines.moe.token_counts import HookedTokenCounts, RoutingLayer
from cpsr.engines.naming import Rename, plain_name
from cpsr.errors import UnsupportedEngineError

__all__ = ["Capacities", "expert_names", "expert_parallel", "has_experts", "token_counts", "unsupported_experts"]

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


def has_experts(module: torch.nn.Module) -> bool:
    """Whether there are MoE layers."""
    return any(isinstance(layer, MoE) for layer in module.modules())


def expert_parallel(module: torch.nn.Module) -> ExpertParallel:
    """The group that shares the experts, the same for all MoE layers.

    Args:
        module: of an engine, with at least one MoE layer.

    Raises:
        UnsupportedEngineError: layers have groups of different sizes.
    """
    layers = {plain_name(name): layer for name, layer in module.named_modules() if isinstance(layer, MoE)}
    sizes = {name: layer.ep_size for name, layer in layers.items()}
    if len(set(sizes.values())) > 1:
        raise UnsupportedEngineError(
            f"MoE layers are shared by groups of different sizes ({sizes}), and experts can be chosen for checkpoints "
            "only where all have one: give all layers the same ep_size, or set experts.policy to none"
        )
    any_layer = next(iter(layers.values())).deepspeed_moe
    return ExpertParallel(any_layer.ep_size, deepspeed.comm.get_rank(group=any_layer.ep_group))


class Capacities:
    """The limits to the tokens that experts take in a training step.

    Args:
        module: of an engine.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._gates: dict[str, tuple[TopKGate, float]] = {
            plain_name(name): (layer.deepspeed_moe.gate, layer.deepspeed_moe.gate.capacity_factor)
            for name, layer in module.named_modules()
            if isinstance(layer, MoE)
        }

    def scale(self, layer: str, factor: float) -> bool:
        """See `EngineAdapter.scale_expert_capacity`; False where the layer's experts take all tokens.

        Gates read the limit in every forward; that of evaluations is another one, and stays.
        """
        gate, built_with = self._gates[layer]
        if gate.drop_tokens:
            gate.capacity_factor = built_with * factor
        return bool(gate.drop_tokens)


def token_counts(engine: Any, probabilities: bool = False) -> HookedTokenCounts:
    """Tokens that the gates of all ranks route to each expert of an engine's MoE layers.

    The observer of the engine's steps reports them to it; the hooks on the layers are there at once.

    Args:
        engine: whose layers are counted.
        probabilities: sum them, too; the gates do not keep them, and their projection is done once more.

    Raises:
        ValueError: the engine has no MoE layers.
    """
    layers = [
        RoutingLayer(plain_name(name), layer.deepspeed_moe, layer.num_experts, layer.deepspeed_moe.gate.capacity_factor)
        for name, layer in engine.module.named_modules()
        if isinstance(layer, MoE)
    ]
    shown = _probabilities if probabilities else None
    return HookedTokenCounts(layers, attrgetter("exp_counts"), engine.seq_data_parallel_group, shown)


def _probabilities(layer: torch.nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    """As the gate has them, but for the noise that it may add to its inputs: summed over the tokens, `(experts,)`."""
    weight: torch.Tensor = layer.gate.wg.weight  # type: ignore[union-attr, assignment]
    hidden: torch.Tensor = args[0]
    logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]).float(), weight.float())
    return logits.softmax(1).sum(0)


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
