"""What follows from wrong arithmetic: the run goes back to its newest verified state, or a machine leaves it."""

import logging
import platform
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cpsr.errors import RecoveryError, WrongArithmeticError
from cpsr.job import Job, Rewind
from cpsr.ranks.slow_ranks import device_name
from cpsr.verification.evidence import Verdict

if TYPE_CHECKING:
    from cpsr.life.life import Life

__all__ = ["go_back"]

WRONG_MAX = 2  # times in a run; then the device is excluded

_EXECUTIONS = {
    "first": "Two repetitions came to the same bits, and the step itself to others",
    "repeated": "The step and its second repetition came to the same bits, and the first repetition to others",
    "memory": "Weights or moments changed between two updates",
    "each": "The same inputs come to other bits there than on other ranks, or than before",
}


def go_back(life: "Life", verdict: Verdict, iteration: int) -> bool:
    """Report wrong arithmetic, and go back to the newest verified checkpoint; a collective.

    Args:
        life: at the end of a step that was repeated.
        verdict: `wrong`.
        iteration: of the step.

    Returns:
        Whether there is such a checkpoint. Without one the run goes on from the step as it is now.

    Raises:
        WrongArithmeticError: a device was wrong twice in this run, and this rank leaves.
        RecoveryError: the loop cannot return to earlier batches; a restart can.
    """
    job, group, saver = life.job, life.job.group, life.saver
    wrong = _Wrong.found(verdict, job, iteration)
    # A job of one rank has none to compare with: its loop executes the step again before that is called wrong.
    unsure = group.size == 1 and verdict.execution in ("first", "memory")
    times = 0 if unsure else life.verification.count_wrong(wrong.place)
    saver.discard()
    drained = group.all(saver.drain(job.config.checkpoint.save_timeout_seconds))
    target = life.verification.newest_verified() if drained else None
    can_rewind = group.all(life.loop.state.can_rewind)
    if unsure and not can_rewind:  # and so nobody can tell
        target = None
    elif unsure:
        life.verification.suspect(wrong.what, wrong.place)
    kind = "arithmetic is suspected" if unsure else "wrong arithmetic"
    level = logging.DEBUG if group.rank != 0 else logging.WARNING if unsure else logging.ERROR
    job.journal.event(kind, wrong.message(times, target, can_rewind), iteration, level)
    returns = target is not None and can_rewind
    if target is not None:
        to = Rewind(target, target, "arithmetic was wrong")
        if returns:
            life.boundary.emergency_dump.begin_update()
            with life.loop.learning.learner.locked():
                life.rewind(to, partial(life.restorer.go_back, target, "arithmetic was wrong"))
        else:
            life.boundary.no_dump = "the arithmetic of its steps was wrong"
            saver.set_aside(to)
    alone = wrong.others_go_on(job)
    if times >= WRONG_MAX and (not alone or group.nodes[group.rank] == wrong.node):
        raise WrongArithmeticError(wrong.excluded(times, target), alone=alone)
    if target is not None and not returns:
        raise RecoveryError(
            f"{wrong.what}. A rank's data iterator is one-shot and cannot return to earlier batches: start the job "
            f"again, which goes on from the verified checkpoint {target}. Give resume() the DataLoader itself to have "
            "this done for you"
        )
    return returns


@dataclass(frozen=True)
class _Wrong:
    """Wrong arithmetic of one rank, for people.

    Attributes:
        place: `host/device`.
        node: of the rank, as in `Group.nodes`.
        where: in which step, on which rank, and how that showed.
    """

    place: str
    node: str
    where: str

    @property
    def what(self) -> str:
        """A sentence without its end."""
        return f"Arithmetic was wrong {self.where}"

    @classmethod
    def found(cls, verdict: Verdict, job: Job, iteration: int) -> "_Wrong":
        """Describe it, alike on every rank; a collective."""
        device, (rank,) = job.adapter.device, verdict.ranks
        named = device_name(str(device))
        own = named if device.type == "cuda" else f"{named} of rank {job.group.rank}"
        place = job.group.gather(f"{platform.node()}/{own}")[rank]
        where = f"in step {iteration} on rank {rank} ({place}). {_EXECUTIONS[verdict.execution]} ({verdict.where})"
        return cls(place, job.group.nodes[rank], where)

    def message(self, times: int, verified_iteration: int | None, can_rewind: bool) -> str:
        """For the journal; `times` is 0 where that is to be confirmed."""
        if verified_iteration is None and not (times or can_rewind):
            then = "The data iterator is one-shot, so that the step cannot be executed again: training goes on"
        elif verified_iteration is None:
            then = "No checkpoint of this run is verified yet: training goes on from this step"
        else:
            then = f"The run goes back to iteration {verified_iteration}, its newest verified checkpoint"
        if not times:
            return f"Arithmetic may have been wrong {self.where}. {then}"
        again = f" It has been wrong {times} times in this run." if times > 1 else ""
        return f"{self.what}. {then}.{again} Test this device"

    def others_go_on(self, job: Job) -> bool:
        """Whether the ranks of other machines may go on alone."""
        others = sum(node != self.node for node in job.group.nodes)
        return others > 0 and job.config.elastic.allows(others)

    def excluded(self, times: int, verified_iteration: int | None) -> str:
        """For the error that ends this rank."""
        at = "" if verified_iteration is None else f", which goes on from its verified checkpoint {verified_iteration}"
        return (
            f"{self.what}. {self.place} has been wrong {times} times in this run, and its machine trains no further: "
            f"start the job without it{at}"
        )
