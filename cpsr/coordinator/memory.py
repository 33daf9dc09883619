"""The host memory that is allotted to the predictor when a life begins."""

from collections.abc import Callable

from cpsr.config import CPSRConfig
from cpsr.errors import ResourceError
from cpsr.group import Group
from cpsr.predictor.vitp import VITPPredictor

__all__ = ["allot_memory", "history_checkpoints"]

# Beside those that the history's span asks for: one that was committed while an older one is still being removed, and
# one that a rehearsal or a copy holds.
HELD_CHECKPOINTS = 2
MEGABYTE = 1e6

Tell = Callable[[str, str], object]


def allot_memory(
    predictor: VITPPredictor, operators: int, checkpoints_on_disk: int, config: CPSRConfig, group: Group, tell: Tell
) -> None:
    """Let the predictor work in pieces that stay within `predictor.memory_limit_bytes`; a collective.

    Args:
        predictor: of this rank, not used yet.
        operators: that this rank holds a slice of.
        checkpoints_on_disk: in the run directory, whatever interval they were made with.
        config: the limit, and how many checkpoints the history will hold.
        group: the ranks.
        tell: records an event, by kind and message; called on rank 0.

    Raises:
        ResourceError: on every rank, where it does not fit on one; the message says what takes how much, and what to
            change.
    """
    if config.mode == "exact" and not (config.predictor.learning_budget_fraction or config.rehearsal.budget_fraction):
        return  # nothing predicts or learns
    checkpoints = max(history_checkpoints(config), checkpoints_on_disk + HELD_CHECKPOINTS)
    limit_bytes = config.predictor.memory_limit_bytes
    try:
        footprint, problem = predictor.stay_within(limit_bytes, operators, checkpoints), ""
    except ValueError as error:
        footprint, problem = None, str(error)
    problems = {rank: found for rank, found in enumerate(group.gather(problem)) if found}
    if footprint is None or problems:
        rank, found = next(iter(problems.items()))
        raise ResourceError(
            f"predictor.memory_limit_bytes on rank {rank}: {found}. Nothing was started: raise the limit, lower "
            "checkpoint.history_span_iterations, or checkpoint less often (checkpoint.interval_iterations)"
        )
    if group.rank == 0:
        tell(
            "predictor memory",
            f"the predictor takes {footprint.peak_bytes / MEGABYTE:.0f} MB of a rank's host memory at most "
            f"({limit_bytes / MEGABYTE:.0f} MB allowed) and nothing on the device: {operators} operators, up to "
            f"{checkpoints} checkpoints, {footprint.slice_elements} weights a slice, {footprint.chunk_elements} a "
            "chunk",
        )


def history_checkpoints(config: CPSRConfig) -> int:
    """Most checkpoints that a history holds, at the shortest interval that the configuration allows."""
    checkpoint = config.checkpoint
    interval = checkpoint.interval_iterations or config.planner.interval_min_iterations
    span = checkpoint.history_span_iterations
    if config.rehearsal.budget_fraction > 0:
        span += config.rehearsal.iterations  # what it predicts from stays until it is over
    kept = max(checkpoint.history_min_checkpoints, checkpoint.full_checkpoints, span // interval + 1)
    return kept + HELD_CHECKPOINTS
