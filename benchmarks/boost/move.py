"""The predictor's move of the weights, made every so many iterations of a training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cpsr.benchmarks.recovery.methods.baselines import PlainLine
from cpsr.benchmarks.recovery.predict import applied, in_random_direction
from cpsr.benchmarks.recovery.task import batch_generator
from cpsr.benchmarks.recovery.trainer import State, Tensors, Trainer
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.errors import CPSRError
from cpsr.predictor.protocol import HistoryEntry, Target

__all__ = ["WINDOW_ITERATIONS", "Move"]

WINDOW_ITERATIONS = 300
SNAPSHOT_ITERATIONS = 25
LAST_ITERATIONS = 100  # of a training, without moves: their transient ends before the training does
RANDOM_SEEDS = 1_000  # away from the seeds of batches


@dataclass(frozen=True)
class Move:
    """Every so many iterations, the weights go on along the line over the last 300 iterations.

    Attributes:
        every: iterations between two moves; a multiple of 25.
        reach: how far along the line, in iterations of the schedule.
        first: iteration of the first move; a multiple of 25.
        path: that the line is fitted to: without the moves before, or with them.
        direction: `random`: each tensor as far, in a random direction.
    """

    every: int
    reach: int
    first: int = WINDOW_ITERATIONS
    path: Literal["own", "moved"] = "own"
    direction: Literal["line", "random"] = "line"

    @property
    def name(self) -> str:
        """In one word."""
        return f"move-{self.every}-{self.reach}-from{self.first}-{self.path}-{self.direction}"

    def due(self, iteration: int, iterations: int) -> bool:
        """Whether a training of that length is moved at an iteration."""
        return self.first <= iteration <= iterations - LAST_ITERATIONS and (iteration - self.first) % self.every == 0

    def begin(self, trainer: Trainer, workload: Workload, seed: int) -> "Moving":
        """Accompany a training."""
        return Moving(self, workload, seed)


class Moving:
    """Moves in one training; see `Course`. Moments and iterations stay."""

    def __init__(self, move: Move, workload: Workload, seed: int) -> None:
        self._move = move
        self._workload = workload
        self._seed = seed
        self._predictor = PlainLine(WINDOW_ITERATIONS, gain=1.0)
        self._history = MovedHistory()

    def after_step(self, trainer: Trainer) -> None:
        """Take a snapshot, and move, where they are due.

        Raises:
            CPSRError: the predictor refuses, so that this would be another training than its name says.
        """
        if trainer.iteration % SNAPSHOT_ITERATIONS == 0:
            entry = HistoryEntry(trainer.iteration, *_schedule(self._workload, trainer.iteration))
            self._history.add(entry, trainer.weights())
        if self._move.due(trainer.iteration, self._workload.iterations):
            state = trainer.state()
            if state.is_finite():  # what has diverged is not moved; its end says so
                self._apply(trainer, state)

    def averages(self) -> Mapping[str, Tensors]:
        """None."""
        return {}

    def _apply(self, trainer: Trainer, state: State) -> None:
        displacement = self._displacement(state)
        if self._move.direction == "random":
            displacement = in_random_direction(
                displacement, batch_generator(self._seed + RANDOM_SEEDS, state.iteration)
            )
        weights = {name: values + displacement[name] for name, values in state.weights.items()}
        trainer.load(replace(state, weights=weights))
        if self._move.path == "own":
            self._history.shift(displacement)

    def _displacement(self, state: State) -> Tensors:
        at = state.iteration + self._move.reach
        target = Target(at, _schedule(self._workload, at)[0], self._workload.peak_until(state.iteration))
        forecast = self._predictor.forecast(self._history, target)
        if not forecast.feasible:
            raise CPSRError(f"{self._move.name}: no move at iteration {state.iteration}: {forecast.reason}")
        newest = self._history.newest()
        moved = applied(self._predictor, self._history, forecast, at, replace(state, weights=newest)).weights
        return {name: values - newest[name] for name, values in moved.items()}


class MovedHistory:
    """Snapshots in memory, over as many iterations as the line needs (a `History`)."""

    def __init__(self) -> None:
        self.entries: tuple[HistoryEntry, ...] = ()
        self._weights: tuple[Tensors, ...] = ()

    @property
    def operators(self) -> Sequence[str]:
        """Parameters."""
        return sorted(self._weights[0]) if self._weights else ()

    def numel(self, operator: str) -> int:
        """Elements of the parameter."""
        return self._weights[0][operator].numel()

    def taken_at(self, operator: str, entry: int) -> int:
        """Every operator is taken with its snapshot."""
        return self.entries[entry].iteration

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        """Weights `[start, stop)` in that entry, 1-D float32."""
        return self._weights[entry][operator][start:stop]

    def newest(self) -> Tensors:
        """Weights of the newest snapshot; not a copy."""
        return self._weights[-1]

    def add(self, entry: HistoryEntry, weights: Tensors) -> None:
        """One more snapshot; those before the window go."""
        before = sum(one.iteration < entry.iteration - WINDOW_ITERATIONS for one in self.entries)
        self.entries = (*self.entries[before:], entry)
        self._weights = (*self._weights[before:], weights)

    def shift(self, displacement: Tensors) -> None:
        """Move every snapshot, as if the whole path had led to where the weights are now."""
        for weights in self._weights:
            for name, values in weights.items():
                values.add_(displacement[name])


def _schedule(workload: Workload, iteration: int) -> tuple[float, float]:
    """Cumulative learning rate up to an iteration, and the rate there; after the end the rate stays."""
    rate, beyond = workload.learning_rate(iteration), iteration - workload.iterations
    return (workload.times[-1] + beyond * rate if beyond > 0 else workload.times[iteration]), rate
