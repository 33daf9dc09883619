"""Decisions of all ranks at a step boundary: to leave, another interval."""

from cpsr.job import Job
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.planner.plan import Plan
from cpsr.ranks.group import Ballot
from cpsr.saving.saver import Saver

__all__ = ["Agreement"]


class Agreement:
    """Exchanges proposals in a vote without waiting; a proposal takes effect one call later.

    Args:
        job: this rank's.
        planner: proposes intervals on rank 0.
        saver: adopts an agreed interval.
    """

    def __init__(self, job: Job, planner: JobPlanner, saver: Saver) -> None:
        self._job = job
        self._planner = planner
        self._saver = saver
        self._votes = job.group.votes()
        self._proposed: Plan | None = None  # not agreed upon yet

    def exchange(self, iteration: int, *, stop: bool) -> bool:
        """Propose now, and carry out the agreement from the previous call.

        Args:
            iteration: the one that has just ended.
            stop: whether this rank was asked to leave.

        Returns:
            Whether all ranks leave after this iteration.
        """
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
            plan = self._agreed_plan(agreed.interval_iterations, agreed.memory_interval_iterations or None)
            self._saver.adopt(plan, iteration)
            self._proposed = None
        return agreed.stop

    def finish(self) -> None:
        """Wait for the last vote."""
        self._votes.finish()

    def _agreed_plan(self, interval_iterations: int, memory_interval_iterations: int | None) -> Plan:
        """Rank 0's proposal, as far as this rank needs it."""
        return self._proposed or Plan(
            interval_iterations,
            self._job.config.planner.policy,
            {"rule": "planned by rank 0, whose journal explains it"},
            memory_interval_iterations=memory_interval_iterations,
        )
