"""Which steps are repeated, and what follows from what they show."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import is_committed
from cpsr.errors import RecoveryError, UnevenRanksError
from cpsr.job import Job
from cpsr.ranks.exits import lost_another, ranks_named
from cpsr.verification.account import Account
from cpsr.verification.evidence import Fingerprints, Verdict, judge_memory

if TYPE_CHECKING:
    from cpsr.verification.repetition import Repetition

__all__ = ["Verification"]

# Until one has been timed: a step of this rank and one of its neighbor, and as much again for copies and fingerprints.
EXPECTED_STEPS = 4.0
ALONE_MAX = 2  # wrong steps of a job of one rank; likewise
UNREPEATABLE_MAX = 2  # in a row; then no more steps are repeated


@dataclass(frozen=True)
class _Accused:
    """The last step that was wrong.

    Attributes:
        iteration: of the step.
        state: fingerprints of what the loop had come to.
        suspicion: what was found and on which device, where that is to be confirmed; else None.
    """

    iteration: int
    state: dict[str, Any]
    suspicion: tuple[str, str] | None = None


class Verification:
    """Repeats a step after a checkpoint now and then, from the snapshot of that checkpoint.

    The step runs as ever, and is then executed again from the snapshot. If both came to the same bits, the checkpoint
    is verified, and stays on the disk until a later one is. All methods but `before_update`, `cancel` and `close` are
    collectives.

    Args:
        store: keeps the newest verified checkpoint whole.
        pool: lends a host buffer for the state after the step, while the step is repeated.
        inject: puts a snapshot into the engine, as a restart does.
        objects: that the user has registered so far.
        off: why no step of this life can be verified, one clause for people; None where steps can.

    Attributes:
        account: of the run; that of rank 0 counts.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointStore,
        pool: SnapshotPool,
        inject: Callable[[Snapshot], None],
        objects: Sequence[Any] = (),
        off: str | None = None,
    ) -> None:
        self._job, self._group, self._store, self._pool, self._inject = job, job.group, store, pool, inject
        self._objects = objects
        self._fraction = job.config.verification.budget_fraction
        self.account = Account.of_run(job.config.run_dir) if job.group.rank == 0 else Account()
        store.verified_iterations = tuple(self.account.verified)
        self._off: str | None = "turned off"
        if self._fraction:
            known = next(iter(job.group.gather_present(off or job.adapter.repetition_obstacle())), None)
            self._off = known or job.group.broadcast(self.account.off)
            if known is not None and job.group.rank == 0:
                job.journal.event("verification is off", f"No step of this job is repeated to verify it: {known}")
        every = [*range(job.group.size)]
        alike = len(every) > 1 and job.adapter.data_parallel_ranks == every and job.adapter.mixture is None
        self._compares = bool(self._fraction) and job.group.all(alike)  # steps of neighbors
        self._cost_seconds = 0.0  # of the last verification
        self._repeatable = False  # whether a step of this life was
        self._agreed = False  # whether ranks came to the same from each other's inputs
        self._accused: _Accused | None = None
        self._committed = -1  # the newest that this life knows to be
        self._spent = 0.0  # on the step in progress
        self._unrepeatable = 0  # in a row
        self._repetition: Repetition | None = None
        self._saving: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the step in progress will be repeated."""
        return self._repetition is not None

    # While the loop runs the step

    def due(self, iteration: int, step_seconds: float) -> bool:
        """Whether the step after the checkpoint that begins now is to be repeated.

        Args:
            iteration: of the checkpoint.
            step_seconds: that a step usually takes.
        """
        if self._off is not None:
            return False
        affords = self.account.affords(self._cost_seconds or EXPECTED_STEPS * step_seconds, self._fraction)
        again = self._accused is not None and self._accused.iteration == iteration + 1
        return bool(self._group.broadcast(again or (affords and step_seconds > 0)))

    def begin(self, iteration: int) -> None:
        """The snapshot of this checkpoint is being copied: record the step that follows."""
        from cpsr.verification.repetition import Repetition  # not what every start waits for

        started = time.perf_counter()
        self._repetition = Repetition(self._job, iteration, self._inject, self._objects, compares=self._compares)
        with self._repetition.step.watching():
            self._repetition.begin()
        self._spent = time.perf_counter() - started

    def before_update(self, snapshot: Snapshot | None) -> None:
        """The update begins, and the copy of the snapshot is complete; None: it has failed."""
        repetition = self._repetition
        if repetition is not None and repetition.snapshot is None and repetition.step.obstacle is None:
            started = time.perf_counter()
            with repetition.step.watching():
                repetition.before_update(snapshot)
            self._spent += time.perf_counter() - started

    # After the step

    def conclude(self, iteration: int) -> Verdict | None:
        """Repeat the step that has just ended; the engine is then at its end, as the loop or the repetition left it.

        Args:
            iteration: of the step.

        Returns:
            What was found; None where the step could not be repeated.

        Raises:
            RecoveryError: repeating it failed on this rank, and others may wait for it.
        """
        repetition, started = self._repetition, time.perf_counter()
        assert repetition is not None
        self._repetition = None
        try:
            verdict = self._concluded(repetition, iteration)
        finally:
            cost_seconds = self._spent + time.perf_counter() - started
            self.account.spend(cost_seconds)
        if verdict is not None:
            self._cost_seconds = cost_seconds
            self._learn(verdict, repetition, iteration)
        return verdict

    def _concluded(self, repetition: "Repetition", iteration: int) -> Verdict | None:
        with repetition.step.watching():
            repetition.end()
        obstacles = self._group.gather_present(repetition.step.obstacle)
        if obstacles:
            self._count_unrepeatable(f"this loop's steps cannot be repeated, since {obstacles[0]}")
            return None
        changed = self._group.gather(repetition.changed)
        kept = None if repetition.snapshot is None else self._keep(iteration)
        try:
            if self._group.all(kept is not None) and kept is not None:
                verdict = self._verdict(repetition, kept, changed, iteration)
            elif any(changed):  # a copy that meets such a change is given up
                verdict = self._unless_it_recurs(
                    judge_memory(changed, repeatable=self._repeatable), repetition, iteration
                )
            else:
                return None
        finally:
            if kept is not None:
                self._pool.release(kept)
        self._note_unshared(repetition)
        return verdict

    def _unless_it_recurs(self, verdict: Verdict, repetition: "Repetition", iteration: int) -> Verdict:
        """The verdict; unless the loop has come to the same wrong bits again, which are then of its own making."""
        accused = self._accused
        if accused is None or accused.iteration != iteration:
            return verdict
        self._accused = None
        if verdict.kind == "verified" and accused.suspicion is not None:
            self._confirm(*accused.suspicion)
        if verdict.kind != "wrong":
            return verdict
        if not self._group.all(accused.state == Fingerprints.settled(repetition.step.first.state)):
            return verdict
        self.account.wrong.clear()
        self._unrepeatable = UNREPEATABLE_MAX  # off at once
        return replace(verdict, kind="unrepeatable")

    def _keep(self, iteration: int) -> Snapshot | None:
        """Copy the present state into a host buffer; None where each of them is in use, or has what a restart needs."""
        kept = self._pool.acquire(iteration, keep_newest=True)
        if kept is not None:
            held = dict(kept.shard.tensors())
            for key, values in self._job.adapter.shard().tensors():
                held[key].copy_(values)
        return kept

    def _put_back(self, kept: Snapshot, repetition: "Repetition") -> None:
        """The engine gets the state that the loop had reached."""
        live = dict(self._job.adapter.shard(to_fill=True).tensors())
        with torch.no_grad():
            for key, values in kept.shard.tensors():
                live[key].copy_(values)
        repetition.step.settle()
        self._job.adapter.push_down()

    def _verdict(
        self, repetition: "Repetition", kept: Snapshot, changed: Sequence[Sequence[str]], iteration: int
    ) -> Verdict:
        snapshot = repetition.snapshot
        assert snapshot is not None
        try:
            verdict, is_there = repetition.verdict(snapshot, changed, repeatable=self._repeatable, agreed=self._agreed)
            verdict = self._unless_it_recurs(verdict, repetition, iteration)
            unsure = self._group.size == 1 and verdict.kind == "wrong"  # and so what the loop has come to counts
            if is_there and verdict.kind != "unrepeatable" and not unsure:
                repetition.step.settle()
            else:
                self._put_back(kept, repetition)
        except BaseException as error:  # of the module, of the restore path, or of a signal's handler
            if not isinstance(error, Exception):
                if self._group.size == 1:
                    self._put_back(kept, repetition)
                raise
            from cpsr.verification.repetition import FailedForwardError

            if lost_another(str(error)) or isinstance(error, UnevenRanksError):
                raise
            why = f"repeating a step failed on rank {self._group.rank}: {type(error).__name__}: {error}"
            if self._group.size > 1 and not isinstance(error, FailedForwardError):
                self._off = self.account.off = why
                account = replace(Account.of_run(self._job.config.run_dir), off=why)
                account.save(self._job.config.run_dir)  # where the next life finds it
                raise RecoveryError(
                    f"{why}. Other ranks may wait for this one, so that it ends. No checkpoint is affected: start the "
                    "job again, which repeats no further step"
                ) from error
            self._put_back(kept, repetition)
            return Verdict("unrepeatable", (0,), why)
        return verdict

    def _note_unshared(self, repetition: "Repetition") -> None:
        """Say once where neighbors do not repeat each other's steps."""
        reasons = self._group.gather_present(repetition.unshared) if self._compares else []
        if reasons:
            self._compares = False
            self._warn(
                "neighbors are not compared",
                f"no rank repeats the steps of another: {reasons[0]}. A device that is wrong in the same way each time "
                "is not found. Each rank still repeats steps of its own",
            )

    def _learn(self, verdict: Verdict, repetition: "Repetition", iteration: int) -> None:
        """Record what was found; of wrong arithmetic the caller decides what follows."""
        if verdict.kind == "wrong":
            self._accused = _Accused(iteration, Fingerprints.settled(repetition.step.first.state))
        elif verdict.kind == "verified":
            self._repeatable, self._unrepeatable = True, 0
            self._agreed |= repetition.agreed
            self.account.verified.append(iteration - 1)
            self.note_committed(self._committed)
            if self._group.rank == 0:
                self._job.journal.event(
                    "verified",
                    f"step {iteration} was repeated with equal results in {self._cost_seconds:.2g} s: checkpoint "
                    f"{iteration - 1} is verified",
                    iteration - 1,
                    logging.DEBUG,
                )
        elif verdict.kind == "nondeterministic" and verdict.execution == "each":
            self._compares = False
            self._warn(
                "ranks compute differently",
                f"the same batch has other results on {ranks_named(verdict.ranks)} ({verdict.where}): devices or "
                "software differ, one of them is faulty, or the module does something else there. Test these devices. "
                "Each rank still repeats its own steps",
            )
        elif verdict.kind == "nondeterministic":
            self.turn_off(
                f"step {iteration} came to other results in each execution, first in {verdict.where} on "
                f"{ranks_named(verdict.ranks)}: this arithmetic is not deterministic"
            )
        elif verdict.kind == "unrepeatable":
            self._count_unrepeatable(
                f"in step {iteration} the loop did something that CPSR does not repeat ({verdict.where})"
            )
        self._store.verified_iterations = tuple(self.account.verified)
        self._save_beside()

    # What is verified, and what was wrong

    def _save(self) -> None:
        """Write the account, on rank 0."""
        if self._group.rank == 0:
            if self._saving is not None:
                self._saving.join()
            self.account.save(self._job.config.run_dir)

    def _save_beside(self) -> None:
        """The same, without waiting for the disk; a write that still waits for it leaves this one to a later save."""
        if self._group.rank == 0 and (self._saving is None or not self._saving.is_alive()):
            saved = replace(self.account, verified=[*self.account.verified], wrong={**self.account.wrong})
            self._saving = threading.Thread(target=saved.save, args=(self._job.config.run_dir,), daemon=True)
            self._saving.start()

    def note_committed(self, iteration: int) -> None:
        """Rank 0 has committed a checkpoint."""
        self._committed = iteration
        self.account.note_committed(iteration)
        self._store.verified_iterations = tuple(self.account.verified)

    def newest_verified(self) -> int | None:
        """The newest committed checkpoint that is verified, once no rank is saving; None: there is none."""
        verified = self.account.verified if self._group.rank == 0 else []
        committed = [one for one in verified if is_committed(self._store.directory_of(one))]
        newest: int | None = self._group.broadcast(max(committed, default=None))
        return newest

    def cancel(self) -> None:
        """The step in progress is not repeated; on this rank alone."""
        if self._repetition is not None:
            self._repetition.step.cancel()
            self._repetition = None

    def close(self) -> None:
        """The life ends: keep what its training has earned."""
        if self._group.rank == 0 and self._fraction:
            self.account.affords(0.0, self._fraction)
            self.account.off = self.account.off or Account.of_run(self._job.config.run_dir).off  # another rank's
            self._save()

    def suspect(self, what: str, place: str) -> None:
        """The wrong step will be executed again by the loop, and is only then called wrong.

        Args:
            what: was found, as a sentence without its end.
            place: the device, `host/device`.
        """
        assert self._accused is not None
        self._accused = replace(self._accused, suspicion=(what, place))

    def _confirm(self, what: str, place: str) -> None:
        again = f"{what}. When the loop executed the step again, it came to the bits of its repetitions"
        times = self.count_wrong(place)
        self._job.journal.event("wrong arithmetic", f"{again}. Test this device", level=logging.ERROR)
        if times >= ALONE_MAX:
            self.turn_off(
                f"that was step {times} of this run whose arithmetic was wrong, and no other rank computes the same: "
                "either this loop does in some steps what CPSR does not repeat, or this device is faulty"
            )

    def count_wrong(self, place: str) -> int:
        """Count wrong arithmetic of a device, `host/device`; returns how often it was wrong in this run."""
        count = self.account.wrong[place] = self.account.wrong.get(place, 0) + 1
        self._save()
        return int(self._group.broadcast(count))

    def rewound(self, last_kept_iteration: int) -> None:
        """The run goes on from an earlier state: later ones are none of it any more."""
        self.cancel()
        self.account.verified = [one for one in self.account.verified if one <= last_kept_iteration]
        self._store.verified_iterations = tuple(self.account.verified)

    def _count_unrepeatable(self, why: str) -> None:
        self._unrepeatable += 1
        if self._unrepeatable >= UNREPEATABLE_MAX:
            self.turn_off(why)

    def turn_off(self, why: str) -> None:
        """Repeat no further step of this run; on all ranks."""
        self._off = self.account.off = why
        self._save()
        self._warn("verification is off", f"No further step of this run is verified: {why}. Training is not affected")

    def _warn(self, kind: str, message: str) -> None:
        if self._group.rank == 0:  # all ranks know
            self._job.journal.event(kind, message, level=logging.WARNING)
