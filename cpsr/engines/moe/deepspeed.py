"""DeepSpeed's MoE layers: what their experts are called, what is routed to them, and which of them CPSR refuses."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from operator import attrgetter
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.moe.utils import is_moe_param

from cpsr.engines.moe.operators import DEEPSPEED, ExpertParallel, ModelOperators, operators_of
from cpsr.engines.moe.token_counts import HookedTokenCounts, RoutingLayer
from cpsr.engines.naming import Rename, plain_name
from cpsr.errors import UnsupportedEngineError
from cpsr.ranks.group import Group

__all__ = ["EngineMixture", "StageLayer", "by_stage", "expert_names", "unsupported_experts"]

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


class EngineMixture:
    """The `Mixture` of an engine; in a pipeline its layers are those of all stages, of which a rank may have none.

    A collective in a pipeline of several stages: every rank makes it.

    Args:
        engine: whose layers know their expert-parallel groups.
        names: of the module's parameters, experts by their numbers over all ranks.

    Attributes:
        naming: how names mark experts and gates.
        found: whether any rank has such layers.

    Raises:
        UnsupportedEngineError: see `by_stage`; or DeepSpeed would hang, as some stages have no MoE layers.
    """

    def __init__(self, engine: Any, names: Iterable[str]) -> None:
        self.naming = DEEPSPEED
        self._engine, self._names = engine, list(names)
        self._own: dict[str, MoE] = {
            plain_name(name): layer for name, layer in engine.module.named_modules() if isinstance(layer, MoE)
        }
        self._stages = engine.num_stages if isinstance(engine, deepspeed.PipelineEngine) else 1
        own = {
            name: StageLayer(
                layer.num_experts,
                layer.ep_size,
                layer.deepspeed_moe.gate.capacity_factor,
                bool(layer.deepspeed_moe.gate.drop_tokens),
            )
            for name, layer in self._own.items()
        }
        stages = [own] if self._stages == 1 else layers_of_stages(int(engine.stage_id), own)
        self._all = {name: layer for layers in stages for name, layer in layers.items()}
        without = [stage for stage, layers in enumerate(stages) if not layers]
        if self._all and without and not isinstance(engine.optimizer, torch.optim.Optimizer):
            raise UnsupportedEngineError(
                f"there are no MoE layers on these stages of the pipeline: {', '.join(map(str, without))}. Others have "
                "some, and at ZeRO 1, in bf16 and in fp16 DeepSpeed would wait for ever for the norm of the experts' "
                "gradients. Give each stage such a layer, or train at ZeRO 0 in fp32"
            )
        self.found = bool(self._all)

    def operators(self) -> ModelOperators:
        """See `Mixture.operators`; with the layers of all stages."""
        sizes = {name: layer.expert_parallel for name, layer in self._all.items()}
        if len(set(sizes.values())) > 1:
            raise UnsupportedEngineError(
                f"MoE layers are shared by groups of different sizes ({sizes}), and experts can be chosen for "
                "checkpoints only where all have one: give all layers the same ep_size, or set experts.policy to none"
            )
        ranks = [deepspeed.comm.get_rank(group=layer.deepspeed_moe.ep_group) for layer in self._own.values()]
        # A stage without layers has no place in such a group, and nothing that the place would tell.
        group = ExpertParallel(next(iter(sizes.values())), ranks[0] if ranks else 0)
        return operators_of(self._names, DEEPSPEED, group).among({name: one.experts for name, one in self._all.items()})

    def token_counts(self) -> HookedTokenCounts:
        """See `Mixture.token_counts`."""
        layers = [
            RoutingLayer(name, self._own[name].deepspeed_moe if name in self._own else None, one.experts)
            for name, one in self._all.items()
        ]
        several = self._stages > 1
        return HookedTokenCounts(
            layers,
            attrgetter("exp_counts"),
            # Of the layers of other stages each rank adds nothing.
            torch.distributed.group.WORLD if several else self._engine.seq_data_parallel_group,
            device=torch.device(self._engine.device),
            forwards_are_told=not isinstance(self._engine, deepspeed.PipelineEngine),
        )

    def scale_capacity(self, layer: str, factor: float) -> bool:
        """See `Mixture.scale_capacity`; False where the layer's experts take all tokens.

        Gates read the limit in every forward; that of evaluations is another one, and stays. On a stage without the
        layer nothing is changed.
        """
        found = self._all[layer]
        if found.drops_tokens and layer in self._own:
            self._own[layer].deepspeed_moe.gate.capacity_factor = found.capacity_factor * factor
        return found.drops_tokens


def unsupported_experts(engine: Any) -> list[tuple[str, bool]]:
    """What of an engine's MoE layers is refused, by name, and whether it is used.

    ZeRO-3 is not among it: `deepspeed.initialize` refuses it itself.
    """
    layers = [module for module in engine.module.modules() if isinstance(module, MoE)]
    named = {id(parameter) for layer in layers for parameter in layer.deepspeed_moe.experts.parameters()}
    marked = [parameter for parameter in engine.module.parameters() if is_moe_param(parameter)]
    return [
        ("expert_parallel (AutoEP)", bool(engine._config.expert_parallel_config.enabled)),
        ("MoE layers with tensor parallelism", bool(layers) and _tensor_parallel_ranks(engine) > 1),
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


def _tensor_parallel_ranks(engine: Any) -> int:
    """What DeepSpeed calls model-parallel in a pipeline is its stages, too."""
    pipeline = isinstance(engine, deepspeed.PipelineEngine)
    return int(engine.grid.slice_parallel_size if pipeline else engine.mp_world_size)


@dataclass(frozen=True)
class StageLayer:
    """What all ranks know of a layer of experts, also those of other stages.

    Attributes:
        experts: how many there are, on all ranks together.
        expert_parallel: ranks that share them.
        capacity_factor: most tokens that an expert takes, over its equal part of them; as the model was built.
        drops_tokens: whether that is a limit.
    """

    experts: int
    expert_parallel: int
    capacity_factor: float
    drops_tokens: bool


def layers_of_stages(stage: int, own: Mapping[str, StageLayer]) -> list[dict[str, StageLayer]]:
    """The layers of each stage by name, in the model's order; a collective of all ranks.

    Args:
        stage: of this rank, from 0.
        own: layers of that stage.

    Raises:
        UnsupportedEngineError: see `by_stage`.
    """
    group = Group()
    try:
        gathered = group.gather([stage, [[name, *astuple(layer)] for name, layer in own.items()]])
    finally:
        group.close()
    return by_stage([(at, {name: StageLayer(*rest) for name, *rest in layers}) for at, layers in gathered])


def by_stage(of_ranks: list[tuple[int, dict[str, StageLayer]]]) -> list[dict[str, StageLayer]]:
    """The layers of each stage, of what each rank has.

    Args:
        of_ranks: each rank's stage, and the layers of it.

    Raises:
        UnsupportedEngineError: two stages have a layer of one name, or ranks of one stage other layers; on all ranks
            in the same words.
    """
    stages: dict[int, dict[str, StageLayer]] = {}
    for stage, layers in of_ranks:
        if list(stages.setdefault(stage, layers).items()) != list(layers.items()):
            raise UnsupportedEngineError(
                f"ranks of stage {stage} have different MoE layers, {list(layers)} and {list(stages[stage])}: build "
                "the same layers on all ranks of a stage"
            )
    first: dict[str, int] = {}
    for stage, layers in sorted(stages.items()):
        for name in layers:
            if first.setdefault(name, stage) != stage:
                raise UnsupportedEngineError(
                    f"MoE layer {name!r} is on stages {first[name]} and {stage}: layers of experts that stages tie are "
                    "not supported; give each stage a layer of its own"
                )
    return [layers for _, layers in sorted(stages.items())]
