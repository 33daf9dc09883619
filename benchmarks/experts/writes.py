"""What a checkpoint costs ranks that hold the same: each writes all of it, or a share of it."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from cpsr.benchmarks.experts.followed import rank_budget
from cpsr.benchmarks.experts.names import ADAPTIVE, EACH, EQUAL
from cpsr.benchmarks.experts.policies import IN_TURN, POLICIES
from cpsr.benchmarks.experts.training import Training
from cpsr.benchmarks.experts.unsaved import UnsavedTokens
from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.write_assignment import WriteAssignment
from cpsr.config import CheckpointConfig
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.popularity import Popularity
from cpsr.experts.units import unit_name, units_of
from cpsr.ranks.group import Group

__all__ = ["measure_writes"]

TIMEOUT_SECONDS = 120.0  # of the other ranks, for a commit


@dataclass(frozen=True)
class _Cost:
    """One checkpoint: of each rank in turn.

    Attributes:
        written_bytes: new ones.
        write_seconds: to durable files that were read back.
    """

    written_bytes: list[int]
    write_seconds: list[float]


class _Writer:
    """One way: its own run directory, and its own chain of sparse checkpoints there.

    Args:
        training: whose state is written.
        pool: of host buffers.
        group: all ranks.
        run_dir: on the disk that is measured.
        writes: who writes what; None: each all of its own.
        adaptive: by what experts each has to write.
    """

    def __init__(
        self,
        training: Training,
        pool: SnapshotPool,
        group: Group,
        run_dir: Path,
        writes: WriteAssignment | None,
        *,
        adaptive: bool,
    ) -> None:
        self._training = training
        self._pool = pool
        self._group = group
        self._writes = writes
        self._adaptive = adaptive
        self._store = CheckpointStore(run_dir, group.rank, group.size, "writes", 1)
        if group.rank == 0:
            self._store.prepare()
        group.barrier()

    def save(self, iteration: int, units: Mapping[str, str], chosen: frozenset[str] | None) -> _Cost:
        """One checkpoint of these experts; None: all of them."""
        shard = self._training.adapter.shard()
        saved = frozenset(name for name, unit in units.items() if chosen is None or unit in chosen)
        contents = Contents.sparse(frozenset(units), saved)
        if self._writes is not None:
            # Where it is not adaptive, as if no rank had an expert to write.
            writers = self._writes.writers(chosen if self._adaptive else frozenset())
            contents = replace(contents, writers=writers, replicated=self._writes.replicated)
        self._group.barrier()
        begun = self._pool.begin(shard, iteration, None, contents)
        snapshot = self._pool.finish()
        assert begun is snapshot is not None  # the one before was released
        self._group.barrier()
        written = self._store.write(snapshot)
        self._pool.release(snapshot)
        if self._group.rank == 0:
            assert self._store.commit(iteration, TIMEOUT_SECONDS, Event()).committed
            self._store.retain(CheckpointConfig(history_span_iterations=0, history_min_checkpoints=2))
        costs = self._group.gather([written.bytes, written.seconds])
        return _Cost(*(list(column) for column in zip(*costs, strict=True)))


def measure_writes(training: Training, rounds: int, experts_per_layer: int, directory: Path) -> dict[str, Any]:
    """The same checkpoints of the same training by every way, side by side.

    Args:
        training: anywhere; one iteration is trained between two rounds.
        rounds: checkpoints by each way that are measured, with K experts of each layer in turn; a first one by each,
            with all experts, is not.
        experts_per_layer: K.
        directory: on the disk that is measured; emptied again.

    Returns:
        Plain data, the same on each rank: `rounds`, by way; `non_expert_bytes` and `state_bytes` of a rank.
    """
    group, shard = Group(), training.adapter.shard()
    units = units_of(training.operators, shard)
    pool = SnapshotPool(shard, buffers=1)
    writes = WriteAssignment.of(shard, units, training.adapter.data_parallel_ranks, group)
    try:
        ways = {
            way: _Writer(
                training,
                pool,
                group,
                directory / way.replace(" ", "-"),
                None if way == EACH else writes,
                adaptive=way == ADAPTIVE,
            )
            for way in (EACH, EQUAL, ADAPTIVE)
        }
        policy, ledger = POLICIES[IN_TURN](training.layers), UnsavedTokens(training.layers)
        popularity = Popularity(ledger.tokens, ledger.tokens, ledger.ages)
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(1 + rounds):
            training.step()
            operators = policy.select(number, popularity, rank_budget(training, experts_per_layer))
            chosen = frozenset(unit_name(one) for one in operators if isinstance(one, Expert)) if number else None
            order = list(ways)
            for way in order[number % len(order) :] + order[: number % len(order)]:
                cost = ways[way].save(training.iteration, units, chosen)
                if number:
                    found[way].append(asdict(cost))
    finally:
        pool.close()
        group.barrier()
        group.close()
        if group.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
    return {"rounds": found, "non_expert_bytes": training.non_expert_bytes, "state_bytes": shard.state_bytes}
