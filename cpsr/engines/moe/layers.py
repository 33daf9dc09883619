"""Layers of experts, and the ranks that own them."""

from dataclasses import dataclass, field

from cpsr.errors import ConfigError

__all__ = ["ExpertLayer", "ExpertParallel"]


@dataclass(frozen=True)
class ExpertParallel:
    """The group of ranks that share a layer's experts: equally many each, in the order of their indices.

    Attributes:
        size: ranks in the group.
        rank: this process's place in it.

    Raises:
        ConfigError: there is no such rank.
    """

    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"an expert-parallel group of {self.size} ranks has no rank {self.rank}")


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of routed experts, over all ranks.

    Attributes:
        name: of the layer's module.
        experts: how many there are, on all ranks together.
        expert_bytes: of one expert's weights and moments.
        expert_parallel: who owns them.

    Raises:
        ConfigError: a size is not positive, or the ranks cannot share the experts equally.
    """

    name: str
    experts: int
    expert_bytes: int
    expert_parallel: ExpertParallel = field(default_factory=ExpertParallel)

    def __post_init__(self) -> None:
        if self.experts < 1 or self.expert_bytes < 1:
            raise ConfigError(
                f"layer {self.name!r} needs at least one expert of at least one byte, "
                f"not {self.experts} of {self.expert_bytes}"
            )
        if self.experts % self.expert_parallel.size:
            fitting = [size for size in range(1, self.experts + 1) if self.experts % size == 0]
            raise ConfigError(
                f"layer {self.name!r} has {self.experts} experts, which {self.expert_parallel.size} expert-parallel "
                f"ranks cannot share equally; sizes that can: {', '.join(map(str, fitting))}"
            )

    @property
    def experts_per_rank(self) -> int:
        """Experts of this layer that each rank owns."""
        return self.experts // self.expert_parallel.size

    @property
    def owned(self) -> range:
        """Indices of the experts that this rank owns."""
        first = self.expert_parallel.rank * self.experts_per_rank
        return range(first, first + self.experts_per_rank)

    def owner(self, index: int) -> int:
        """The rank of the group that owns an expert."""
        return index // self.experts_per_rank

    def in_turn(self, position: int) -> int:
        """The expert at a position of an endless round in which each next one belongs to the next rank."""
        turn, rank = divmod(position % self.experts, self.expert_parallel.size)
        return rank * self.experts_per_rank + turn
