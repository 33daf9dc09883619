"""A restart of the job on another number of ranks, which reads its parts by ranges."""

from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.faults.forked import Gate
from cpsr.benchmarks.faults.job import RANKS, RUN_ID, same_bits, scalars_of, shard_of
from cpsr.benchmarks.faults.oracle import FOREIGN
from cpsr.benchmarks.faults.saves import LIFE
from cpsr.checkpoint.manifest import Manifest
from cpsr.checkpoint.resharding import load_buffers, load_resharded, read_small_state
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["restart_resharded"]

RANKS_NOW = 3


def restart_resharded(run_dir: Path, gate: Gate) -> None:
    """What a life of three ranks does before it trains on a run of two."""
    stores = [_store(run_dir, rank) for rank in range(RANKS_NOW)]
    shards = [_part(rank, FOREIGN) for rank in range(RANKS_NOW)]
    gate.wait()
    try:
        stores[0].prepare()
        newest = stores[0].catalogue()[-1].iteration
        scalars = [store.load(newest, shard) for store, shard in zip(stores, shards, strict=True)]
    except (CPSRError, OSError) as error:
        gate.note(refused=f"{type(error).__name__}: {error}")
        return
    right = all(same_bits(shards[rank], _part(rank, newest)) for rank in range(RANKS_NOW))
    gate.note(newest=newest, equal=right and all(one == scalars_of(newest) for one in scalars))


def _store(run_dir: Path, rank: int) -> CheckpointStore:
    store = CheckpointStore(run_dir, rank, RANKS_NOW, RUN_ID, LIFE)

    def reshard(directory: Path, manifest: Manifest, into: Shard) -> Any:
        load_resharded(directory, manifest, into)
        load_buffers(directory, manifest, rank % RANKS, into)
        return read_small_state(directory, manifest, rank % RANKS)

    store.reshard = reshard
    return store


def _part(rank: int, iteration: int) -> Shard:
    """A third of each operator, made of the two ranks' halves, and one of their buffers."""
    saved = [shard_of(other, iteration) for other in range(RANKS)]
    operators = {}
    for name, first in saved[0].operators.items():
        parts = [one.operators[name] for one in saved]
        weights = torch.cat([one.parameter.values for one in parts])
        length = -(-len(weights) // RANKS_NOW)
        here = slice(min(len(weights), rank * length), min(len(weights), (rank + 1) * length))
        moments = {key: torch.cat([one.moments[key] for one in parts])[here].clone() for key in first.moments}
        parameter = ParamSlice(weights[here].clone(), first.parameter.global_shape, here.start)
        operators[name] = OperatorState(name, parameter, moments, iteration)
    return Shard(operators, saved[rank % RANKS].others)
