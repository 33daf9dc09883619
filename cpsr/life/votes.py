"""Decisions of all ranks at a step boundary: to leave, another interval."""

import logging

from cpsr.job import Job
from cpsr.life.rehearsed import Rehearsed, rehearsed
from cpsr.life.saver import Saver
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.planner.plan import Plan
from cpsr.ranks.group import Ballot

__all__ = ["Votes"]


class Votes:
    """Exchanges proposals in a vote without waiting; a proposal takes effect one call later.

    Args:
        job: this rank's.
        planner: proposes intervals on rank 0.
        saver: adopts an agreed interval.

    Attributes:
        rehearsed: cuts short a life that `cpsr rehearse` watches; None: nobody watches it.
    """

    def __init__(self, job: Job, planner: JobPlanner, saver: Saver) -> None:
        self._job = job
        self._planner = planner
        self._saver = saver
        self._votes = job.group.votes()
        self._proposed: Plan | None = None  # not agreed upon yet
        self.rehearsed = None if (asked := rehearsed()) is None else Rehearsed(asked, job)

    def exchange(self, iteration: int, *, stop: bool) -> bool:
        """Propose now, and carry out the agreement from the previous call.

        Args:
            iteration: the one that has just ended.
            stop: whether this rank was asked to leave.

        Returns:
            Whether all ranks leave after this iteration.
        """
        if (failure := self._planner.failure()) is not None:
            self._job.journal.event("planning ended", failure, level=logging.ERROR)
        proposal = self._planner.proposal() if self._proposed is None else None
        if proposal is not None:
            self._proposed = proposal
        turns = self._saver.memory.turns
        blocked, busy = turns.ballot()
        agreed = self._votes.exchange(
            Ballot(
                stop,
                0 if proposal is None else proposal.interval_iterations,
                0 if proposal is None else proposal.memory_interval_iterations or 0,
                blocked,
                busy,
            )
        )
        turns.read(iteration, agreed.blocked, agreed.busy)
        if agreed.interval_iterations:
            # Rank 0's proposal, as far as this rank needs it.
            plan = self._proposed or Plan(
                agreed.interval_iterations,
                self._job.config.planner.policy,
                {"rule": "planned by rank 0, whose journal explains it"},
                memory_interval_iterations=agreed.memory_interval_iterations or None,
            )
            self._saver.adopt(plan, iteration)
            self._proposed = None
        return agreed.stop or (self.rehearsed is not None and self.rehearsed.after_step(iteration))

    def finish(self) -> None:
        """Wait for the last vote."""
        self._votes.finish()
