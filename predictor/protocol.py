"""What prediction is about: the history, the failure, how the state is formed, and the ranks that agree on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["CAUTION_DEVIATIONS", "STALE_METHOD", "Forecast", "History", "HistoryEntry", "Ranks", "Target"]

STALE_METHOD = "stale"
"""Method of a forecast that moves nothing: the checkpoint's weights, at the failure."""

# A setting's standard deviation counts against it: its expected end cost must be low and certain. On held-out families
# half a deviation and a whole one cost 0.16 u for GPTs, 0.72 and 0.75 for other models; 8 and 2% of the failures then
# cost more than recomputing.
CAUTION_DEVIATIONS = 0.5


@dataclass(frozen=True)
class HistoryEntry:
    """One checkpoint of the series.

    Attributes:
        iteration: iteration of the checkpoint.
        time: cumulative learning rate up to that iteration: the time axis of every predictor here.
        learning_rate: learning rate of the update after the checkpoint.
    """

    iteration: int
    time: float
    learning_rate: float


class History(Protocol):
    """The checkpoints of one rank, oldest first, readable in bounded pieces."""

    @property
    def entries(self) -> Sequence[HistoryEntry]:
        """Ascending in iteration, without repeats."""

    @property
    def operators(self) -> Sequence[str]:
        """Operators that every entry holds."""

    def numel(self, operator: str) -> int:
        """Elements of the operator's slice on this rank."""

    def taken_at(self, operator: str, entry: int) -> int:
        """Iteration at which this operator was taken in that entry (older than the entry for sparse snapshots)."""

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """Weights `[start, stop)` of the operator's slice in that entry: 1-D, float32, on the CPU, may be a view.

        Where a checkpoint holds half precision, it is widened here: predictors refuse any other dtype.
        """


@dataclass(frozen=True)
class Target:
    """Where to predict.

    Attributes:
        iteration: the failure step f.
        time: cumulative learning rate at f.
        peak_learning_rate: largest learning rate of the run so far.
        lost_share: of the state, that the failure takes and that is predicted, in (0, 1].
        moves: also at the newest checkpoint itself, where nothing was lost, the weights may be moved.
    """

    iteration: int
    time: float
    peak_learning_rate: float
    lost_share: float = 1.0
    moves: bool = False


@dataclass(frozen=True)
class Forecast:
    """How a predictor will form the state: one row of coefficients per operator, applied to the history's entries.

    The predicted weights are `sum_k coefficients[operator][k] * history.read(operator, k, ...)`.

    Attributes:
        method: how the state is formed: the direction that was taken, where a predictor has several, else its name;
            `STALE_METHOD` where nothing is moved.
        feasible: False where the predictor advises against itself; `reason` has the cause.
        coefficients: operator -> one float per history entry.
        expected_end_cost_iterations: expected end cost of this recovery, from the prior.
        reason: one sentence for the user.
        settings: the numbers behind it, for the journal.
    """

    method: str
    feasible: bool
    coefficients: dict[str, tuple[float, ...]]
    expected_end_cost_iterations: float
    reason: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def move_iterations(self) -> float:
        """The move's part of the expected end cost, which it would have without a failure; the rest is for skipping."""
        return float(self.settings.get("move_iterations", 0.0))

    @property
    def expected_deviation_iterations(self) -> float:
        """Standard deviation of the expected end cost; 0 where the predictor knows none."""
        return float(self.settings.get("expected_deviation_iterations", 0.0))

    @property
    def bound_iterations(self) -> float:
        """What it costs with `CAUTION_DEVIATIONS` more."""
        return self.expected_end_cost_iterations + CAUTION_DEVIATIONS * self.expected_deviation_iterations

    def is_safe(self, recomputed_iterations: float) -> bool:
        """Whether it can be done, and certainly costs less than recomputing."""
        return self.feasible and self.bound_iterations < recomputed_iterations


class Ranks:
    """A single rank; `cpsr.learning.exchange.Exchange` is one of several. Every rank calls each equally often.

    Attributes:
        trains: whether this rank trains the network.
    """

    trains = True

    def agree(self, entries: Sequence[int]) -> Sequence[int]:
        """History entries that any rank must leave out, for those of this rank, so that all predict from the same."""
        return entries

    def reduce(self, products: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums of float64 matrices by operator over the ranks that give one."""
        return dict(products)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank: plain data, or a tensor that has the same shape everywhere."""
        return value

    def is_mine(self, operator: str) -> bool:
        """Whether this rank learns from an operator; a replicated one has one rank that does."""
        return True

    def portion(self, operator: str) -> float:
        """Factor of this rank's products in their sum, less than 1 where other ranks own the same elements, too."""
        return 1.0
