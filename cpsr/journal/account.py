"""What the run's time went into: sums over all lives, which the writer keeps beside the rows that they are of.

A step counts when it is recorded. It is a repeated one if its iteration was completed before, by any life.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cpsr.journal.rows import CheckpointRow, LifeRow, StepRow

__all__ = ["CHECKPOINT_SUMS", "IN_ORDER", "Account"]

CHECKPOINT_SUMS = ("bytes", "stall_seconds", "write_seconds", "commit_seconds")
IN_ORDER = ("clean", "sigterm")  # endings of a life after which no restart is due


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """The run's time from `began_unix_seconds` to `until_unix_seconds`.

    Steps up to `repeated_until_iteration` were trained before. Stalls lie within steps; `repeated_stall_seconds` is the
    part of both kinds in repeated ones. `paused_seconds` lie between a life that ended in good order and the next.

    Attributes:
        life: the newest one that is counted.
        training: whether the newest thing that was counted is a step of it.
        failed: whether a life has failed since the newest step, so that time since then is a restart.
        restarted_unix_seconds: when the first life after that failure began; None: none has.
        checkpoints: of each status the number of checkpoints and the sums of CHECKPOINT_SUMS.
    """

    life: int
    began_unix_seconds: float
    until_unix_seconds: float
    training: bool = False
    failed: bool = False
    restarted_unix_seconds: float | None = None
    iteration: int = 0
    reached_iteration: int = 0
    repeated_until_iteration: int = 0
    step_seconds: float = 0.0
    repeated_seconds: float = 0.0
    checkpoint_stall_seconds: float = 0.0
    memory_stall_seconds: float = 0.0
    repeated_stall_seconds: float = 0.0
    memory_snapshots: int = 0
    restart_seconds: float = 0.0
    paused_seconds: float = 0.0
    checkpoints: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def with_life(self, life: LifeRow, before: LifeRow) -> "Account":
        """A life begins: the time since the one before it, if that ended in good order, is a pause."""
        if before.ending not in IN_ORDER or before.ended_unix_seconds is None:
            began = self.restarted_unix_seconds
            return replace(
                self, failed=True, restarted_unix_seconds=life.started_unix_seconds if began is None else began
            )
        ended = max(self.until_unix_seconds, before.ended_unix_seconds)
        started = max(ended, life.started_unix_seconds)
        return replace(
            self,
            life=life.life,
            until_unix_seconds=started,
            training=False,
            failed=False,
            restarted_unix_seconds=None,
            paused_seconds=self.paused_seconds + started - ended,
        )

    def with_steps(self, steps: Sequence[StepRow], at_unix_seconds: float) -> "Account":
        """Steps of one life, in their order, the last of which ended at that time."""
        life, seconds = steps[-1].life, sum(known_amount(step.seconds) for step in steps)
        at = max(at_unix_seconds, self.until_unix_seconds)  # the clock may go back
        account = self
        if life != self.life or not self.training:
            began = max(self.until_unix_seconds, at - seconds)
            restart = began - self.until_unix_seconds if self.failed else 0.0
            account = replace(
                self,
                life=life,
                training=True,
                failed=False,
                restarted_unix_seconds=None,
                restart_seconds=self.restart_seconds + restart,
            )
        for step in steps:
            account = account._with_step(step.iteration, known_amount(step.seconds))
        return replace(account, until_unix_seconds=at)

    def _with_step(self, iteration: int, seconds: float) -> "Account":
        total = self.step_seconds + seconds
        if iteration > self.reached_iteration:
            return replace(self, iteration=iteration, reached_iteration=iteration, step_seconds=total)
        return replace(
            self,
            iteration=iteration,
            repeated_until_iteration=self.reached_iteration,
            step_seconds=total,
            repeated_seconds=self.repeated_seconds + seconds,
        )

    def with_failure(self, life: int, iteration: int, recent_seconds: Sequence[float]) -> "Account":
        """A life has failed: steps that it took and could not report count as its last ones, up to the restart.

        Args:
            life: that failed.
            iteration: where.
            recent_seconds: of its last recorded steps.
        """
        reached, missing = max(self.reached_iteration, iteration), iteration - self.iteration
        paces = [known_amount(seconds) for seconds in recent_seconds]
        unreported = life == self.life and self.training and missing > 0
        if not unreported or self.restarted_unix_seconds is None or not paces:
            return replace(self, reached_iteration=reached)
        longest = max(0.0, self.restarted_unix_seconds - self.until_unix_seconds)
        seconds = min(missing * sum(paces) / len(paces), longest)
        again = min(missing, max(0, self.reached_iteration - self.iteration))
        return replace(
            self,
            training=False,
            iteration=iteration,
            reached_iteration=reached,
            step_seconds=self.step_seconds + seconds,
            repeated_seconds=self.repeated_seconds + seconds * again / missing,
            until_unix_seconds=self.until_unix_seconds + seconds,
        )

    def with_checkpoint(self, checkpoint: CheckpointRow) -> "Account":
        """A checkpoint, and what it kept training from its work; it did so in the step after it."""
        seconds = known_amount(checkpoint.stall_seconds)
        until = self.repeated_until_iteration if self.life == checkpoint.life else self.reached_iteration
        again = seconds if checkpoint.iteration < until else 0.0
        figures = [1.0, *(known_amount(getattr(checkpoint, name)) for name in CHECKPOINT_SUMS)]
        before = self.checkpoints.get(checkpoint.status, [0.0] * len(figures))
        sums = [one + other for one, other in zip(before, figures, strict=True)]
        return replace(
            self,
            checkpoints={**self.checkpoints, checkpoint.status: sums},
            checkpoint_stall_seconds=self.checkpoint_stall_seconds + seconds,
            repeated_stall_seconds=self.repeated_stall_seconds + again,
        )

    def with_memory_stalls(self, snapshots: int, seconds: float) -> "Account":
        """What snapshots to host memory kept training from its work, in the steps that were reported last."""
        seconds = known_amount(seconds)
        again = seconds if self.iteration <= self.repeated_until_iteration else 0.0
        return replace(
            self,
            memory_stall_seconds=self.memory_stall_seconds + seconds,
            repeated_stall_seconds=self.repeated_stall_seconds + again,
            memory_snapshots=self.memory_snapshots + snapshots,
        )


def known_amount(amount: float | None) -> float:
    """A duration or size; 0 where it is not known, or none."""
    return amount if amount is not None and math.isfinite(amount) and amount > 0 else 0.0
