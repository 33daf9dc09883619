"""The checks, and the cells that they run with.

`restart` is the rule of conformance. In the others a rank kills itself with SIGKILL, the launcher restarts the job, and
the training returns. Such a check runs in two lives. In the first the last rank records the kill and dies; the others
leave as in any job. The second one restarts, trains to the end, and compares with a reference that ran without CPSR:
equality also shows that CPSR changes nothing in a training.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import COMMIT, step_name
from cpsr.checkpoint.progress import read_progress
from cpsr.checkpoint.run_directory import run_id
from cpsr.engines import EngineAdapter
from cpsr.journal import JournalReader, RecoveryRow
from cpsr.qualify.cells import Cell, Scene, cells_of
from cpsr.qualify.conformance import check_early_state, check_resume, seed
from cpsr.qualify.torch_jobs import BATCH, LENGTH, VOCABULARY
from cpsr.recovery import CPSRRecovery
from cpsr.restart.restored_state import Restored
from cpsr.state.shard import bytes_of

__all__ = ["CHECKS", "Check", "Trial", "check_restart", "trials_of"]

DEADLINE_SECONDS = 300.0  # for what takes seconds; a first use of an operator may compile it
MICRO_BATCHES = 2  # of a restart: where parameters are split, gradients are summed over the ranks at the last
INTERVAL, CHECKPOINT, FAILURE, END = 4, 20, 23, 30
WINDOW, WINDOW_ITERATIONS = 19, 3  # the last complete window begins there
SAVE_SECONDS = 10.0  # far more than a save of this model takes
SEQUENCES = 24  # per rank


def check_restart(cell: Cell, scene: Scene) -> None:
    """Bitwise equality of what restarted and what never stopped."""
    build = scene.builder(cell, MICRO_BATCHES, "cosine")
    check_resume(build)
    check_early_state(build)


def check_exact(tier: str, cell: Cell, scene: Scene) -> None:
    """Back from the newest state of a tier, bit for bit there and at the end of the training.

    Args:
        tier: `memory`: the newest snapshot in shared memory; `disk`: the newest committed checkpoint; `replay`: the
            newest complete window in shared memory.
        cell: to train.
        scene: where.
    """
    life = _Life(cell, scene, "exact", shared_memory=tier != "disk", replays=tier == "replay")
    life.reach_failure()
    if tier == "memory":
        life.take_back_commit()
    restored, losses = life.train_on()
    row, reference = life.recovery_row(), life.reference(scene.rank)
    start = WINDOW if tier == "replay" else CHECKPOINT
    assert restored.restored_iteration == start, restored
    if tier == "replay":
        assert "window" in row.reason, row.reason
    else:
        assert [(source.source, source.iteration) for source in row.sources] == [(tier, start)] * scene.ranks, row
    assert losses == reference["losses"][start:], f"{losses} differ from {reference['losses'][start:]}"
    assert life.digest_at_end == reference[str(END)], "weights, optimizer state or buffers differ at the end"
    life.assert_label("trained")


def check_prediction(cell: Cell, scene: Scene) -> None:
    """By prediction where memory is lost, or from the checkpoint if the guard refuses; both have the right labels."""
    life = _Life(cell, scene, "predict", shared_memory=False)
    life.reach_failure()
    restored, losses = life.train_on()
    row = life.recovery_row()
    if restored.predicted and row.outcome != "rolled_back":
        assert restored.restored_iteration == FAILURE, restored
        assert row.method in ("line", "vitp", "stale"), row.method
        assert {source.source for source in row.sources} == {"predicted"}, row.sources
        assert all(math.isfinite(loss) for loss in losses), losses
        life.assert_label("predicted")
    else:
        assert row.outcome in ("vetoed", "rolled_back"), f"nothing was predicted: {row.reason}"
        expected = life.reference(scene.rank)["losses"][-1]
        assert losses[-1] == expected, "after the guard's refusal the training is not the same"
        life.assert_label("trained")


def check_dump(cell: Cell, scene: Scene) -> None:
    """The ranks that did not die leave their state at the failure, and the restart takes it."""
    life = _Life(cell, scene, "predict", shared_memory=True)
    life.reach_failure()
    restored, losses = life.train_on()
    row = life.recovery_row()
    sources = [(source.source, source.iteration) for source in sorted(row.sources, key=lambda one: one.rank)]
    lost = ("departure" if cell.is_replicated else "predicted", FAILURE)
    expected = [("departure", FAILURE)] * (scene.ranks - 1) + [lost]
    assert sources == expected, f"{sources}, not {expected}: {row.reason}"
    assert restored.restored_iteration == FAILURE, restored
    is_lost = scene.rank == scene.ranks - 1
    if cell.is_replicated or not is_lost:  # what all ranks hold alike comes from a survivor, with that rank's buffers
        holders = range(scene.ranks - 1) if is_lost else [scene.rank]
        there = {life.reference(rank)[str(FAILURE)] for rank in holders}
        assert life.digest_at_start in there, "the dump is not the state at the failure"
    assert all(math.isfinite(loss) for loss in losses), losses


class _Training:
    """Engine and data of one life, the same in every life.

    Attributes:
        job: of this rank.
        loader: of this rank's batches.
    """

    def __init__(self, cell: Cell, scene: Scene) -> None:
        seed(1)
        self.job = scene.builder(cell, micro_batches=1)()
        data = TensorDataset(torch.randint(VOCABULARY, (SEQUENCES * scene.ranks, LENGTH + 1)))
        # Ranks of tensor parallelism train on the same batches.
        parts, part = (1, 0) if cell.engine == "tp" else (scene.ranks, scene.rank)
        self._sampler: DistributedSampler[Any] = DistributedSampler(data, parts, part, seed=3)
        self.loader: DataLoader[Any] = DataLoader(data, BATCH, sampler=self._sampler, drop_last=True)

    def passes(self) -> Iterator[Any]:
        """Batches of one pass after the other, as without CPSR."""
        for epoch in itertools.count():
            self._sampler.set_epoch(epoch)
            yield from self.loader

    def step(self, batch: Any) -> float:
        """Train one iteration; returns the loss of this rank's batch."""
        (sequences,) = batch
        return float(self.job.train_on([(sequences[:, :-1], sequences[:, 1:])]).item())


class _Life:
    """A small training in two lives under CPSR.

    Args:
        cell: to train.
        scene: where.
        mode: of the recovery.
        shared_memory: whether snapshots outlive the process.
        replays: whether windows are taken.

    Attributes:
        digest_at_start, digest_at_end: of this rank's state when the second life begins and ends.
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
            "checkpoint": {"interval_iterations": interval, "shared_memory": shared_memory},
            "replay": {"enabled": replays, "window_iterations": WINDOW_ITERATIONS},
        }

    def reach_failure(self) -> None:
        """In the first life: make the reference, train, and kill the last rank; the others raise what they get.

        Raises:
            AssertionError: this rank trained on beside a dead one.
        """
        if self._scene.killed:
            return
        reference = self._train_reference()
        training, victim = _Training(self._cell, self._scene), self._scene.rank == self._scene.ranks - 1
        losses: list[float] = []
        with CPSRRecovery(training.job.adapter, self._config) as recovery:
            for batch in recovery.resume(training.loader, repeat=True):
                if recovery.iteration == FAILURE and victim:
                    assert losses == reference["losses"][:FAILURE], "CPSR changes the training"
                    self._scene.wait_until(self._can_die, f"checkpoint {self._checkpoint} was not there on all ranks")
                    self._scene.kill_myself(FAILURE)
                losses.append(training.step(batch))
                _keep_pace(recovery)
                assert recovery.iteration <= FAILURE + 1, "the training continued without the killed rank"

    def _train_reference(self) -> dict[str, Any]:
        """Train without CPSR; leaves the `losses` of all iterations, and digests of the state after two of them."""
        training = _Training(self._cell, self._scene)
        losses: list[float] = []
        digests = {}
        for batch in itertools.islice(training.passes(), END):
            losses.append(training.step(batch))
            if len(losses) in (FAILURE, END):
                digests[str(len(losses))] = _digest(training.job.adapter)
        reference = {"losses": losses, **digests}
        (self._scene.folder / f"reference-{self._scene.rank:05d}.json").write_text(json.dumps(reference))
        return reference

    def reference(self, rank: int) -> dict[str, Any]:
        """What `_train_reference` left on a rank."""
        path = self._scene.folder / f"reference-{rank:05d}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def take_back_commit(self) -> None:
        """Remove the record of the newest commit, as if the kill had come before it: the disk would be preferred."""
        if self._scene.rank == 0:
            self._commit_of(CHECKPOINT).unlink(missing_ok=True)
        if dist.is_initialized():
            dist.barrier()

    def _commit_of(self, iteration: int) -> Path:
        return self._run_dir / "checkpoints" / step_name(iteration) / COMMIT

    def train_on(self) -> tuple[Restored, list[float]]:
        """Restart and train to the end; returns how the life began, and its losses."""
        training = _Training(self._cell, self._scene)
        losses: list[float] = []
        with CPSRRecovery(training.job.adapter, self._config) as recovery:
            self.digest_at_start = _digest(training.job.adapter)
            for batch in recovery.resume(training.loader, repeat=True):
                losses.append(training.step(batch))
                _keep_pace(recovery)
                if recovery.iteration >= END:
                    break
            self.digest_at_end = _digest(training.job.adapter)
        return recovery.restored, losses

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
        assert (newest.iteration, newest.manifest.label or "trained") == (END, label), f"checkpoint says {newest}"
        with JournalReader(self._run_dir / "journal.db") as journal:
            origins = {row.iteration: row.origin for row in journal.checkpoints() if row.status == "committed"}
        assert origins[END] == label, f"the journal says {origins[END]} of the checkpoint at {END}"

    def _can_die(self) -> bool:
        """What the next life needs is there, and every rank has published the failure's step."""
        progress = read_progress(self._run_dir, self._scene.ranks)
        if not self._commit_of(self._checkpoint).exists() or progress is None or progress.iteration < FAILURE:
            return False
        if not self._shared_memory:
            return True
        states = Arena(run_id(self._run_dir)).list()
        ranks = {state.rank for state in states if state.iteration == self._needed}
        return self._scene.rank in ranks and len(ranks) >= self._scene.local_ranks  # all of this machine


def _digest(adapter: EngineAdapter) -> str:
    """SHA-256 of this rank's weights, optimizer state, buffers and frozen weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(adapter.shard().all_tensors(), key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(bytes_of(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()


def _keep_pace(recovery: CPSRRecovery) -> None:
    """Before a checkpoint is due, let the last be written: steps this short would outrun the disk, and skip it."""
    if recovery.life.saver.is_due(recovery.iteration + 1):
        recovery.life.saver.drain(SAVE_SECONDS)


@dataclass(frozen=True)
class Check:
    """One column of the table.

    Attributes:
        name: of the column.
        run: carries it out on every rank, and raises an exception where it fails.
        cells: names of the cells that it runs with; None for all.
        kills: whether a rank kills itself in it, so that a launcher must restart the job.
        ranks: that it needs.
        deadline_seconds: after which the processes are ended.
    """

    name: str
    run: Callable[[Cell, Scene], object]
    cells: tuple[str, ...] | None = None
    kills: bool = False
    ranks: int = 1
    deadline_seconds: float = DEADLINE_SECONDS


@dataclass(frozen=True)
class Trial:
    """A check of a cell: one place of the table."""

    check: Check
    cell: Cell

    @property
    def name(self) -> str:
        """In one line, as in `deepspeed zero1 bf16 adamw: restart`."""
        return f"{self.cell.name}: {self.check.name}"


# A sharded, a replicated and a partitioned state; on CUDA also two fused implementations of AdamW.
ALONE = "torch fp32 adamw"  # the only rank
DDP = "ddp fp32 adamw"
FSDP2, TP = "fsdp2 bf16 adamw", "tp fp32 adamw"
ZERO1, ZERO3 = "deepspeed zero1 bf16 adamw", "deepspeed zero3 fp32 adamw"
ON_CUDA = ("ddp fp32 adamw-fused", "deepspeed zero1 bf16 fused")
RETURNING = (ALONE, DDP, FSDP2, TP, ZERO1, ZERO3)
CHECKS = (
    Check("restart", check_restart),
    Check("memory", partial(check_exact, "memory"), (*RETURNING, *ON_CUDA), kills=True),
    Check("replay", partial(check_exact, "replay"), RETURNING, kills=True),
    Check("disk", partial(check_exact, "disk"), RETURNING, kills=True),
    Check("dump", check_dump, (DDP, FSDP2, ZERO1, *ON_CUDA), kills=True, ranks=2),
    Check("predict", check_prediction, (ALONE, FSDP2, TP, ZERO1, ZERO3, *ON_CUDA), kills=True),
)


def trials_of(device: str, only: str, ranks: int, stages_can_send: bool) -> list[Trial]:
    """All places of the table, in the order in which they run: within a process first, then kills, pipelines last.

    Args:
        device: `cpu` or `cuda`.
        only: text that the names of the trials contain.
        ranks: of the job.
        stages_can_send: see `cells_of`.
    """
    trials = [
        Trial(check, cell)
        for cell in cells_of(device, ranks, stages_can_send)
        for check in CHECKS
        if (check.cells is None or cell.name in check.cells) and check.ranks <= ranks
    ]
    found = [trial for trial in trials if only in trial.name]
    return sorted(found, key=lambda trial: (trial.cell.engine == "pipeline", trial.check.kills))
