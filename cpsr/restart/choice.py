"""Which state the run continues from: a pure choice among the candidates, equal on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpsr.checkpoint.tiers import Decision, Source, Tier
from cpsr.journal import Beginning
from cpsr.restart.restored_state import Recomputes, Refusal

__all__ = [
    "ATTEMPTS",
    "Candidate",
    "Choice",
    "Circumstances",
    "Mode",
    "all_from",
    "candidates",
    "choose",
]

# From one checkpoint, over the lives of the run. A peer that is killed meanwhile shows as an error, too: a second
# error is attributed to the state.
ATTEMPTS = 2

Mode = Literal["auto", "predict", "exact"]


@dataclass(frozen=True)
class Candidate:
    """A state of all ranks from which training could continue.

    Attributes:
        beginning: whether it is exact, and the label of a life that begins with it.
        parts: where each rank's state comes from, by rank; empty from scratch.
    """

    beginning: Beginning
    parts: tuple[Source, ...] = ()

    @property
    def iteration(self) -> int:
        """Where training would continue."""
        return self.parts[0].iteration if self.parts else 0

    @property
    def near_failure(self) -> bool:
        """Whether its small state is the checkpoint's, stepped ahead: an emergency dump or a prediction."""
        return self.beginning in (Beginning.EMERGENCY_DUMP, Beginning.PREDICTED)

    @property
    def lost_ranks(self) -> int:
        """Number of ranks without a state at this iteration, whose state is predicted."""
        return sum(part.tier == "predicted" for part in self.parts)

    @property
    def dumped(self) -> bool:
        """Whether some rank's state is an emergency dump."""
        return any(part.tier == "departure" for part in self.parts)

    @property
    def in_memory(self) -> bool:
        """Whether it is a snapshot in host memory."""
        return any(part.tier == "memory" for part in self.parts)

    @property
    def is_window(self) -> bool:
        """Whether it is a window in host memory, which is replayed."""
        return any(entry.kind == "window" for part in self.parts for entry in part.entries)

    def cost_iterations(self, failure_iteration: int) -> int:
        """Iterations to recompute; the cost of a prediction is known only once it is made."""
        return max(failure_iteration - self.iteration, 0)


@dataclass(frozen=True)
class Circumstances:
    """What the choice depends on beside the candidates.

    Attributes:
        mode: `exact` excludes states near the failure that are not exact.
        inexact: whether a checkpoint is acceptable with experts that were saved before it.
        failure_iteration: f, the last step that every rank had finished; None where nothing is lost.
        ranks: their number.
        moves: whether the checkpoint's weights may be moved before the iterations since are recomputed.
        failures: failed attempts to continue near the failure from this checkpoint.
        last_failure: error of the last of them.
        dumps: lives that continued from an emergency dump, and have committed nothing since.
        memory_interval_iterations: between snapshots in host memory, as planned before the failure; None if there were
            none between two checkpoints.
    """

    mode: Mode
    inexact: bool
    failure_iteration: int | None
    ranks: int
    moves: bool = False
    failures: int = 0
    last_failure: str = ""
    dumps: int = 0
    memory_interval_iterations: int | None = None

    @property
    def failures_allowed(self) -> int:
        """A single rank has no peer whose end could look like an error of the state."""
        return 1 if self.ranks == 1 else ATTEMPTS


@dataclass(frozen=True)
class Choice:
    """The candidates in the order in which they are tried.

    Attributes:
        order: the best first; at most one is near the failure, then one may be moved, and the others are whole.
        refusal: why none is near the failure, where the mode allows it and there was a failure.
    """

    order: tuple[Candidate, ...]
    refusal: Refusal | None = None


def all_from(tier: Tier, iteration: int, ranks: int) -> tuple[Source, ...]:
    """The same source for every rank."""
    return tuple(Source(rank, tier, iteration) for rank in range(ranks))


def candidates(
    found: Decision,
    checkpoint_iteration: int | None,
    known: Circumstances,
    *,
    older_experts: bool,
) -> list[Candidate]:
    """Every state that training could continue from.

    Args:
        found: what host memories hold.
        checkpoint_iteration: c, the newest checkpoint that all ranks have loaded; None without one.
        known: the number of ranks and the step of the failure are looked at.
        older_experts: whether some experts of that checkpoint were saved before it.
    """
    c, f = checkpoint_iteration, known.failure_iteration
    there = []
    if found.exact and found.exact[0].tier == "memory":
        older = any(source.older for source in found.exact)
        there.append(Candidate(Beginning.OLDER_EXPERTS if older else Beginning.EXACT, found.exact))
    if c is None:
        return [*there, Candidate(Beginning.SCRATCH)]
    whole = Beginning.OLDER_EXPERTS if older_experts else Beginning.EXACT
    there.append(Candidate(whole, all_from("disk", c, known.ranks)))
    if found.departed:
        left = Beginning.EMERGENCY_DUMP if found.complete else Beginning.PREDICTED
        there.append(Candidate(left, found.departed))
    if f is not None:
        at = (f, c) if known.moves and known.mode == "auto" else (f,)
        there += [Candidate(Beginning.PREDICTED, all_from("predicted", one, known.ranks)) for one in at]
    return there


def choose(there: Sequence[Candidate], known: Circumstances) -> Choice:
    """The candidates in the order in which they are tried.

    A whole state at the failure or after it comes first: nothing is lost. In mode `auto` an exact snapshot in host
    memory that loses at most two snapshot intervals comes first too. So does a window, unless all ranks have left a
    dump, which loses no iteration. Else a state near the failure, where it is allowed: the one with most ranks' state,
    so that only lost state is predicted. Then the checkpoint with moved weights, where that is asked for. Then whole
    states, the newest first.

    Args:
        there: what there is, in any order.
        known: what the choice depends on beside that.
    """
    whole = [one for one in there if not one.near_failure]
    if not known.inexact:
        whole = [one for one in whole if one.beginning is not Beginning.OLDER_EXPERTS]
    whole.sort(key=_preference, reverse=True)
    f = known.failure_iteration
    if f is None or known.mode == "exact" or (whole and whole[0].iteration >= f):
        return Choice(tuple(whole))
    near = sorted((one for one in there if one.near_failure), key=lambda one: (one.lost_ranks, -one.iteration))
    allowed, refusal = _allowed(near, known)
    moved = [one for one in allowed[1:] if one.iteration < f and not one.dumped]
    few = whole and _loses_few(whole, f, known.memory_interval_iterations)
    if known.mode == "auto" and few and not (whole[0].is_window and allowed and not allowed[0].lost_ranks):
        what = "window" if whole[0].is_window else "snapshot"
        reason = f"a {what} in host memory is exact, and {whole[0].cost_iterations(f)} iterations older"
        return Choice(tuple(whole), Refusal(Recomputes.IN_MEMORY, reason) if near else None)
    return Choice((*allowed[:1], *moved, *whole), refusal)


def _loses_few(whole: Sequence[Candidate], failure_iteration: int, interval_iterations: int | None) -> bool:
    """Whether the newest one is an exact snapshot that loses two intervals at most; one may have been skipped."""
    newest, others = whole[0], [one.iteration for one in whole if not one.in_memory]
    if newest.is_window:  # two windows at most
        return newest.iteration > max(others, default=-1)
    return (
        interval_iterations is not None
        and newest.in_memory
        and newest.beginning is Beginning.EXACT
        and newest.cost_iterations(failure_iteration) <= 2 * interval_iterations
    )


def _preference(whole: Candidate) -> tuple[int, bool, bool]:
    return whole.iteration, whole.beginning is Beginning.EXACT, whole.in_memory


def _allowed(near: list[Candidate], known: Circumstances) -> tuple[list[Candidate], Refusal | None]:
    """The allowed candidates near the failure; and, if all were refused, why."""
    if known.failures >= known.failures_allowed and near:
        reason = f"exact, since coming back from this checkpoint failed before ({known.last_failure})"
        return [], Refusal(Recomputes.FAILED_BEFORE, reason)
    # A dump is not committed, and may contain the cause of the failure.
    if known.dumps >= ATTEMPTS:
        near = [one for one in near if not one.dumped]
    return near, None
