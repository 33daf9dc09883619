"""Which experts a snapshot in host memory copies anew: those with the most to lose there, as many as a step hides."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cpsr.engines.moe.operators import Expert, ExpertLayer
from cpsr.engines.moe.token_counts import PerExpert
from cpsr.experts.copy_budget import CopyBudget
from cpsr.experts.policies import Budget, Load, Policy
from cpsr.experts.routed import RoutedTokens, unit_name

__all__ = ["Agreed", "InMemory"]


@dataclass(frozen=True)
class Agreed:
    """What the ranks agree on at a checkpoint.

    Attributes:
        expert_bytes: of experts, that one iteration of every rank hides; None until all ranks have measured it.
        rates: tokens of each expert in an iteration, `(experts of all layers,)`.
        run_tokens: see `Load`.
        lost_tokens: likewise.
    """

    expert_bytes: float | None
    rates: NDArray[numpy.float64]
    run_tokens: float
    lost_tokens: float


class InMemory:
    """Selects experts for the snapshots between checkpoints; nothing here waits for the device or for other ranks.

    Everything that is no expert is in each snapshot. By the policy of checkpoints, but with an account of its own of
    what was routed to each expert since a snapshot has copied it. A checkpoint copies all experts to host memory.

    Where each expert lies on one rank, a rank goes by the tokens of its own batches, as they come to the host. Ranks
    that hold parts or copies of one expert must choose alike: then all go by the tokens of an iteration on which they
    agreed at the last checkpoint.

    Args:
        tokens: of this life.
        layers: of the model.
        policy: selects among the experts of all ranks.
        rest_bytes: of what is no expert, on this rank.
        by_bytes: whether the policy goes by bytes; else by K, as many as fit.
        owners: ranks, where each expert lies on one of them; None where several hold parts of one.

    Attributes:
        copies: that were measured.

    Source: moetion, Algorithm 1 and section 4.2 (local budget); pec, section 3.2 (snapshot-PEC).
    """

    def __init__(
        self,
        tokens: RoutedTokens,
        layers: Sequence[ExpertLayer],
        policy: Policy,
        rest_bytes: int,
        *,
        by_bytes: bool,
        owners: int | None,
    ) -> None:
        self._tokens, self._layers, self._policy = tokens, tuple(layers), policy
        self._rest_bytes, self._by_bytes, self._owners = rest_bytes, by_bytes, owners
        self._experts = [Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts)]
        self._place = {unit_name(expert): place for place, expert in enumerate(self._experts)}
        self._ends = numpy.cumsum([layer.experts for layer in layers])[:-1]
        self.copies = CopyBudget()
        self._agreed: Agreed | None = None
        self._step = 0
        self.restart(tokens.iteration)

    def restart(self, iteration: int) -> None:
        """The next snapshot leaves out nothing that a checkpoint of this iteration has not."""
        self._iteration = iteration
        self._unsaved, self._ages = numpy.zeros((2, len(self._experts)))
        self._seen = self._tokens.local()

    def wanted_bytes(self) -> float | None:
        """Of experts, that an iteration of this rank hides; None until one was measured."""
        hidden = self.copies.bytes
        return None if hidden is None else hidden - self._rest_bytes

    def agree(self, agreed: Agreed) -> None:
        """From here on."""
        self._agreed = agreed

    def left_out(self, iteration: int) -> frozenset[str]:
        """Operators of this rank that the snapshot of this iteration does not copy; all ranks ask for the same ones."""
        agreed = self._agreed
        if agreed is None or agreed.expert_bytes is None or not self._tokens.units:
            return frozenset()
        routed = self._routed_since(iteration, agreed)
        self._unsaved = self._unsaved + routed
        load = Load(
            self._of_layers(self._unsaved),
            self._of_layers(self._ages),
            float(routed.sum()),
            agreed.run_tokens,
            agreed.lost_tokens,
        )
        chosen = self._policy.select(self._step, load, self._budget(agreed.expert_bytes))
        self._step += 1
        copied = numpy.zeros(len(self._experts), dtype=bool)
        copied[[self._place[unit_name(expert)] for expert in chosen]] = True
        self._unsaved[copied] = 0.0
        self._ages = numpy.where(copied, 0.0, self._ages + 1)
        return frozenset(name for name, unit in self._tokens.units.items() if not copied[self._place[unit]])

    def _routed_since(self, iteration: int, agreed: Agreed) -> NDArray[numpy.float64]:
        """Tokens of each expert since the snapshot before."""
        passed, self._iteration = iteration - self._iteration, iteration
        if self._owners is None:
            return agreed.rates * passed
        before, self._seen = self._seen, self._tokens.local()
        return self._owners * (self._seen - before).astype(numpy.float64)

    def _budget(self, expert_bytes: float) -> Budget:
        if self._by_bytes:
            return Budget(snapshot_bytes=max(1.0, expert_bytes))
        one_of_each = sum(layer.expert_bytes for layer in self._layers) / self._layers[0].expert_parallel.size
        return Budget(experts_per_layer=max(1, int(expert_bytes / one_of_each)))

    def _of_layers(self, values: NDArray[numpy.float64]) -> PerExpert:
        return tuple(numpy.split(values, self._ends))
