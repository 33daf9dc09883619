"""The layers of experts of all stages of a pipeline, of which each rank has those of its own stage."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from cpsr.errors import UnsupportedEngineError
from cpsr.ranks.group import Group

__all__ = ["StageLayer", "by_stage", "layers_of_stages"]


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
