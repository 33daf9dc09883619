"""Says of every life of a job where it began, with which bits, what its records say of it, and how it went on.

Every step of every rank is known by its batch and by the digests of its state and its small state (random states,
counters, schedule). Up to the last iteration that descends from nothing but training they are those of the job that was
left alone. After a predicted restart they are compared with what the life before has noted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.life import Life
from cpsr.benchmarks.faults.part import RANKS
from cpsr.benchmarks.faults.remains import Remains, remains_of
from cpsr.benchmarks.faults.scenarios import Scenario
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.memory_states import MemoryState
from cpsr.checkpoint.verify import verify_run
from cpsr.journal import JournalReader, RecoveryRow
from cpsr.predictor.protocol import STALE_METHOD

__all__ = ["Judge", "Step", "impossible_guard", "impossible_sources", "steps_of"]


@dataclass(frozen=True)
class Step:
    """What one rank noted of one step."""

    iteration: int
    batch: tuple[int, ...]
    state: str
    small: str


def steps_of(life: Life, rank: int) -> list[Step]:
    """In the order in which they were trained."""
    return [
        Step(note["iteration"], tuple(note["batch"]), note["state"], note["small"]) for note in life.noted(rank, "step")
    ]


@dataclass
class Judge:
    """Sees one life after the other.

    Args:
        scenario: what happens to the job.
        quiet: the life of a job that was left alone, with the same options.
        run_dir: the job's.
    """

    scenario: Scenario
    quiet: Life
    run_dir: Path
    lost: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._expected = [{step.iteration: step for step in steps_of(self.quiet, rank)} for rank in range(RANKS)]
        # By rank and iteration: what the newest life that trained there noted.
        self._noted = [{iteration: step.state for iteration, step in steps.items()} for steps in self._expected]
        self._trained_until = math.inf  # a state of a later iteration descends from a restart that was not exact
        self._replayed_until = 0  # in the present life the state is not whole before this iteration
        self._ended: Life | None = None
        self._injected_unix_seconds = 0.0

    # One life

    def see(self, life: Life, before: Remains) -> None:
        """Take the next life in.

        Args:
            life: that has ended.
            before: what it found.
        """
        for rank in life.hung:
            self.lost.append(f"rank {rank} hung: {life.output[rank][-200:]!r}")
        for rank in range(RANKS):
            for note in life.noted(rank, "injected"):
                self._injected_unix_seconds = max(self._injected_unix_seconds, note["unix_seconds"])
        self._ended = life
        started = [life.noted(rank, "started") for rank in range(RANKS)]
        if not any(started):
            return  # it ended before it came to train
        row = self._recovery(life)
        for rank, notes in enumerate(started):
            for note in notes:
                self._see_start(rank, note, before, row)
        method, start = next((note["method"], note) for notes in started for note in notes)
        self.methods.append(method)
        if len({(note["iteration"], note["method"]) for notes in started for note in notes}) != 1:
            self.lost.append("the ranks began differently")
        self._see_record(life, start, before, row)
        self._descend(method, start)
        began = self._trained_until
        for rank in range(RANKS):
            self._trained_until = began  # each rank goes back at its own place among its notes
            self._see_steps(life, rank, start, row)

    def _see_start(self, rank: int, note: dict[str, Any], before: Remains, row: RecoveryRow | None) -> None:
        iteration = note["iteration"]
        if iteration < before.newest:
            self.lost.append(f"all ranks had iteration {before.newest} whole, and the job began at {iteration}")
        source = _source(row, rank)
        self._replayed_until = note.get("replayed_until") or 0
        taken = (note["method"] == "exact" or source == "departure") and not self._replayed_until
        if taken and iteration:
            known = self._noted[rank].get(iteration)
            if known is not None and note["state"] != known:
                self.differs.append(f"rank {rank} began at {iteration} ({source}) with other bits than it had there")
        if source == "predicted" and note["method"] == STALE_METHOD:
            known = self._noted[rank].get(note["checkpoint_iteration"])
            if known is not None and note["state"] != known:
                self.differs.append(f"rank {rank} was to have the checkpoint's state at {iteration}, and has another")
        elif source == "predicted" and note["state"] in self._noted[rank].values():
            self.differs.append(f"rank {rank} was to be predicted at {iteration}, and holds an old state")

    def _see_record(self, life: Life, start: dict[str, Any], before: Remains, row: RecoveryRow | None) -> None:
        if row is None:
            if start["method"] != "scratch" and life.good:
                self.lost.append("the journal holds no recovery of a life that ended well")
            return
        found = row.method, row.restored_iteration, row.checkpoint_iteration, row.requested_mode
        reported = start["method"], start["iteration"], start["checkpoint_iteration"], self.scenario.mode
        if found != reported:
            self.lost.append(f"the journal says {found} of the recovery, the ranks {reported}")
        if row.failure_iteration is not None and row.failure_iteration not in before.possible_failures:
            self.lost.append(f"journal: failed at {row.failure_iteration}, counters: {before.failure_iteration}")
        self.lost += impossible_sources(row, before, alike=self.scenario.zero == 0)
        self.lost += impossible_guard(row, ended=life.good)
        if self.scenario.mode == "exact" and row.method != "exact":
            self.differs.append(f"mode exact, and the journal says {row.method}")

    def _descend(self, method: str, start: dict[str, Any]) -> None:
        """Whether what is trained now is what the job that was left alone would train."""
        if method in ("scratch", "exact"):
            if start["iteration"] <= self._trained_until:
                self._trained_until = math.inf
        else:
            self._trained_until = min(self._trained_until, start["checkpoint_iteration"])

    def _see_steps(self, life: Life, rank: int, start: dict[str, Any], row: RecoveryRow | None) -> None:
        last, rolled_back = start["iteration"], False
        for step in steps_of(life, rank):
            if step.iteration != last + 1:
                if rolled_back or row is None or step.iteration != (row.checkpoint_iteration or 0) + 1:
                    self.lost.append(f"rank {rank} trained iteration {step.iteration} after {last}")
                rolled_back = True
                if step.iteration - 1 <= self._trained_until:
                    self._trained_until = math.inf
            last = step.iteration
            self._see_step(rank, step)
        if row is not None and life.good and rolled_back != (row.outcome == "rolled_back"):
            self.lost.append(f"the journal says {row.outcome}, rank {rank} went back: {rolled_back}")

    def _see_step(self, rank: int, step: Step) -> None:
        expected = self._expected[rank][step.iteration]
        if step.batch != expected.batch:
            self.lost.append(f"rank {rank} was dealt {step.batch} at {step.iteration} in place of {expected.batch}")
        if step.iteration < self._replayed_until:  # operators whose turn is still to come are not whole
            step = replace(step, state=expected.state)
        if self._trained_until == math.inf and step != expected:
            what = "state" if step.state != expected.state else "small state"
            self.differs.append(f"rank {rank}: another {what} at {step.iteration} than in the job left alone")
        self._noted[rank][step.iteration] = step.state

    def _recovery(self, life: Life) -> RecoveryRow | None:
        """What the journal says of how this life began; None where it was killed before that was written."""
        path = self.run_dir / "journal.db"
        if not path.exists():
            return None
        with JournalReader(path) as journal:
            rows = journal.recoveries()
        return next((row for row in rows if row.created_unix_seconds >= life.begun_unix_seconds), None)

    # The end

    def conclude(self, states: Sequence[MemoryState]) -> None:
        """All lives were seen: look at what the job has left; `states` are those in memory."""
        assert self._ended is not None
        if not self._ended.good:
            words = next((out[-300:] for out in self._ended.output if out), "")
            self.lost.append(f"the job did not come to its end: statuses {self._ended.statuses}, {words!r}")
            return
        last = max(remains_of(self.run_dir).committed, default=0)
        if last != self.scenario.iterations:
            self.lost.append(f"the last checkpoint is {last}, the job ended at {self.scenario.iterations}")
        self.lost += [f"{problem.file}: {problem.what}" for problem in verify_run(self.run_dir)]
        if states:
            self.lost.append("a clean end has left states in shared memory")
        label = next((info.manifest.label for info in scan(self.run_dir / "checkpoints").checkpoints[::-1]), None)
        kept = self._trained_until != math.inf
        if (label == "predicted") != (kept and self._descends_from_prediction()):
            self.lost.append(f"the last checkpoint is labelled {label}, the restarts were {self.methods}")

    def _descends_from_prediction(self) -> bool:
        return any(method not in ("scratch", "exact", "departure") for method in self.methods)

    @property
    def seconds_to_resume(self) -> float:
        """From the last signal to the first step of the last life; to its start where nothing was left to train.

        0 where there was no signal, or no new step.
        """
        assert self._ended is not None
        noted = [self._ended.noted(rank, "step") or self._ended.noted(rank, "started") for rank in range(RANKS)]
        resumed = max((notes[0]["unix_seconds"] for notes in noted if notes), default=0.0)
        return max(resumed - self._injected_unix_seconds, 0.0) if self._injected_unix_seconds else 0.0


def _source(row: RecoveryRow | None, rank: int) -> str:
    if row is None:
        return "unknown"
    return next((source.source for source in row.sources if source.rank == rank), "none")


def impossible_sources(row: RecoveryRow, before: Remains, *, alike: bool) -> Iterator[str]:
    """Sources that have nothing of what the journal names them for; `alike` where a rank's state does for all."""
    tiers = {source.source for source in row.sources}
    if tiers == {"predicted"} and row.restored_iteration not in before.possible_failures:
        yield f"predicted at {row.restored_iteration}, and the job had failed at {before.failure_iteration}"
    for source in row.sources:
        if source.iteration != row.restored_iteration:
            goes_on = row.restored_iteration
            yield f"rank {source.rank} came from iteration {source.iteration}, the job goes on at {goes_on}"
        here = {rank for rank, iteration in before.stored if iteration == source.iteration}
        there = bool(here) if alike else source.rank in here
        if source.source == "disk" and source.iteration not in before.committed:
            yield f"rank {source.rank} came from checkpoint {source.iteration}, which was not committed"
        if source.source in ("memory", "departure") and not there:
            yield f"rank {source.rank} came from memory at {source.iteration}, where nothing whole was"


def impossible_guard(row: RecoveryRow, *, ended: bool) -> Iterator[str]:
    """What the guard's record cannot say of such a recovery, once its life has `ended` well or while it has not."""
    accepted = row.guard.get("loss", {}).get("accepted")
    in_use = row.method not in ("scratch", "exact")
    # What ranks have left is judged where there is something to judge it by; no number of it was predicted.
    if in_use and not accepted and (row.guard or row.method != "departure"):
        yield f"a state is in use that the guard has not accepted: {row.guard}"
    if row.guard.get("finite", {}).get("accepted") is False and in_use:
        yield "a state is in use that is not finite"
    if row.outcome == "vetoed" and (in_use or accepted):
        yield f"vetoed, and yet {row.method} with a guard that says {accepted}"
    if not in_use and row.guard and row.outcome != "vetoed":
        yield f"the guard was asked and the state is exact, and yet the outcome is {row.outcome}"
    watch = row.guard.get("watch", {}).get("status")
    if (row.outcome == "rolled_back") != (watch == "diverged"):
        yield f"the outcome is {row.outcome}, the watch says {watch}"
    if ended and row.outcome == "watching":
        yield "the life has ended well, and its journal says that the state is still watched"
