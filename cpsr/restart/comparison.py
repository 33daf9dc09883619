"""The states that a restart had to choose from, with what each costs, in one line for the journal."""

from collections.abc import Sequence

from cpsr.checkpoint.tiers import Source
from cpsr.restart.choice import Candidate, Circumstances, way_of

__all__ = ["compared"]


def compared(
    there: Sequence[Candidate], checkpoint_iteration: int | None, known: Circumstances, taken: Sequence[Source]
) -> str:
    """What was taken, and what the others would have cost; empty where nothing was lost or nothing else was there.

    Args:
        there: every state that training could have continued from.
        checkpoint_iteration: of the disk; None without one.
        known: the failure, and the prices of the plan before it.
        taken: where each rank's state came from.
    """
    if known.failure_iteration is None or len(there) < 2:
        return ""
    first = [one for one in there if one.parts == tuple(taken)]
    others = sorted((one for one in there if one not in first), key=lambda one: -one.iteration)
    texts = [_priced(one, checkpoint_iteration, known) for one in others]
    if known.mode == "exact":
        texts = [
            f"{text}, not in mode exact" if one.near_failure else text for one, text in zip(others, texts, strict=True)
        ]
    own = f"taken: {_priced(first[0], checkpoint_iteration, known)}" if first else "taken: none of these"
    return f"{own}; instead of {', '.join(texts)}"


def _priced(candidate: Candidate, checkpoint_iteration: int | None, known: Circumstances) -> str:
    """A state with its iterations, and its seconds where the plan knew what one takes."""
    way, prices = way_of(candidate, checkpoint_iteration, known), known.prices
    if candidate.lost_ranks == 0:
        iterations = f"{candidate.cost_iterations(known.failure_iteration or 0)} iterations repeated"
    elif way is None or prices is None:
        iterations = "at an end cost that no plan knows"
    else:
        spread, seconds = way.deviation_seconds, prices.iteration_seconds
        cost = way.loss_seconds - prices.predict_seconds
        iterations = f"an end cost of {cost / seconds:z.0f} ± {spread / seconds:.0f} iterations"
    return f"{_named(candidate)} ({iterations}{'' if way is None else f', {way.seconds:.2f} s'})"


def _named(candidate: Candidate) -> str:
    at = candidate.iteration
    if candidate.is_window:
        return f"the window from iteration {at} on"
    if candidate.in_memory:
        return f"the snapshot of iteration {at} in memory"
    if candidate.lost_ranks:
        ranks = f"{candidate.lost_ranks} of {len(candidate.parts)} ranks"
        return f"a prediction of {ranks} at iteration {at}"
    if candidate.dumped:
        return f"the emergency dumps of iteration {at}"
    return f"checkpoint {at}" if candidate.parts else "the start of the run"
