"""The executions of one step beside that of the loop, and what all ranks find in them."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import load, save

from cpsr.checkpoint.snapshot import Snapshot
from cpsr.engines.recorded_step import Evidence, RecordedStep
from cpsr.engines.step_inputs import Inputs
from cpsr.errors import UnsupportedEngineError
from cpsr.job import Job
from cpsr.ranks.exits import lost_another
from cpsr.state.codec import decode, encode
from cpsr.verification.evidence import (
    Differences,
    Fingerprints,
    Verdict,
    differences,
    judge,
    judge_memory,
    judge_neighbors,
)
from cpsr.verification.operations import first_difference

__all__ = ["Repetition"]

FAILED_SECONDS = 60.0  # for the other ranks, where the module has failed on this one
NEIGHBOR_BYTES_MAX = 64 << 20  # of one rank's inputs; no neighbor repeats a step that has more


class MemoryRoom:
    """Whether a step can be repeated in a device's memory, beside what the loop still holds of it.

    Args:
        device: a GPU; of the host's memory nothing is said.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def lack(self) -> str | None:
        """Why it cannot, one clause for people; None where it can."""
        if self._device.type != "cuda":
            return None
        needed = torch.cuda.max_memory_allocated(self._device) - self._before_bytes
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free = torch.cuda.mem_get_info(self._device)[0] + unused
        if free >= needed:
            return None
        taken, left = f"{needed / 1e6:.0f} MB", f"{free / 1e6:.0f} MB"
        return f"a step may take {taken} of the GPU beside what the loop still holds, and {left} are free"


class FailedForwardError(Exception):
    """The module has failed in a repeated forward, on all ranks: no engine is amid a backward, and all can go on."""


class _NotRestoredError(Exception):
    """A snapshot did not bring back the state that it was taken of.

    Args:
        names: of the first tensor that differs, by rank; None: none does.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = names


class Repetition:
    """Records one step of the loop, and repeats it from the snapshot of the checkpoint before.

    Args:
        iteration: of the checkpoint.
        inject: puts a snapshot into the engine, as a restart does.
        objects: that the user has registered.
        compares: whether ranks also execute each other's steps: all train the same model, on different batches.

    Attributes:
        step: the recorded step.
        snapshot: of the checkpoint, once its copy is complete; None until then, and where it has failed.
        changed: weights and moments that changed on this rank between the checkpoint and the update.
        unshared: why ranks cannot repeat each other's steps; None where they can.
        agreed: whether all ranks came to equal results from each other's inputs.
    """

    def __init__(
        self,
        job: Job,
        iteration: int,
        inject: Callable[[Snapshot], None],
        objects: Sequence[Any],
        *,
        compares: bool,
    ) -> None:
        self._job, self._group, self._inject, self._compares = job, job.group, inject, compares
        self._iteration = iteration
        self._fingerprint = Fingerprints(job.adapter.device)
        self.step = RecordedStep(job.adapter, self._fingerprint, objects)
        self.snapshot: Snapshot | None = None
        self.changed: list[str] = []
        self.unshared: str | None = None
        self.agreed = False
        self._before: dict[str, Any] = {}
        self._room = MemoryRoom(job.adapter.device)

    def begin(self) -> None:
        """The snapshot is being copied, and the loop begins the step."""
        self.step.begin()
        self._before = self._memory()

    def end(self) -> None:
        """The step is complete."""
        self.step.end()
        self.step.obstacle = self.step.obstacle or self._room.lack()

    def before_update(self, snapshot: Snapshot | None) -> None:
        """The update of the loop begins, and the copy of the snapshot is complete, or has failed."""
        self.snapshot = None if snapshot is None or snapshot.iteration != self._iteration else snapshot
        self._before = Fingerprints.settled(self._before)
        self.changed = self._changed()
        self.step.before_update()

    def _changed(self) -> list[str]:
        """What is not as it was when the checkpoint began."""
        now = Fingerprints.settled(self._memory())
        return [name for name, found in self._before.items() if found != now.get(name)]

    def _memory(self) -> dict[str, Any]:
        return {name: self._fingerprint(values) for name, values in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What only an update may change: masters, moments, and the weights of forward and backward."""
        operators = self._job.adapter.shard().operators
        found = {
            f"{name} ({key})": values
            for name, one in operators.items()
            for key, values in {"weights": one.parameter.values, **one.moments}.items()
        }
        seen = {values.data_ptr() for values in found.values()}
        for name, values in self._job.adapter.forward_weights().items():
            if values.data_ptr() not in seen:
                found[f"{name} (weights of the forward)"] = values
        return found

    # After the step

    def verdict(
        self, snapshot: Snapshot, changed: Sequence[Sequence[str]], *, repeatable: bool, agreed: bool
    ) -> tuple[Verdict, bool]:
        """Repeat the step, and more often where that comes to something else; a collective.

        Args:
            snapshot: of the checkpoint.
            changed: what changed between the checkpoint and the update, by rank.
            repeatable: whether a step of this life was repeated with equal results before.
            agreed: whether ranks have repeated each other's steps with equal results before.

        Returns:
            What was found, and whether the engine has the right state after the step; else it may have any.
        """
        try:
            return self._found(snapshot, changed, repeatable, agreed)
        except _NotRestoredError as error:
            ranks = tuple(rank for rank, name in enumerate(error.names) if name)
            return Verdict(
                "unrepeatable", ranks, f"{error.names[ranks[0]]}, which a snapshot did not bring back"
            ), False

    def _found(
        self, snapshot: Snapshot, changed: Sequence[Sequence[str]], repeatable: bool, agreed: bool
    ) -> tuple[Verdict, bool]:
        if self._has_other_tensors():
            return Verdict("unrepeatable", (), "the optimizer made state in this step"), False
        if any(changed):
            verdict = judge_memory(changed, repeatable=repeatable)
            # The snapshot may have the change as well.
            mends = verdict.kind == "wrong" and self._group.all(self._differing_after(snapshot) is None)
            if mends:
                self._repeated()
            return verdict, mends
        runs: list[Evidence] = [self.step.first]

        def execute() -> list[Differences]:
            self._restore(snapshot)
            runs.append(self._repeated())
            return self._group.gather(differences(runs[-2], runs[-1]))

        def third() -> tuple[list[Differences], list[Differences]]:
            second_third = execute()
            return self._group.gather(differences(runs[0], runs[2])), second_third

        neighbors = self._neighbors(snapshot) if self._compares else None
        found = [] if neighbors is None else neighbors(1)
        verdict = judge(execute(), third, repeatable=repeatable)
        if verdict.kind == "verified" and neighbors is not None and any(found):
            return judge_neighbors(found, partial(neighbors, 2), agreed=agreed), False
        self.agreed = neighbors is not None and not any(found)
        if verdict.kind == "nondeterministic":
            verdict = verdict.naming(self._differing_operation(snapshot))
        mended = verdict.kind == "wrong" and verdict.execution in ("first", "repeated")
        return verdict, mended or verdict.kind == "verified"

    def _repeated(self, inputs: Inputs | None = None, *, updates: bool = True) -> Evidence:
        """The step executed once more; a collective.

        Raises:
            FailedForwardError: on all ranks.
            Exception: whatever the module raised, where other ranks may be amid a backward.
        """
        evidence, failure = None, None
        try:
            evidence = self.step.repeat(inputs, updates=updates)
        except Exception as error:
            if lost_another(str(error)):
                raise
            failure = error
        states = [int(failure is not None), int(failure is None or not self.step.in_forward)]
        try:
            failed, goes_on = self._group.reduce(
                torch.tensor(states, device="cpu"), "max", None if failure is None else FAILED_SECONDS
            ).tolist()
        except RuntimeError:
            raise failure or RuntimeError("another rank failed while a step was repeated") from None
        if failed and not goes_on:
            raise FailedForwardError(f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        assert evidence is not None
        return evidence

    def _has_other_tensors(self) -> bool:
        """Whether some rank has more or fewer tensors than at the checkpoint; a collective."""
        return not self._group.all(self._tensors().keys() == self._before.keys())

    def _restore(self, snapshot: Snapshot) -> None:
        """Go back to before the step.

        Raises:
            _NotRestoredError: the restored state differs from the one that was saved; on every rank.
        """
        names = self._group.gather(self._differing_after(snapshot))
        if any(names):
            raise _NotRestoredError(names)

    def _differing_after(self, snapshot: Snapshot) -> str | None:
        """Put the snapshot into the engine; the first tensor that is then not as it was at its begin, or None."""
        self._inject(snapshot)
        return next(iter(self._changed()), None)

    def _differing_operation(self, snapshot: Snapshot) -> str:
        restore = partial(self._restore, snapshot)
        found = self._group.gather_present(first_difference(restore, self._repeated, self._fingerprint))
        return str(found[0]) if found else "no operation of torch by itself"

    # Between ranks

    def _neighbors(self, snapshot: Snapshot) -> Callable[[int], list[Differences]] | None:
        """What lets each rank execute the step of another one; None where some rank's inputs cannot be sent."""
        own = self._packed()
        if not self._group.all(own is not None) or own is None:
            return None
        if len(set(self._group.gather(self.step.surroundings))) > 1:
            self.unshared = "modules keep other values on other ranks"
            return None
        size, rank = self._group.size, self._group.rank

        def executed(distance: int) -> list[Differences]:
            """How each rank executes the step of the rank so many places behind it."""
            theirs = (rank + distance) % size
            tensors = load(self._group.pass_on(own, to=(rank - distance) % size, back=theirs))
            told = json.loads(bytes(tensors.pop("told").numpy()))
            inputs = Inputs.from_tree(decode(told["inputs"], tensors), self._job.adapter.device)
            self._restore(snapshot)
            mine = self._repeated(inputs, updates=False)
            given = Evidence(outputs=told["outputs"], gradients=told["gradients"])
            return self._group.gather(differences(Evidence(outputs=mine.outputs, gradients=mine.gradients), given))

        return executed

    def _packed(self) -> bytes | None:
        """This rank's inputs, and what they came to; None where they are too large, or no plain data."""
        try:
            plain, tensors = encode(self.step.inputs.to_tree(), "inputs")
        except UnsupportedEngineError as error:
            self.unshared = f"the inputs of a step cannot be sent: {error}"
            return None
        inputs_bytes = sum(one.nbytes for one in tensors.values())
        if inputs_bytes > NEIGHBOR_BYTES_MAX:
            self.unshared = f"the inputs of a step are {inputs_bytes} bytes, with the gradients of the module's outputs"
            return None
        first = self.step.first
        found = {"outputs": Fingerprints.settled(first.outputs), "gradients": Fingerprints.settled(first.gradients)}
        told = json.dumps({"inputs": plain, **found}).encode()
        packed: bytes = save({**tensors, "told": torch.frombuffer(bytearray(told), dtype=torch.uint8)})
        return packed
