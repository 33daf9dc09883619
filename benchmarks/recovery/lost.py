"""The part of the state that a failure takes: all of it, one ZeRO shard of several, or one pipeline stage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from cpsr.benchmarks.recovery.trainer import State, Tensors
from cpsr.errors import ConfigError

__all__ = ["BLOCK", "PART_NAMES", "LostPart", "PartName", "lost_part", "lost_spans"]

# `1/4` is one of four equal shards of all elements in the order of the parameters, as ZeRO cuts them. `stage` is the
# middle transformer block.
PartName = Literal["all", "1/2", "1/4", "1/8", "1/16", "stage"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)
Spans = Mapping[str, tuple[int, int]]
"""First and last element plus one of each parameter's lost part; parameters without one are not in it."""
BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class LostPart:
    """What a failure takes, beside what survives it.

    Attributes:
        spans: the lost elements.
        survived: the exact state at the failure; only what lies outside of the spans has survived.
    """

    spans: Spans
    survived: State

    @property
    def share(self) -> float:
        """Of all elements, that is lost."""
        elements = sum(end - begin for begin, end in self.spans.values())
        return elements / sum(values.numel() for values in self.survived.weights.values())

    def complete(self, formed: State) -> State:
        """The formed state where something was lost, and the exact one elsewhere."""
        survived = self.survived
        return replace(
            survived,
            weights=_joined(formed.weights, survived.weights, self.spans),
            moments={
                moment: _joined(formed.moments[moment], values, self.spans)
                for moment, values in survived.moments.items()
            },
        )


def lost_part(lost: PartName, survived: State, draw: int) -> LostPart:
    """The part that a failure takes; arguments as of `lost_spans`."""
    numels = {name: values.numel() for name, values in survived.weights.items()}
    return LostPart(lost_spans(numels, lost, draw), survived)


def lost_spans(numels: Mapping[str, int], lost: PartName, draw: int) -> Spans:
    """Which elements are lost of parameters in the model's order; `draw` chooses among the shards.

    Raises:
        ConfigError: a stage is lost of a model without transformer blocks.
    """
    if lost == "all":
        return {name: (0, numel) for name, numel in numels.items()}
    if lost == "stage":
        return _stage(numels)
    shards = int(lost.removeprefix("1/"))
    size = -(-sum(numels.values()) // shards)
    first = draw % shards * size
    spans, at = {}, 0
    for name, numel in numels.items():
        begin, end = max(first - at, 0), min(first + size - at, numel)
        if begin < end:
            spans[name] = begin, end
        at += numel
    return spans


def _stage(numels: Mapping[str, int]) -> Spans:
    blocks = {name: int(found[1]) for name in numels if (found := BLOCK.match(name))}
    if not blocks:
        raise ConfigError("--lost stage needs a model with transformer blocks: name another workload, or another part")
    middle = (max(blocks.values()) + 1) // 2
    return {name: (0, numels[name]) for name, block in blocks.items() if block == middle}


def _joined(formed: Tensors, survived: Tensors, spans: Spans) -> Tensors:
    joined = {}
    for name, kept in survived.items():
        begin, end = spans.get(name, (0, 0))
        joined[name] = kept.clone()
        joined[name][begin:end] = formed[name][begin:end]
    return joined
