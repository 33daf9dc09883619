"""The run directory of many ranks with tiny shards, as the product writes it, on one machine."""

import os
import threading
from pathlib import Path

import torch

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.commit import Attempt
from cpsr.checkpoint.host_snapshot import Snapshot
from cpsr.checkpoint.manifest import SLABS, RankManifest, Save, rank_manifest_name, step_name
from cpsr.checkpoint.progress import ProgressCounter, progress_path
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.ranks.board import Board
from cpsr.ranks.heartbeat import Heartbeat, HeartbeatFiles
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["INTERVAL_ITERATIONS", "LIFE", "RANKS_PER_MACHINE", "RUN", "SimulatedRun", "shard_of", "snapshot_of"]

RANKS_PER_MACHINE = 8
INTERVAL_ITERATIONS = 20
RUN, LIFE = "scale", 0
ELEMENTS = 16  # of an operator on each rank
OPERATORS = 4
COMMIT_SECONDS = 600.0


def shard_of(rank: int, ranks: int, iteration: int = 0) -> Shard:
    """A rank's slices of a small model, as ZeRO splits it."""
    operators = {}
    for index in range(OPERATORS):
        name = f"layers.{index}.weight"
        values, first, second = (torch.full((ELEMENTS,), float(rank + kind)) for kind in range(3))
        parameter = ParamSlice(values, (ranks * ELEMENTS,), rank * ELEMENTS)
        operators[name] = OperatorState(name, parameter, {"exp_avg": first, "exp_avg_sq": second}, iteration)
    return Shard(operators)


def snapshot_of(rank: int, ranks: int, iteration: int) -> Snapshot:
    """A rank's state at an iteration, with the scalars that readers ask for."""
    scalars = {"cumulative_learning_rate": iteration * 1e-3, "learning_rate": 1e-3, "rng": torch.arange(64)}
    return Snapshot(iteration, shard_of(rank, ranks, iteration), scalars)


class SimulatedRun:
    """A run of so many ranks.

    The product's writer writes every rank's part of the first checkpoint. Parts of later ones are links to the same
    slabs, and manifests with other names, so that 4,096 ranks need no hour.

    Args:
        run_dir: of the run; empty.
        ranks: their number.

    Attributes:
        store: of rank 0.
        iteration: the newest checkpoint with every rank's part.
        machines: the ranks of each, by its first.
    """

    def __init__(self, run_dir: Path, ranks: int) -> None:
        self.run_dir, self.ranks = run_dir, ranks
        self.store = self.store_of(0)
        HeartbeatFiles(run_dir, LIFE).claim()
        self.store.prepare()
        self.iteration = INTERVAL_ITERATIONS
        for rank in range(ranks):
            ProgressCounter(progress_path(run_dir, rank)).publish(INTERVAL_ITERATIONS, INTERVAL_ITERATIONS)
            self.store_of(rank).write(snapshot_of(rank, ranks, self.iteration))
        self._first = self._parts()
        self.machines = {
            first: range(first, min(first + RANKS_PER_MACHINE, ranks)) for first in range(0, ranks, RANKS_PER_MACHINE)
        }
        self.beat(1)

    def store_of(self, rank: int) -> CheckpointStore:
        """One rank's side of the checkpoints."""
        return CheckpointStore(self.run_dir, rank, self.ranks, RUN, LIFE)

    def beat(self, number: int) -> None:
        """A heartbeat of every rank, in the files of their machines."""
        beat = Heartbeat(number, number).to_bytes()
        for machine, ranks in self.machines.items():
            HeartbeatFiles(self.run_dir, LIFE).write(machine, beat * len(ranks), first=True)

    def boards(self, machine: int) -> list[Board]:
        """The board of one machine, as its ranks see it."""
        leaders = [first for first, ranks in self.machines.items() for _ in ranks]
        shared = Board.create(self.ranks)
        return [Board(rank, leaders, shared) for rank in self.machines[machine]]

    def commit(self) -> None:
        """As rank 0's writer, once its own part is written."""
        if not self.store.commit(self.iteration, COMMIT_SECONDS, threading.Event()).committed:
            raise CPSRError(f"checkpoint {self.iteration} of {self.ranks} simulated ranks was not committed")

    def retain(self) -> None:
        """As rank 0's writer, after a commit."""
        self.store.retain(Retention())

    def save_next(self) -> None:
        """Every rank's part of another checkpoint."""
        self.iteration += INTERVAL_ITERATIONS
        save = Save(self.iteration, LIFE, 0)
        directory = Attempt(self.store.directory / step_name(self.iteration), RUN, save, self.ranks).directory
        directory.mkdir()
        slabs = self.store.directory / SLABS
        for first in self._first:
            names = {name: name.replace(first.save.word, save.word) for name in first.files}
            for before, after in names.items():
                os.link(self.run_dir / before, slabs / after)
            operators = {
                name: one.model_copy(update={"iteration": self.iteration}) for name, one in first.operators.items()
            }
            files = {names[name]: file for name, file in first.files.items()}
            update = {"iteration": self.iteration, "files": files, "operators": operators}
            path = directory / rank_manifest_name(first.rank, save)
            path.write_bytes(first.model_copy(update=update).to_bytes())

    def _parts(self) -> list[RankManifest]:
        """Manifests of the first checkpoint; its slabs keep another name, so that retention leaves them."""
        directory = self.store.directory / step_name(self.iteration)
        save = Save(self.iteration, LIFE, 0)
        parts = [
            RankManifest.parse((directory / rank_manifest_name(rank, save)).read_bytes()) for rank in range(self.ranks)
        ]
        for part in parts:
            for name in part.files:
                os.link(self.store.directory / SLABS / name, self.run_dir / name)
        return parts
