"""Which experts a snapshot in host memory copies anew, where one iteration does not overlap the copy of all."""

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping

__all__ = ["CopyBudget", "MemoryTurns"]

MEASURED_COPIES = 8  # bandwidth and overlap are medians of this many


class CopyBudget:
    """How many bytes one forward and backward hides, from the measured copies of one rank to host memory."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=MEASURED_COPIES)  # bytes per second
        self._overlaps: deque[float] = deque(maxlen=MEASURED_COPIES)

    def note(self, copied_bytes: int, copy_seconds: float, overlap_seconds: float) -> None:
        """Add a copy.

        Args:
            copied_bytes: of the snapshot.
            copy_seconds: that it took.
            overlap_seconds: from its begin until the optimizer needed it to be complete.
        """
        if copy_seconds > 0 and overlap_seconds > 0:
            self._rates.append(copied_bytes / copy_seconds)
            self._overlaps.append(overlap_seconds)

    @property
    def bytes(self) -> float | None:
        """None until one was measured."""
        return statistics.median(self._rates) * statistics.median(self._overlaps) if self._rates else None


class MemoryTurns:
    """Experts take turns: each snapshot copies as many as fit behind one forward and backward.

    Everything that is no expert is in each snapshot. Every rank chooses the same experts, since ranks may hold slices
    of one: the number of rounds is agreed, and the turn follows from the number of snapshots.

    Source: PEC, section 3.2 (snapshot-PEC); MOETION, section 4.2 (the local budget).

    Args:
        units: operator -> unit, for experts' parameters of this rank.
        unit_bytes: of the state of each operator in `units`.
        rest_bytes: of the rest of this rank's state.

    Attributes:
        copies: that were measured.
        rounds: snapshots until every expert was copied once; 1 copies all.
    """

    def __init__(self, units: Mapping[str, str], unit_bytes: Mapping[str, int], rest_bytes: int) -> None:
        self._units = dict(units)
        self._expert_bytes = sum(unit_bytes.values())
        self._rest_bytes = rest_bytes
        layers = Counter(unit.split("-")[0] for unit in {*units.values()})
        self._most_rounds = max(layers.values(), default=1)
        self.copies = CopyBudget()
        self._snapshots = 0
        self._left_out: dict[tuple[int, int], frozenset[str]] = {}
        self.rounds = 1

    def wanted_rounds(self) -> int:
        """The fewest rounds whose copies an iteration of this rank overlaps; 1 until one was measured."""
        hidden = self.copies.bytes
        if hidden is None or not self._expert_bytes:
            return 1
        budget = hidden - self._rest_bytes
        if budget <= 0:
            return self._most_rounds
        return min(math.ceil(self._expert_bytes / budget), self._most_rounds)

    def left_out(self) -> frozenset[str]:
        """Operators that the next snapshot does not copy; called on all ranks for the same snapshots."""
        self._snapshots += 1
        turn = self.rounds, self._snapshots % self.rounds
        if turn not in self._left_out:
            others = (name for name, unit in self._units.items() if self._turn(unit) != turn[1])
            self._left_out[turn] = frozenset(others)
        return self._left_out[turn]

    def agree(self, rounds: int) -> None:
        """All ranks take so many rounds from here on, and begin the first."""
        self.rounds, self._snapshots = rounds, 0
        self._left_out.clear()

    def _turn(self, unit: str) -> int:
        layer, index = map(int, unit.split("-"))
        return (layer + index) % self.rounds
