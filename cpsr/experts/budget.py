"""What one snapshot may take."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from cpsr.errors import ConfigError
from cpsr.experts.layers import ExpertLayer

__all__ = ["Budget"]


@dataclass(frozen=True)
class Budget:
    """Bytes that one rank can move while it trains, or experts by number.

    A policy saves at least one expert even where the budget holds none: a snapshot that is late costs less than
    experts which are never saved. `fits` tells.

    Attributes:
        snapshot_bytes: that the link moves in one iteration.
        non_expert_bytes: what of them the parts take that every snapshot holds whole.
        experts_per_layer: K, which goes before bytes; None: as many as the bytes hold.

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

    @classmethod
    def of_link(
        cls, bandwidth_bytes_per_second: float, iteration_seconds: float, non_expert_bytes: float = 0.0
    ) -> "Budget":
        """What a link moves in one iteration: `B = BW x T_iter`.

        Args:
            bandwidth_bytes_per_second: as measured beside training; to the host, or over the network.
            iteration_seconds: as measured.
            non_expert_bytes: that go over this link with every snapshot; 0 on the network where other data-parallel
                ranks hold the same parts.

        Source: moetion, section 4.2.
        """
        return cls(bandwidth_bytes_per_second * iteration_seconds, non_expert_bytes)

    @property
    def expert_bytes(self) -> float:
        """What is left for experts."""
        return max(0.0, self.snapshot_bytes - self.non_expert_bytes)

    def fits(self, expert_bytes: float) -> bool:
        """Whether one rank can save experts of so many bytes without being late."""
        return self.non_expert_bytes + expert_bytes <= self.snapshot_bytes

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
