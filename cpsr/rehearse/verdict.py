"""What a rehearsal has shown, in sentences: whether the script comes back, what differs first, and what to change."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cpsr.life.batch_warnings import NO_BATCHES
from cpsr.life.witnessing import likely_causes
from cpsr.rehearse.comparison import Compared, Reference, StepDifference
from cpsr.rehearse.cuts import PlannedCut
from cpsr.rehearse.jobs import Ran

__all__ = ["STATUS", "Tried", "Verdict", "failed", "judge"]

NAMES_MAX = 8
STATUS = {"comes back": 0, "does not come back": 1, "does not reproduce itself": 1, "could not be rehearsed": 2}
NOT_REPRODUCED = (
    "the script sets no seed: torch.manual_seed(0), also for numpy and random where they are used",
    "it draws from the time, from a file that changes, or from a thread",
    "the first run has left files, such as a checkpoint of its own, from which the second one has started",
    "its operations are not deterministic: torch.use_deterministic_algorithms(True)",
)
ADVICE = {
    "batch position": "Iterate over recovery.resume(loader), and begin passes at recovery.epoch",
    "learning rate": "Compute it from recovery.iteration, or give the schedule to the adapter or to recovery.register",
}
OTHER_ADVICE = "Give each object that changes to recovery.register(name, object), and draw batches by recovery.resume"


@dataclass(frozen=True)
class Tried:
    """A cut, and what came of it.

    Attributes:
        cut: as planned.
        compared: with the undisturbed run; None: the job failed.
        failure: why it failed, empty where it did not.
    """

    cut: PlannedCut
    compared: Compared | None
    failure: str = ""

    @property
    def well(self) -> bool:
        """Whether the job came back."""
        return self.compared is not None and self.compared.equal

    @property
    def result(self) -> str:
        """In a few words."""
        if self.compared is None:
            return self.failure
        return "equal" if self.well else _what_differs(self.compared)


@dataclass(frozen=True)
class Verdict:
    """The result of a rehearsal.

    Attributes:
        result: one of `STATUS`.
        sentence: it, with what differs first and where.
        causes: likely ones, in order.
        advice: what to change; empty where nothing is to be.
        unprotected: what a restart does not bring back, or cannot check.
    """

    result: Literal["comes back", "does not come back", "does not reproduce itself", "could not be rehearsed"]
    sentence: str
    causes: Sequence[str] = ()
    advice: str = ""
    unprotected: Sequence[str] = ()

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return STATUS[self.result]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "status": self.status}


def judge(reference: Reference, tried: Sequence[Tried]) -> Verdict:
    """The verdict on a script that two undisturbed runs and three cut ones have shown.

    Args:
        reference: the undisturbed run.
        tried: the cuts; none where the script does not reproduce itself.
    """
    unprotected = _unprotected(reference.ran, tried)
    if not reference.reproduces:
        assert reference.varies is not None
        sentence = (
            f"Your script does not reproduce itself: two undisturbed runs differ {_where(reference.varies)}. Whether "
            "it comes back after a failure cannot be told"
        )
        return Verdict("does not reproduce itself", sentence, NOT_REPRODUCED, unprotected=unprotected)
    bad = next((one for one in tried if not one.well), None)
    if bad is None:
        return Verdict("comes back", _comes_back(reference, tried), unprotected=unprotected)
    if bad.compared is None:
        sentence = f"Your script does not come back: after {bad.cut.name}, {bad.failure}"
        return Verdict("does not come back", sentence, unprotected=unprotected)
    sentence = (
        f"Your script does not come back: after {bad.cut.name}, {_went_on(bad.compared)} {_differs(bad.compared)}"
    )
    first = bad.compared.first
    if first is None:
        return Verdict("does not come back", sentence, unprotected=unprotected)
    causes = likely_causes(first.found)
    if bad.compared.variables:
        causes.insert(0, f"variables that the restart did not bring back: {_listed(bad.compared.variables)}")
    return Verdict("does not come back", sentence, causes, ADVICE.get(first.found.what, OTHER_ADVICE), unprotected)


def failed(ran: Ran) -> Verdict:
    """The verdict on a script whose undisturbed run failed."""
    if ran.status is None:
        sentence = f"The script hung, and was ended after {ran.seconds:.0f} s"
    elif ran.status == 0 and not ran.ranks:
        sentence = "The script opened no run: it has no CPSRRecovery, or leaves before"
    elif ran.status == 0:
        sentence = f"The script ends after {ran.iteration} steps, which are too few to be cut short"
    else:
        said = ran.refusals()
        sentence = f"The script failed (exit status {ran.status})" + (f": {said[-1]}" if said else "")
    return Verdict("could not be rehearsed", sentence)


def _comes_back(reference: Reference, tried: Sequence[Tried]) -> str:
    steps = sum(one.compared.steps for one in tried if one.compared is not None)
    counted = f"{len(tried)} restarts, {steps} steps compared, and the final states"
    if reference.varies is None:
        return f"Your script comes back bit for bit: {counted} are equal"
    varies = reference.varies.found
    return (
        f"Your script comes back, but for rounding: its arithmetic is not deterministic ({varies.amount:.1g} at step "
        f"{varies.iteration} between two undisturbed runs). {counted[0].upper()}{counted[1:]} differ by no more"
    )


def _went_on(compared: Compared) -> str:
    after = compared.ran.restarted_after
    return "" if after is None else f"it went on from step {after}, and"


def _differs(compared: Compared) -> str:
    if compared.first is None:
        return f"the final state differs: {_listed(compared.final)}"
    return f"differs first {_where(compared.first)}"


def _what_differs(compared: Compared) -> str:
    if compared.first is not None:
        return f"{compared.first.found.differs} at step {compared.first.found.iteration}"
    return f"differs at the end: {_listed(compared.final, 2)}"


def _where(one: StepDifference) -> str:
    found = one.found
    values = f": {found.again} instead of {found.first}"
    if found.what == "weights":
        values = f", by {found.amount:.1g}" if math.isfinite(found.amount) else ", and some are not finite"
    return f"at step {found.iteration} on rank {one.rank}, in the {found.what}{values}"


def _unprotected(ran: Ran, tried: Sequence[Tried]) -> list[str]:
    """What a restart does not bring back, or what CPSR cannot see."""
    found = []
    steps = [one for rank in range(ran.ranks) for one in ran.witnesses(rank).values()]
    if steps and not any(one.batches for one in steps):
        said = NO_BATCHES.format(f"{ran.iteration} steps")
        found.append(f"{said[0].upper()}{said[1:]}")
    if steps and all(one.loss is None for one in steps):
        found.append(
            "The loss is unknown, so steps are compared by weights alone: call recovery.log_loss(loss) in each step"
        )
    if _same_losses(ran):
        found.append(
            "Several ranks had the same loss in each step. Unless the model is split over them, they train on the same "
            "batches: give the DataLoader sampler=DistributedSampler(dataset), without shuffle=True"
        )
    variables = list(dict.fromkeys(name for one in tried if one.compared for name in one.compared.variables))
    if variables:
        found.append(
            f"Variables that a restart did not bring back: {_listed(variables)}. Where they matter, give objects to "
            "recovery.register(name, object), and compute counters from recovery.iteration"
        )
    return found


def _same_losses(ran: Ran) -> bool:
    """Whether two ranks had equal losses, which changed from step to step."""
    losses = [tuple(one.loss for one in ran.witnesses(rank).values()) for rank in range(ran.ranks)]
    known = [each for each in losses if None not in each and len(set(each)) > 1]
    return len(set(known)) < len(known)


def _listed(names: Sequence[str], limit: int = NAMES_MAX) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
