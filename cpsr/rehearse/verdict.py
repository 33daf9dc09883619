"""What a rehearsal has shown: two jobs of one script side by side, and in sentences whether the script comes back."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from cpsr.checkpoint.assemble import Wanted, assemble
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import writer_of
from cpsr.checkpoint.saved import FileSlab, SavedCheckpoint
from cpsr.errors import CPSRError
from cpsr.life.drawn_batches import NO_BATCHES
from cpsr.life.witnessing import likely_causes
from cpsr.rehearse.jobs import PlannedCut, Ran
from cpsr.state.codec import same
from cpsr.state.small_state import DataPosition
from cpsr.state.witness import Difference, Witness, difference

__all__ = ["STATUS", "Reference", "Tried", "Verdict", "compare", "failed", "judge", "undisturbed"]

# Parts of the small state that two runs have alike, if nothing was lost.
ALIKE = ("iteration", "learning_rate", "cumulative_learning_rate", "engine", "rng", "registered")
POSITION = ("batches", "epoch", "batch")
LAST_CHECKPOINT = "the last checkpoint"  # of two runs that end at different steps
SLACK_MAX = 16.0  # growth of a rounding error within the few dozen steps of a rehearsal


def _final_differences(run_dir: Path, other: Path) -> list[str]:
    """Names of the parts of two runs' newest checkpoints that differ: of tensors, and of the small state."""
    own, its = (_newest_checkpoint(one) for one in (run_dir, other))
    if own is None or its is None or own.iteration != its.iteration:
        steps = [0 if one is None else one.iteration for one in (own, its)]
        return [f"{LAST_CHECKPOINT}, of step {steps[1]} and not {steps[0]}"] if steps[0] != steps[1] else []
    found = list[str]()
    try:
        for mine, theirs in zip_longest(_parts(own), _parts(its)):
            if mine is None or theirs is None or mine[0] != theirs[0] or not same(mine[1], theirs[1]):
                found.append((mine or theirs or ("",))[0])
    except CPSRError as error:
        return [f"a checkpoint cannot be read: {error.one_line()}"]
    return list(dict.fromkeys(found))


def _newest_checkpoint(run_dir: Path) -> SavedCheckpoint | None:
    found = scan(run_dir / "checkpoints").checkpoints
    return found[-1] if found else None


def _parts(saved: SavedCheckpoint) -> Iterator[tuple[str, Any]]:
    """Name and value of each tensor of a checkpoint, and of each part of its ranks' small states."""
    for rank in range(saved.manifest.world_size):
        for slab in saved.slabs([rank]):
            if not isinstance(slab, FileSlab) or writer_of(slab.file.path.name) != rank:
                continue  # the small state has it; or it is another rank's to show
            for key, piece in slab.pieces.items():
                values = torch.empty(piece.numel, dtype=piece.dtype)
                assemble([slab], {key: Wanted(piece, values)}, saved.directory)
                yield key.partition("/")[2], values
        scalars = saved.small_state(rank)
        for part in ALIKE:
            value = scalars.get(part)
            inside = value if isinstance(value, Mapping) and part in ("rng", "registered") else {"": value}
            for name, one in inside.items():
                yield f"rank {rank}: {_words(part, name)}", one
        data = DataPosition(**scalars["data"])
        yield f"rank {rank}: position in the data", [getattr(data, name) for name in POSITION]


RankDifference = tuple[int, Difference]  # the rank, and the first of its steps that differs


@dataclass(frozen=True)
class Reference:
    """The undisturbed run, with what a second one has shown of how far it reproduces itself.

    Attributes:
        ran: the run.
        varies: what the second run had otherwise, first; None: they are equal.
        spread: largest relative difference of the losses between the two.
        unsteady: parts of the final state that differ between the two.
    """

    ran: Ran
    varies: RankDifference | None = None
    spread: float = 0.0
    unsteady: frozenset[str] = frozenset()

    @property
    def reproduces(self) -> bool:
        """Whether the two are equal, at least but for rounding."""
        return self.varies is None or self.varies[1].rounding


@dataclass(frozen=True)
class Tried:
    """A cut, and what came of it.

    Attributes:
        cut: as planned.
        failure: why the job failed, empty where it did not; nothing else is known then.
        restarted_after: the step that it went on from.
        steps: how many were compared with the undisturbed run, over all ranks.
        first: the first step that differs; None: none does.
        final: parts of the final state that differ.
        variables: names of variables that the restart did not bring back, those of objects first.
    """

    cut: PlannedCut
    failure: str = ""
    restarted_after: int | None = None
    steps: int = 0
    first: RankDifference | None = None
    final: Sequence[str] = ()
    variables: Sequence[str] = ()

    @property
    def well(self) -> bool:
        """Whether the job came back."""
        return not self.failure and self.first is None and not self.final

    @property
    def result(self) -> str:
        """In a few words."""
        if self.failure or self.well:
            return self.failure or "equal"
        if self.first is not None:
            return f"{self.first[1].differs} at step {self.first[1].iteration}"
        return f"differs at the end: {_listed(self.final, 2)}"


def compare(cut: PlannedCut, reference: Reference, again: Ran, second: Ran) -> Tried:
    """Compare a job that was cut with the undisturbed one.

    Args:
        cut: as planned.
        reference: the undisturbed run.
        again: the job.
        second: another undisturbed run; variables that differ between the two are not reported.
    """
    first, steps = _first_difference(reference, again)
    final = _final_differences(reference.ran.run_dir, again.run_dir)
    if reference.varies is not None and first is None:
        final = [one for one in final if one.startswith(LAST_CHECKPOINT)]  # the weights differ by rounding
    variables = _lost_variables(reference.ran, second, again)
    unsteady = reference.unsteady
    kept = [name for name in final if name not in unsteady]
    return Tried(cut, "", again.restarted_after, steps, first, kept, variables)


def _first_difference(reference: Reference, again: Ran) -> tuple[RankDifference | None, int]:
    """The earliest step that differs, and how many were compared."""
    found: list[RankDifference] = []
    steps = 0
    for rank in range(reference.ran.ranks):
        own, its = reference.ran.witnesses(rank), again.witnesses(rank)
        steps += len(own.keys() & its.keys())
        if (one := _of_rank(own, its, reference)) is not None:
            found.append((rank, one))
    return min(found, key=lambda one: one[1].iteration, default=None), steps


def _of_rank(own: Mapping[int, Witness], its: Mapping[int, Witness], reference: Reference) -> Difference | None:
    rounded = None if reference.varies is None else reference.varies[1].iteration
    for step in sorted(own):
        if step not in its:
            return None  # the runs end at different steps: their final states tell
        slack = 1.0 if rounded is None else min(2.0 ** abs(step - rounded), SLACK_MAX)
        found = difference(own[step], its[step], own.get(step - 1), slack)
        if found is None:
            continue
        expected = rounded is not None and found.what in ("loss", "weights")
        if expected and (found.rounding or found.amount <= 10 * reference.spread):
            continue
        return found
    return None


def undisturbed(ran: Ran, second: Ran) -> Reference:
    """What two undisturbed runs have shown."""
    found, _ = _first_difference(Reference(ran), second)
    reference = Reference(ran, found)
    if found is not None and found[1].rounding:  # later steps may differ by more than that explains
        later, _ = _first_difference(reference, second)
        reference = Reference(ran, later or found)
    unsteady = frozenset(_final_differences(ran.run_dir, second.run_dir))
    return replace(reference, spread=_spread(ran, second), unsteady=unsteady)


def _spread(ran: Ran, second: Ran) -> float:
    largest = 0.0
    for rank in range(ran.ranks):
        its = second.witnesses(rank)
        for step, one in ran.witnesses(rank).items():
            loss, other = one.loss, its[step].loss if step in its else None
            if loss is not None and other is not None and loss != other:
                largest = max(largest, abs(loss - other) / max(abs(loss), abs(other)))
    return largest


def _lost_variables(ran: Ran, second: Ran, again: Ran) -> list[str]:
    """Variables that are alike in two undisturbed runs, and other after the first step of the restarted one."""
    step = again.restarted_after
    if step is None:
        return []
    found: list[str] = []
    for rank in range(ran.ranks):
        own, other, its = (one.variables(rank).get(step + 1, {}) for one in (ran, second, again))
        for name, value in own.items():
            if other.get(name) == value != its.get(name) and name not in found:
                found.append(name)
    return found


def _words(part: str, name: str) -> str:
    if part == "registered":
        return f"registered object '{name}'"
    if part == "rng":
        return f"random states ({name})"
    return part.replace("_", " ")


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
    sentence = f"Your script does not come back: after {bad.cut.name}, "
    if bad.failure:
        return Verdict("does not come back", sentence + bad.failure, unprotected=unprotected)
    if bad.restarted_after is not None:
        sentence += f"it went on from step {bad.restarted_after}, and "
    if bad.first is None:
        sentence += f"the final state differs: {_listed(bad.final)}"
        return Verdict("does not come back", sentence, unprotected=unprotected)
    found = bad.first[1]
    causes = likely_causes(found)
    if bad.variables:
        causes.insert(0, f"variables that the restart did not bring back: {_listed(bad.variables)}")
    sentence += f"differs first {_where(bad.first)}"
    return Verdict("does not come back", sentence, causes, ADVICE.get(found.what, OTHER_ADVICE), unprotected)


def failed(ran: Ran) -> Verdict:
    """The verdict on a script whose undisturbed run failed."""
    if ran.status == 0 and not ran.ranks:
        sentence = "The script opened no run: it has no CPSRRecovery, or leaves before"
    elif ran.status == 0:
        sentence = f"The script ends after {ran.iteration} steps, which are too few to be cut short"
    else:
        sentence = f"The script {ran.failure}"
    return Verdict("could not be rehearsed", sentence)


def _comes_back(reference: Reference, tried: Sequence[Tried]) -> str:
    steps = sum(one.steps for one in tried)
    counted = f"{len(tried)} restarts, {steps} steps compared, and the final states"
    if reference.varies is None:
        return f"Your script comes back bit for bit: {counted} are equal"
    varies = reference.varies[1]
    return (
        f"Your script comes back, but for rounding: its arithmetic is not deterministic ({varies.amount:.1g} at step "
        f"{varies.iteration} between two undisturbed runs). {counted[0].upper()}{counted[1:]} differ by no more"
    )


def _where(one: RankDifference) -> str:
    rank, found = one
    values = f": {found.again} instead of {found.first}"
    if found.what == "weights":
        values = f", by {found.amount:.1g}" if math.isfinite(found.amount) else ", and some are not finite"
    return f"at step {found.iteration} on rank {rank}, in the {found.what}{values}"


def _unprotected(ran: Ran, tried: Sequence[Tried]) -> list[str]:
    """What a restart does not bring back, or what CPSR cannot see."""
    found = []
    steps = [one for rank in range(ran.ranks) for one in ran.witnesses(rank).values()]
    if steps and not any(one.batches for one in steps):
        said = NO_BATCHES.format(ran.iteration)
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
    variables = list(dict.fromkeys(name for one in tried for name in one.variables))
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
