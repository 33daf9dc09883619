"""Checks in which a rank kills itself with SIGKILL, the launcher restarts the job, and the training returns.

A check runs in two lives. In the first the last rank records the kill and dies; the others leave as in any job. The
second one restarts, trains to the end, and compares with the reference.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import COMMIT, step_name
from cpsr.checkpoint.memory_states import memory_states
from cpsr.checkpoint.progress import read_progress
from cpsr.checkpoint.run_directory import IDENTITY
from cpsr.journal import JournalReader, RecoveryRow
from cpsr.qualify.cells import Cell
from cpsr.qualify.scene import Scene
from cpsr.qualify.training import Reference, Training, digest_of
from cpsr.recovery import CPSRRecovery
from cpsr.restart.restored import Restored

__all__ = [
    "check_dump",
    "check_prediction",
    "check_replay",
    "check_return_from_disk",
    "check_return_from_memory",
]

INTERVAL, CHECKPOINT, FAILURE, END = 4, 20, 23, 30
WINDOW, WINDOW_ITERATIONS = 19, 3  # the last complete window begins there
SAVE_SECONDS = 10.0  # far more than a save of this model takes


def check_return_from_memory(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """From the newest snapshot in shared memory, bit for bit."""
    return _returned(cell, scene, "memory")


def check_return_from_disk(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """From the newest committed checkpoint, bit for bit."""
    return _returned(cell, scene, "disk")


def check_replay(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """From the newest complete window in shared memory, bit for bit at its end and at the end of the training."""
    life = _Life(cell, scene, "exact", shared_memory=True, replays=True)
    if not scene.killed:
        life.train_and_die()
    restored, losses = life.train_on()
    row, reference = life.recovery_row(), life.reference()
    assert restored.restored_iteration == WINDOW, restored
    assert "window" in row.reason, row.reason
    assert losses == reference.losses[WINDOW:], f"{losses} differ from {reference.losses[WINDOW:]}"
    assert life.digest_at_end == reference.digests[str(END)], "weights, optimizer state or buffers differ at the end"
    life.assert_label("trained")
    return {"load_seconds": row.load_seconds, "inject_seconds": row.inject_seconds}


def check_prediction(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """By prediction where memory is lost, or from the checkpoint if the guard refuses; both have the right labels."""
    life = _Life(cell, scene, "predict", shared_memory=False)
    if not scene.killed:
        life.train_and_die()
    restored, losses = life.train_on()
    row = life.recovery_row()
    verdict = row.guard.get("loss", row.guard)
    if restored.predicted and row.outcome != "rolled_back":
        assert restored.restored_iteration == FAILURE, restored
        assert row.method in ("line", "vitp"), row.method
        assert {source.source for source in row.sources} == {"predicted"}, row.sources
        assert all(math.isfinite(loss) for loss in losses), losses
        life.assert_label("predicted")
    else:
        assert row.outcome in ("vetoed", "rolled_back"), f"nothing was predicted: {row.reason}"
        assert losses[-1] == life.reference().losses[-1], "after the guard's refusal the training is not the same"
        life.assert_label("trained")
    return {"outcome": row.outcome, "method": row.method, "guard": verdict}


def check_dump(cell: Cell, scene: Scene) -> Mapping[str, Any]:
    """The ranks that did not die leave their state at the failure, and the restart takes it."""
    life = _Life(cell, scene, "predict", shared_memory=True)
    if not scene.killed:
        life.train_and_die()
    restored, losses = life.train_on(digest=True)
    row = life.recovery_row()
    sources = [(source.source, source.iteration) for source in sorted(row.sources, key=lambda one: one.rank)]
    replicated = cell.replicated
    lost = ("departure" if replicated else "predicted", FAILURE)
    expected = [("departure", FAILURE)] * (scene.ranks - 1) + [lost]
    assert sources == expected, f"{sources}, not {expected}: {row.reason}"
    assert restored.restored_iteration == FAILURE, restored
    lost_rank = scene.rank == scene.ranks - 1
    if replicated or not lost_rank:  # what all ranks hold alike comes from a survivor, with that rank's buffers
        holders = range(scene.ranks - 1) if lost_rank else [scene.rank]
        there = {life.reference(rank).digests[str(FAILURE)] for rank in holders}
        assert life.digest_at_start in there, "the dump is not the state at the failure"
    assert all(math.isfinite(loss) for loss in losses), losses
    return {"sources": [source for source, _ in sources], "outcome": row.outcome}


def _returned(cell: Cell, scene: Scene, tier: str) -> Mapping[str, Any]:
    life = _Life(cell, scene, "exact", shared_memory=tier == "memory")
    if not scene.killed:
        life.train_and_die()
    if tier == "memory":
        life.take_back_commit()
    restored, losses = life.train_on()
    row, reference = life.recovery_row(), life.reference()
    assert restored.restored_iteration == CHECKPOINT, restored
    assert [(source.source, source.iteration) for source in row.sources] == [(tier, CHECKPOINT)] * scene.ranks, row
    assert losses == reference.losses[CHECKPOINT:], f"{losses} differ from {reference.losses[CHECKPOINT:]}"
    assert life.digest_at_end == reference.digests[str(END)], "weights, optimizer state or buffers differ at the end"
    life.assert_label("trained")
    return {"load_seconds": row.load_seconds, "inject_seconds": row.inject_seconds}


class _Life:
    """A life of the small training under CPSR.

    Args:
        cell: to train.
        scene: where.
        mode: of the recovery.
        shared_memory: whether snapshots outlive the process.
        replays: whether windows are taken.
    """

    def __init__(self, cell: Cell, scene: Scene, mode: str, *, shared_memory: bool, replays: bool = False) -> None:
        # With windows every other checkpoint: the last one must be older than the window.
        self._checkpoint, interval = (CHECKPOINT - INTERVAL, 2 * INTERVAL) if replays else (CHECKPOINT, INTERVAL)
        self._needed = WINDOW if replays else CHECKPOINT
        self._cell, self._scene, self._shared_memory = cell, scene, shared_memory
        self._run_dir = scene.folder / "run"
        self.digest_at_start = self.digest_at_end = ""
        self._config = {
            "run_dir": str(self._run_dir),
            "mode": mode,
            "checkpoint": {
                "interval_iterations": interval,
                "shared_memory": shared_memory,
            },
            "replay": {"enabled": replays, "window_iterations": WINDOW_ITERATIONS},
        }

    def train_and_die(self) -> None:
        """Make the reference, train to the failure, and kill the last rank; the others raise what they get.

        Raises:
            AssertionError: this rank trained on beside a dead one.
        """
        reference = Reference.of(Training(self._cell, self._scene), END, (FAILURE, END))
        self._reference_path(self._scene.rank).write_text(json.dumps(dataclasses.asdict(reference)), encoding="utf-8")
        training, victim = Training(self._cell, self._scene), self._scene.rank == self._scene.ranks - 1
        losses: list[float] = []
        with CPSRRecovery(training.recoverable, self._config) as recovery:
            for batch in recovery.resume(training.loader, repeat=True):
                if recovery.iteration == FAILURE and victim:
                    assert losses == reference.losses[:FAILURE], "CPSR changes the training"
                    self._scene.wait_until(self._can_die, f"checkpoint {self._checkpoint} was not there on all ranks")
                    self._scene.kill_myself(FAILURE)
                losses.append(training.step(batch))
                _keep_pace(recovery)
                assert recovery.iteration <= FAILURE + 1, "the training continued without the killed rank"

    def take_back_commit(self) -> None:
        """Remove the record of the newest commit, as if the kill had come before it: the disk would be preferred."""
        if self._scene.rank == 0:
            (self._run_dir / "checkpoints" / step_name(CHECKPOINT) / COMMIT).unlink(missing_ok=True)
        if dist.is_initialized():
            dist.barrier()

    def train_on(self, *, digest: bool = False) -> tuple[Restored, list[float]]:
        """Restart and train to the end; with `digest`, note the state that this rank began with."""
        training = Training(self._cell, self._scene)
        losses: list[float] = []
        with CPSRRecovery(training.recoverable, self._config) as recovery:
            if digest:
                self.digest_at_start = digest_of(recovery.life.job.adapter)
            for batch in recovery.resume(training.loader, repeat=True):
                losses.append(training.step(batch))
                _keep_pace(recovery)
                if recovery.iteration >= END:
                    break
            self.digest_at_end = digest_of(recovery.life.job.adapter)
        return recovery.restored, losses

    def reference(self, rank: int | None = None) -> Reference:
        """What the first life left of the training that nothing happens to, by default on this rank."""
        path = self._reference_path(self._scene.rank if rank is None else rank)
        return Reference(**json.loads(path.read_text(encoding="utf-8")))

    def _reference_path(self, rank: int) -> Path:
        return self._scene.folder / f"reference-{rank:05d}.json"

    def recovery_row(self) -> RecoveryRow:
        """The journal's newest recovery; rank 0 has closed it when the others have left the run."""
        with JournalReader(self._run_dir / "journal.db") as journal:
            row = journal.latest_recovery()
        assert row is not None, f"{self._run_dir} records no recovery"
        return row

    def assert_label(self, label: str) -> None:
        """The last checkpoint says so, and so does the journal (rank 0, which writes both)."""
        if self._scene.rank != 0:
            return
        newest = scan(self._run_dir / "checkpoints").checkpoints[-1]
        assert (newest.iteration, newest.label or "trained") == (END, label), f"checkpoint says {newest}"
        with JournalReader(self._run_dir / "journal.db") as journal:
            origins = {row.iteration: row.origin for row in journal.checkpoints() if row.status == "committed"}
        assert origins[END] == label, f"the journal says {origins[END]} of the checkpoint at {END}"

    def _can_die(self) -> bool:
        """What the next life needs is there, and every rank has published the failure's step."""
        record = self._run_dir / "checkpoints" / step_name(self._checkpoint) / COMMIT
        progress = read_progress(self._run_dir, self._scene.ranks)
        if not record.exists() or progress is None or progress.iteration < FAILURE:
            return False
        return not self._shared_memory or self._in_memory()

    def _in_memory(self) -> bool:
        """Whether this machine's memory holds what every rank of it returns to."""
        run_id = json.loads((self._run_dir / IDENTITY).read_text(encoding="utf-8"))["run_id"]
        ranks = {state.rank for state in memory_states(run_id) if state.iteration == self._needed}
        return self._scene.rank in ranks and len(ranks) >= self._scene.local_ranks


def _keep_pace(recovery: CPSRRecovery) -> None:
    """Before a checkpoint is due, let the last be written: steps this short would outrun the disk, and skip it."""
    if recovery.life.saver.is_due(recovery.iteration + 1):
        recovery.life.saver.drain(SAVE_SECONDS)
