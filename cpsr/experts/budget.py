"""Size limit of one snapshot."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from cpsr.engines.moe.layers import ExpertLayer
from cpsr.errors import ConfigError

__all__ = ["Budget"]


@dataclass(frozen=True)
class Budget:
    """Bytes that one rank can move while it trains (moetion, section 4.2), or experts by number.

    A policy saves at least one expert even where the budget holds none: a snapshot that is late costs less than
    experts which are never saved.

    Attributes:
        snapshot_bytes: that the link moves in one iteration.
        non_expert_bytes: of these, for the parts that every snapshot holds whole.
        experts_per_layer: K, which overrides bytes; None: as many as the bytes hold.

    Raises:
        ConfigError: a number is not usable.
    """

    snapshot_bytes: float = math.inf
    non_expert_bytes: float = 0.0
    experts_per_layer: int | None = None

    def __post_init__(self) -> None:
        if not (self.snapshot_bytes > 0 and 0 <= self.non_expert_bytes < math.inf):
            raise ConfigError(
                "a snapshot needs a positive number of bytes and non-expert parts of a finite one, "
                f"not {self.snapshot_bytes} and {self.non_expert_bytes}"
            )
        if self.experts_per_layer is not None and self.experts_per_layer < 1:
            raise ConfigError(f"experts_per_layer must be at least 1, not {self.experts_per_layer}")

    @property
    def expert_bytes(self) -> float:
        """Bytes left for experts."""
        return max(0.0, self.snapshot_bytes - self.non_expert_bytes)

    def experts_in_each(self, layers: Sequence[ExpertLayer]) -> int:
        """K: experts to save of each layer, over all ranks; at least 1 and at most those of the largest layer.

        By bytes, it is the largest K whose share of a rank fits where the ranks save equally many, to within one.
        0 for a model without layers of experts.
        """
        most = max((layer.experts for layer in layers), default=0)
        if self.experts_per_layer is not None:
            return min(self.experts_per_layer, most)
        counts = range(1, most + 1)
        fitting = bisect_right(counts, self.expert_bytes, key=lambda count: _busiest_rank_bytes(layers, count))
        return max(fitting, min(1, most))


def _busiest_rank_bytes(layers: Sequence[ExpertLayer], count: int) -> int:
    experts = sum(Fraction(min(count, layer.experts), layer.expert_parallel.size) for layer in layers)
    return math.ceil(experts) * max(layer.expert_bytes for layer in layers)
