"""How the parameter names of a model mark experts and gates."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["DEEPSPEED", "MODULE_LIST", "Naming", "PatternNaming", "Place", "experts_of"]


@dataclass(frozen=True)
class Place:
    """Where in a layer of experts a parameter belongs.

    Attributes:
        layer: name of the layer's module; empty where the model is the layer.
        expert: the expert's number in the name; None for the layer's gate.
    """

    layer: str
    expert: int | None


class Naming(Protocol):
    """What a model with layers of its own has to provide."""

    def place(self, parameter: str) -> Place | None:
        """Where a parameter belongs; None for what every token passes: attention, norms, shared experts."""


@dataclass(frozen=True)
class PatternNaming:
    """Names that follow a pattern.

    Attributes:
        expert: matches from the start of an expert's parameter; its groups are `layer` and `index`.
        gate: matches from the start of a gate's parameter; its group is `layer`.
    """

    expert: re.Pattern[str]
    gate: re.Pattern[str]

    def place(self, parameter: str) -> Place | None:
        """The expert's pattern goes first: experts may hold a gate of their own."""
        if found := self.expert.match(parameter):
            return Place(found["layer"] or "", int(found["index"]))
        if found := self.gate.match(parameter):
            return Place(found["layer"] or "", None)
        return None


def experts_of(naming: Naming | None, parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> its expert, as layer and number, of experts' parameters alone; none where `naming` is."""
    places = {} if naming is None else {name: naming.place(name) for name in parameters}
    return {
        name: f"{place.layer}/{place.expert}"
        for name, place in places.items()
        if place is not None and place.expert is not None
    }


# DeepSpeed's MoE; its residual branch (`mlp`, `coefficient`) is a shared expert and matches neither.
DEEPSPEED = PatternNaming(
    re.compile(r"(?:(?P<layer>.+?)\.)?deepspeed_moe\.experts\.deepspeed_experts\.(?P<index>\d+)\."),
    re.compile(r"(?:(?P<layer>.+?)\.)?deepspeed_moe\.gate\."),
)

# A `torch.nn.ModuleList` called `experts`, as most MoE models in plain torch have it, but for those in a module whose
# name ends in `shared`. A `gate` or `router` beside it is its gate; there may be none, as gates have other names too,
# or no parameters. What is not known as a gate is a part that every token passes, and so are experts that are stacked
# in one tensor, which have no names of their own.
MODULE_LIST = PatternNaming(
    re.compile(r"(?:(?P<layer>.+?)\.)?(?<!shared\.)experts\.(?P<index>\d+)\."),
    re.compile(r"(?:(?P<layer>.+?)\.)?(?:gate|router)(?:\.|$)"),
)
