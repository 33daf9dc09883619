"""Replicated operators: each rank takes the statistics of some, and one rank trains on all."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from cpsr.predictor.protocol import History, HistoryEntry
from cpsr.predictor.statistics import MotionStatistics, OperatorMotion

__all__ = [
    "SHARED_BRANCH",
    "Learned",
    "OwnOperators",
    "Share",
    "Together",
    "learned_together",
    "shared_state",
    "without_slices",
]

OPERATORS_AT_ONCE = 64  # between two yields: a few milliseconds, where checkpoints must be taken out of the products
# Where in a predictor's `state_dict()` lies what the others read of it.
SHARED_BRANCH = ("vitp", "statistics")


@dataclass(frozen=True)
class Learned:
    """Statistics of one rank's operators.

    Attributes:
        seen: iterations of the checkpoints that it processed.
        left_out: iterations of those with NaN or infinity in its operators.
        operators: their motion.
    """

    seen: tuple[int, ...]
    left_out: tuple[int, ...]
    operators: Mapping[str, OperatorMotion]

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Learned":
        """Read what `shared_state` returned.

        Raises:
            ValueError: it was altered since, or is of another version.
        """
        if _digest(state["products"]) != state.get("products_xxh3_128"):
            raise ValueError("the products of an operator's motion are not those that were saved")
        statistics = MotionStatistics()
        statistics.load_state_dict(state)
        return cls(statistics.seen, statistics.left_out, statistics.operators)


@dataclass(frozen=True)
class Together:
    """Statistics of several ranks up to one checkpoint.

    Attributes:
        iteration: of that checkpoint.
        operators: motion up to it, of the ranks that had processed it.
    """

    iteration: int
    operators: Mapping[str, OperatorMotion]


class Share(Protocol):
    """This rank's share of the replicated operators."""

    @property
    def is_shared(self) -> bool:
        """Whether any rank takes some of this rank's operators; False: all are its own."""

    def is_mine(self, operator: str) -> bool:
        """Whether this rank takes that operator."""

    def learned(self, iteration: int) -> Iterator[Learned | None]:
        """Each sharing rank's statistics when the checkpoint of that iteration was saved, one per `next`.

        None for a rank with an unreadable part; nothing at all for an unreadable checkpoint.
        """


class OwnOperators:
    """A history of this rank's share of operators only (a `History`).

    Args:
        history: of all operators of this rank.
        share: selects its share.
    """

    def __init__(self, history: History, share: Share) -> None:
        self._history = history
        self._operators = [operator for operator in history.operators if share.is_mine(operator)]

    @property
    def entries(self) -> Sequence[HistoryEntry]:
        """All of them."""
        return self._history.entries

    @property
    def operators(self) -> Sequence[str]:
        """This rank's own."""
        return self._operators

    def numel(self, operator: str) -> int:
        """As in the whole history."""
        return self._history.numel(operator)

    def taken_at(self, operator: str, entry: int) -> int:
        """As in the whole history."""
        return self._history.taken_at(operator, entry)

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """As in the whole history."""
        return self._history.read(operator, entry, start, stop)


def shared_state(statistics: MotionStatistics) -> dict[str, Any]:
    """The statistics' `state_dict()` for other ranks too: they can read it without the rest of the file."""
    state = statistics.state_dict()
    return {**state, "products_xxh3_128": _digest(state["products"])}


def without_slices(state: dict[str, Any]) -> dict[str, Any]:
    """A predictor's `state_dict()` for a rank that owns other slices: without the products of the old ones.

    Outcomes of recoveries, the network and its examples stay: these are of whole operators, or have no scale. The
    checkpoints whose products go are taken in again, and counted again.
    """
    branch, leaf = SHARED_BRANCH
    learned = state.get(branch)
    if not learned:
        return state
    seen = learned[leaf]["seen"]
    kept = {
        **learned,
        leaf: MotionStatistics().state_dict(),
        "checkpoints": learned["checkpoints"] - len(seen),
        "trained_iteration": learned.get("trained_iteration", max(seen, default=-1)),
    }
    return {**state, branch: kept}


def learned_together(
    parts: Sequence[Learned], after: int, order: Sequence[str]
) -> Generator[None, None, Together | None]:
    """The operators' motion up to the checkpoint that covers most of them; of several, the newest.

    A rank that lags behind the others costs its own operators only. A checkpoint that was not finite on any rank is
    left out for all, as where one rank takes all operators. Yields after every 64 operators.

    Args:
        parts: of the ranks, with no operator twice.
        after: only later checkpoints count: those before were trained on.
        order: names of all operators; the result has theirs.

    Returns:
        None where there is no later checkpoint.
    """
    left_out = {iteration for part in parts for iteration in part.left_out}
    known = {
        iteration: sum(len(part.operators) for part in parts if iteration in part.seen)
        for iteration in {iteration for part in parts for iteration in part.seen} - left_out
        if iteration > after
    }
    if not known:
        return None
    newest = max(known, key=lambda iteration: (known[iteration], iteration))
    motions = {name: motion for part in parts if newest in part.seen for name, motion in part.operators.items()}
    operators: dict[str, OperatorMotion] = {}
    for name in order:
        if name in motions:
            operators[name] = _until(motions[name], newest, left_out)
            if len(operators) % OPERATORS_AT_ONCE == 0:
                yield
    return Together(newest, operators)


def _until(motion: OperatorMotion, newest: int, left_out: set[int]) -> OperatorMotion:
    """The motion without later checkpoints, and without those that are left out."""
    points = tuple(point for point in motion.points if point.iteration <= newest and point.iteration not in left_out)
    if len(points) == len(motion.points):
        return motion
    products = motion.between([point.iteration for point in points]) if len(points) > 1 else None
    if products is None:
        products = torch.zeros(0, 0, dtype=motion.products.dtype, device="cpu")
    return OperatorMotion(motion.numel, points, products)


def _digest(products: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(products.numpy().tobytes())
