"""Two jobs of one script side by side: each step, the final state, and what the loop keeps in variables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.loading import SCALARS, decoded_scalars
from cpsr.checkpoint.verify import open_tensors, read_manifest, read_rank_manifest
from cpsr.errors import CPSRError
from cpsr.rehearse.jobs import Ran
from cpsr.state.codec import same, same_bits
from cpsr.state.scalars import DataPosition
from cpsr.state.witness import Difference, Witness, difference

__all__ = ["Compared", "FinalState", "Reference", "StepDifference", "compare", "undisturbed"]

# Parts of the small state that two runs have alike, if nothing was lost.
ALIKE = ("iteration", "learning_rate", "cumulative_learning_rate", "engine", "rng", "registered")
POSITION = ("batches", "epoch", "batch")
SLACK_MAX = 16.0  # growth of a rounding error within the few dozen steps of a rehearsal


class FinalState:
    """The newest checkpoint of a run, in parts with a name.

    Args:
        run_dir: of the run.

    Attributes:
        iteration: of the checkpoint; 0 without one.
    """

    def __init__(self, run_dir: Path) -> None:
        found = scan(run_dir / "checkpoints").checkpoints
        self.iteration = found[-1].iteration if found else 0
        self._directory = found[-1].directory if found else None

    @cached_property
    def small(self) -> dict[str, Any]:
        """Name -> value, of everything beside tensors of the model and the optimizer."""
        if self._directory is None:
            return {}
        manifest, found = read_manifest(self._directory), {}
        for rank in range(manifest.world_size):
            record = read_rank_manifest(self._directory, manifest, rank)
            names = [name for name in record.files if name.split(".")[-2] == "extra"]
            tensors = {
                key: one for name in names for key, one in self._tensors(name).items() if key.startswith(SCALARS)
            }
            scalars = decoded_scalars(self._directory, record.scalars, tensors)
            for part in ALIKE:
                value = scalars.get(part)
                inside = value if isinstance(value, Mapping) and part in ("rng", "registered") else {"": value}
                for name, one in inside.items():
                    found[f"rank {rank}: {_words(part, name)}"] = one
            data = DataPosition(**scalars["data"])
            found[f"rank {rank}: position in the data"] = [getattr(data, name) for name in POSITION]
        return found

    def differences(self, other: "FinalState") -> list[str]:
        """Names of parts that differ."""
        if self.iteration != other.iteration:
            return [f"the last checkpoint, of step {other.iteration} and not {self.iteration}"]
        try:
            return self._differing_tensors(other) + [
                name
                for name, value in self.small.items()
                if name not in other.small or not same(value, other.small[name])
            ]
        except CPSRError as error:
            return [f"a checkpoint cannot be read: {error.one_line()}"]

    def _differing_tensors(self, other: "FinalState") -> list[str]:
        found = []
        for name in self._files():
            own, its = self._tensors(name), other._tensors(name)
            for key in own:
                if key.startswith(SCALARS):
                    continue
                if key not in its or not same_bits(own[key], its[key]):
                    found.append(key.partition("/")[2])
        return sorted(set(found))

    def _files(self) -> list[str]:
        if self._directory is None:
            return []
        manifest = read_manifest(self._directory)
        return [name for rank in sorted(manifest.ranks) for name in manifest.ranks[rank].files]

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        if self._directory is None or not (self._directory / name).exists():
            return {}
        with open_tensors(self._directory / name) as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


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
    varies: "StepDifference | None" = None
    spread: float = 0.0
    unsteady: frozenset[str] = frozenset()

    @property
    def reproduces(self) -> bool:
        """Whether the two are equal, at least but for rounding."""
        return self.varies is None or self.varies.found.rounding


@dataclass(frozen=True)
class StepDifference:
    """The first step that differs.

    Attributes:
        rank: on which.
        found: what differs; `first` is of the undisturbed run.
    """

    rank: int
    found: Difference


@dataclass(frozen=True)
class Compared:
    """A job beside the undisturbed one.

    Attributes:
        ran: the job.
        steps: how many were compared, over all ranks.
        first: the first step that differs; None: none does.
        final: parts of the final state that differ.
        variables: names of variables that the restart did not bring back, those of objects first.
    """

    ran: Ran
    steps: int
    first: StepDifference | None
    final: Sequence[str]
    variables: Sequence[str]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.first is None and not self.final


def compare(reference: Reference, again: Ran, second: Ran | None = None) -> Compared:
    """Compare a job with the undisturbed one.

    Args:
        reference: the undisturbed run.
        again: the job.
        second: another undisturbed run; variables that differ between the two are not reported.
    """
    first, steps = _first_difference(reference, again)
    ignored = reference.unsteady
    final = FinalState(reference.ran.run_dir).differences(FinalState(again.run_dir))
    if reference.varies is not None and first is None:
        final = []  # the weights differ by rounding
    variables = [] if second is None else _lost_variables(reference.ran, second, again)
    return Compared(again, steps, first, [name for name in final if name not in ignored], variables)


def _first_difference(reference: Reference, again: Ran) -> tuple[StepDifference | None, int]:
    earliest: StepDifference | None = None
    steps = 0
    for rank in range(reference.ran.ranks):
        own, its = reference.ran.witnesses(rank), again.witnesses(rank)
        steps += len(own.keys() & its.keys())
        found = _of_rank(own, its, reference)
        if found is not None and (earliest is None or found.iteration < earliest.found.iteration):
            earliest = StepDifference(rank, found)
    return earliest, steps


def _of_rank(own: Mapping[int, Witness], its: Mapping[int, Witness], reference: Reference) -> Difference | None:
    rounded = None if reference.varies is None else reference.varies.found.iteration
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
    if found is not None and found.found.rounding:  # later steps may differ by more than that explains
        later, _ = _first_difference(reference, second)
        reference = Reference(ran, later or found)
    unsteady = frozenset(FinalState(ran.run_dir).differences(FinalState(second.run_dir)))
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
