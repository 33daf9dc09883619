"""One failure of a run: what is left of the state, and what a way to come back makes of it."""

from dataclasses import dataclass
from functools import cached_property

from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.lost import LostPart, lost_part
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import Trajectory

__all__ = ["Failure", "Formed"]


@dataclass(frozen=True)
class Failure:
    """A run that fails, at one point.

    Attributes:
        trajectory: the run; its checkpoints are the history.
        point: where it fails.
    """

    trajectory: Trajectory
    point: Point

    @cached_property
    def checkpoint(self) -> State:
        """The fault-free run at the checkpoint, whose moments every method keeps, counting on from f."""
        return self.trajectory.at(self.point.checkpoint).state()

    @cached_property
    def exact(self) -> State:
        """The fault-free run at the failure."""
        trainer = self.trajectory.trainer()
        trainer.load(self.checkpoint)
        self.trajectory.advance(trainer, self.point.failure)
        return trainer.state()

    @cached_property
    def part(self) -> LostPart:
        """What is lost."""
        return lost_part(self.point.lost, self.exact, self.point.checkpoint // self.point.interval)


@dataclass(frozen=True)
class Formed:
    """What a method made of a failure.

    Attributes:
        state: where training goes on; None where the method advises against itself.
        reason: one sentence for people.
        rate_factor: on the learning rates of the updates before iteration `rate_until`.
    """

    state: State | None
    reason: str
    rate_factor: float = 1.0
    rate_until: int = 0
