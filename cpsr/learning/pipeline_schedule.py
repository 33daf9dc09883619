"""How long the stages of a pipeline wait for each other, computed from the schedule.

The order is that of DeepSpeed's `TrainSchedule`: one forward, one backward in turn ("1F1B"). Stage s of S computes the
forward of micro-batch m in slot `2 m + s`. The backward has slot `2 m + 2 S - s - 1`. Its receives wait for what a
neighbour computes in the slot before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["RECEIVE_ACTIVATION", "RECEIVE_GRADIENT", "Slot", "StageWaits", "idle_shares", "stage_slots", "stage_waits"]

# DeepSpeed's names of the two instructions that wait for another stage.
RECEIVE_ACTIVATION, RECEIVE_GRADIENT = "RecvActivation", "RecvGrad"
# A backward computes the gradients of inputs and of weights, a forward one product: the usual ratio if nothing else
# is known.
BACKWARD_RATIO = 2.0

# Number of the slot, computation, micro-batch.
Slot = tuple[int, Literal["forward", "backward"], int]


@dataclass(frozen=True)
class StageWaits:
    """When one stage idles in an iteration that all stages begin together.

    Attributes:
        activation_seconds: inside each `RecvActivation`, in their order; none on the first stage.
        gradient_seconds: inside each `RecvGrad`; none on the last stage.
        tail_seconds: from its last backward to that of the first stage, which ends last; it falls into the optimizer
            step or the next iteration's first receive, not into a receive of this iteration.
        iteration_seconds: from the beginning to the end of the last backward of all stages.
    """

    activation_seconds: tuple[float, ...]
    gradient_seconds: tuple[float, ...]
    tail_seconds: float
    iteration_seconds: float

    @property
    def receive_seconds(self) -> float:
        """All of the waits inside receives."""
        return sum(self.activation_seconds) + sum(self.gradient_seconds)

    @property
    def idle_seconds(self) -> float:
        """All of the stage's idle time: `(S - 1) (forward + backward)` where there are as many micro-batches."""
        return self.receive_seconds + self.tail_seconds


def stage_slots(stages: int, micro_batches: int, stage: int) -> list[Slot]:
    """The computations of a stage in their order.

    >>> stage_slots(stages=2, micro_batches=2, stage=0)
    [(0, 'forward', 0), (2, 'forward', 1), (3, 'backward', 0), (5, 'backward', 1)]
    """
    found: list[Slot] = []
    for batch in range(micro_batches):
        found += [(2 * batch + stage, "forward", batch), (2 * batch + 2 * stages - stage - 1, "backward", batch)]
    return sorted(found)


def stage_waits(
    stages: int, micro_batches: int, forward_seconds: float, backward_seconds: float
) -> tuple[StageWaits, ...]:
    """Simulate one iteration: a computation begins when its stage is free and its neighbour's result is there.

    Sending takes no time, and all stages compute equally long.

    Args:
        stages: S, at least 1.
        micro_batches: of one iteration, at least 1.
        forward_seconds: one stage's forward of one micro-batch.
        backward_seconds: its backward.

    Returns:
        One `StageWaits` for each stage.

    Raises:
        ValueError: fewer than one stage or micro-batch.
    """
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"{stages} stages and {micro_batches} micro-batches: at least 1 of each")
    forward_ends = [[0.0] * micro_batches for _ in range(stages)]
    backward_ends = [[0.0] * micro_batches for _ in range(stages)]
    free = [0.0] * stages
    activations: list[list[float]] = [[] for _ in range(stages)]
    gradients: list[list[float]] = [[] for _ in range(stages)]
    computations = sorted(
        (slot, stage, kind, micro_batch)
        for stage in range(stages)
        for slot, kind, micro_batch in stage_slots(stages, micro_batches, stage)
    )
    for _, stage, kind, micro_batch in computations:
        if kind == "forward":
            if stage > 0:
                _wait(free, stage, forward_ends[stage - 1][micro_batch], activations)
            free[stage] += forward_seconds
            forward_ends[stage][micro_batch] = free[stage]
        else:
            if stage < stages - 1:
                _wait(free, stage, backward_ends[stage + 1][micro_batch], gradients)
            free[stage] += backward_seconds
            backward_ends[stage][micro_batch] = free[stage]
    end = max(free)
    return tuple(
        StageWaits(tuple(activations[stage]), tuple(gradients[stage]), end - free[stage], end)
        for stage in range(stages)
    )


def idle_shares(stages: int, micro_batches: int, stage: int) -> dict[str, Sequence[float]]:
    """Wait of each receive of a stage as a share of an iteration, by kind of receive (for `Bubbles`)."""
    waits = stage_waits(stages, micro_batches, 1.0, BACKWARD_RATIO)[stage]
    return {
        RECEIVE_ACTIVATION: [seconds / waits.iteration_seconds for seconds in waits.activation_seconds],
        RECEIVE_GRADIENT: [seconds / waits.iteration_seconds for seconds in waits.gradient_seconds],
    }


def _wait(free: list[float], stage: int, available: float, waits: list[list[float]]) -> None:
    waits[stage].append(max(available - free[stage], 0.0))
    free[stage] = max(available, free[stage])
