"""Loops whose batches a checkpoint cannot follow: each kind is reported once."""

import logging

from cpsr.job import Job
from cpsr.saving.draws import LEARNED, Draws

__all__ = ["NO_BATCHES", "BatchWarnings"]

_PREPARE = (
    "as a learning-rate finder does, take them before the run is opened: CPSR counts them as steps of the training, "
    "and a restarted script would take them again, on the restored weights"
)
NO_BATCHES = (
    "no batch came from recovery.resume in the first {}. If these steps train, checkpoints hold no position in the "
    "data: after a restart the script begins its data anew, and batches drawn ahead of a step are drawn from other "
    "random numbers. Take the batches from recovery.resume(loader), or from recovery.resume(get_batch) where a "
    f"function draws them at random. If these steps prepare the training, {_PREPARE}"
)
STEPS_BEFORE = (
    "this life has taken {} before its first batch from recovery.resume. If these steps train, take their batches from "
    f"recovery.resume, too. If they prepare the training, {_PREPARE}"
)
OTHER_THREAD = (
    "another thread takes the batches: a restart goes on after the last batch that was taken, and those that wait for "
    "the training thread are never trained on. Iterate over recovery.resume(loader) in the training loop itself, and "
    "leave fetching ahead to the DataLoader: num_workers=..., prefetch_factor=..."
)
SEVERAL_STEPS = (
    "the loop takes more steps on one batch than there are between two checkpoints. CPSR saves when the loop takes its "
    "next batch, since no position in the data lies between: until then a failure loses all of them"
)


class BatchWarnings:
    """Reports, on rank 0, loops that a restart would continue at another batch, or that are saved late.

    Args:
        job: this rank's.
        draws: the batches that the loop has drawn.
    """

    def __init__(self, job: Job, draws: Draws) -> None:
        self._job, self._draws = job, draws
        self._predicts = job.config.mode != "exact"  # a restart may continue without a checkpoint at its iteration
        self._without = 0  # steps before the first batch from `resume`
        self._looked = False
        self._said: set[str] = set()

    def after_step(self) -> None:
        """A step is complete."""
        if not self._draws.drawn:
            self._without += 1
        elif self._without:
            self._say_without(STEPS_BEFORE)
        if not self._looked and len(self._draws.taken) == LEARNED:
            self._looked = True
            self._look(self._draws.taken)

    def _look(self, taken: list[int]) -> None:
        expected, later = self._job.adapter.micro_batches_per_iteration, taken[1:]  # the first may take some ahead
        if self._draws.by_another_thread:
            self._say("batches ahead", OTHER_THREAD)
        elif self._predicts and any(taken) and later != [expected] * len(later):
            steady = f"Pass TorchAdapter(model, optimizer, scheduler, micro_batches_per_iteration={later[0]})"
            self._say(
                "batches per step",
                f"the loop takes {', '.join(map(str, taken))} batches for its first steps, and CPSR expects {expected} "
                "for each: a restart near the failure would continue at the wrong batch. "
                f"{steady if later[0] and len(set(later)) == 1 else 'Set mode: exact'}",
            )

    def at_checkpoint(self) -> None:
        """A checkpoint begins, which has no position in the data if no batch came from `resume`."""
        if not self._draws.drawn:
            self._say_without(NO_BATCHES)

    def _say_without(self, message: str) -> None:
        if not self._predicts and self._job.adapter.pipeline_stage is None:
            steps = f"{self._without} step{'s' * (self._without > 1)}"
            self._say("no batches from resume", message.format(steps))
        self._without = 0

    def waits_for_batch(self, *, due: bool) -> None:
        """A save waits until the loop takes its next batch, for a whole interval if one more is `due`."""
        if due:
            self._say("steps on one batch", SEVERAL_STEPS)

    def _say(self, kind: str, message: str) -> None:
        if kind not in self._said and self._job.group.rank == 0:
            self._job.journal.event(kind, message, self._job.adapter.iteration, logging.WARNING)
        self._said.add(kind)
