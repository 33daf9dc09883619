"""The papers' models, as far as bytes go."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cpsr.engines.moe.operators import Expert, ExpertLayer

__all__ = ["MOETION_EXPERTS", "SPREAD_OF_64", "Shape", "moetion_shape", "pec_shape"]

# moetion, section 7.2: percent of the tokens that each of 64 experts gets; 80% go to six of them.
SPREAD_OF_64 = (80 / 6,) * 6 + (20 / 58,) * 58
# moetion, section 7.1: GPT-1.6B has 1.6e9 parameters and 58.7e9 with 64 experts; 10 bytes each (section 2.3). Of its
# three models this is the largest number of experts. What it prints for GPT-3.8B in Figure 9 does not fit the
# parameters that it states for it: experts alone would be larger than the dense model.
MOETION_LAYERS = 24
MOETION_EXPERTS = 64
MOETION_DENSE_PARAMETERS, MOETION_PARAMETERS = 1.6e9, 58.7e9
MOETION_STATE_BYTES = 10
# moevement, section 3.2: of each parameter, weights of the forward and backward pass.
FROZEN_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A model's training state in bytes.

    Attributes:
        name: for tables.
        parts: state bytes of each non-expert part.
        layers: its layers of experts.
        state_bytes: of one parameter, with its optimizer's state.
    """

    name: str
    parts: Mapping[str, int]
    layers: tuple[ExpertLayer, ...]
    state_bytes: int

    @property
    def non_expert_bytes(self) -> int:
        """What every snapshot holds whole."""
        return sum(self.parts.values())

    @property
    def dense_bytes(self) -> int:
        """The whole state."""
        return self.non_expert_bytes + sum(layer.experts * layer.expert_bytes for layer in self.layers)

    def snapshot_bytes(self, chosen: Iterable[Expert]) -> int:
        """Non-expert parts and the experts that were chosen."""
        return self.non_expert_bytes + sum(self.layers[expert.layer].expert_bytes for expert in chosen)

    def operators(self) -> dict[Expert | str, tuple[float, float]]:
        """Every operator, saved whole or frozen; gates count among the parts."""
        sizes = dict[Expert | str, int](self.parts.items())
        for place, layer in enumerate(self.layers):
            sizes |= {Expert(place, index): layer.expert_bytes for index in range(layer.experts)}
        share = FROZEN_BYTES / self.state_bytes
        return {operator: (size, share * size) for operator, size in sizes.items()}


def pec_shape() -> Shape:
    """GPT-2 small in which every other feed-forward layer has 8 experts.

    How it was checkpointed the paper does not say. Its 54.2%, 15% and 76.9% all come out if the head has weights of
    its own and each attention keeps a causal mask of fp32. GPT-2's usual implementation does so.

    Source: pec, Table 1.
    """
    width, blocks, vocabulary, context, experts, state = 768, 12, 50257, 1024, 8, 12
    feed_forward = 8 * width * width + 5 * width
    parts = {"wte": state * vocabulary * width, "head": state * vocabulary * width}
    parts |= {"wpe": state * context * width, "ln_f": state * 2 * width}
    for block in range(blocks):
        parts |= {
            f"{block}.ln": state * 4 * width,
            f"{block}.qkv": state * 3 * width * (width + 1),
            f"{block}.proj": state * width * (width + 1),
            f"{block}.mask": 4 * context * context,
            f"{block}.ffn": state * (feed_forward if block % 2 == 0 else experts * width),
        }
    layers = tuple(ExpertLayer(f"blocks.{block}", experts, state * feed_forward) for block in range(1, blocks, 2))
    return Shape("GPT-2 small, 8 experts", parts, layers, state)


def moetion_shape(experts: int) -> Shape:
    """GPT-1.6B with so many experts in each of its 24 layers, from the parameters that the paper states for 64."""
    each_everywhere = (MOETION_PARAMETERS - MOETION_DENSE_PARAMETERS) / (MOETION_EXPERTS - 1)
    block_bytes = round(MOETION_STATE_BYTES * (MOETION_DENSE_PARAMETERS - each_everywhere) / MOETION_LAYERS)
    expert_bytes = round(MOETION_STATE_BYTES * each_everywhere / MOETION_LAYERS)
    blocks = range(MOETION_LAYERS)
    layers = tuple(ExpertLayer(f"blocks.{block}", experts, expert_bytes) for block in blocks)
    name = f"GPT-1.6B, {experts} expert{'s' * (experts > 1)}"
    return Shape(name, {f"{block}.rest": block_bytes for block in blocks}, layers, MOETION_STATE_BYTES)
