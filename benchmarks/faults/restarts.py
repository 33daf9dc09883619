"""Errors of the file system at every call with which a restart reads, on as many ranks as before or on others."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cpsr.benchmarks.faults.job import COMMITTED, RANKS, RUN_ID, open_run, same_bits, scalars_of, shard_of, write_run
from cpsr.benchmarks.faults.oracle import FOREIGN, is_right
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.saves import LIFE
from cpsr.benchmarks.faults.stage import Gate, Stage
from cpsr.benchmarks.faults.tracing import READING, Call
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.checkpoint.store import CheckpointStore
from cpsr.elastic.resharded_load import load_tensors
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["ERRORS", "restart", "restart_resharded", "restart_under"]

# A bad sector, no more file descriptors, and a call that a signal came between.
ERRORS = ("EIO", "EMFILE", "EINTR")
CALLS = ("openat", *READING)
RANKS_NOW = 3  # of a restart on another number of ranks


def restart_under(
    error: str,
    directory: Path,
    every: int = 1,
    prepare: Callable[[Path], None] = write_run,
    work: Callable[[Path, Gate], None] | None = None,
) -> Iterator[Outcome]:
    """Let one call of a restart fail: it loads the right state or refuses, and the next restart finds everything.

    Raises:
        CPSRError: strace is absent.
    """
    stage, work = Stage(directory, prepare), work or restart
    stage.traced(work, reading=True)
    for call in [call for call in stage.calls() if call.name in CALLS and _can_fail(error, call)][::every]:
        status, notes = stage.traced(work, [f"{call.name}:error={error}:when={call.number}"], reading=True)
        yield _judged(stage, error, call, status, notes)
    stage.clear()


def _can_fail(error: str, call: Call) -> bool:
    return error != "EMFILE" or call.name == "openat"


def restart(run_dir: Path, gate: Gate) -> None:
    """What a new life does before it trains: the newest checkpoint that loads, older ones where one is refused."""
    shards = [shard_of(rank, FOREIGN) for rank in range(RANKS)]

    def right(rank: int, iteration: int, scalars: Any) -> bool:
        return is_right(rank, iteration, shards[rank], scalars)

    _restart(gate, open_run(run_dir, LIFE), shards, right)


def restart_resharded(run_dir: Path, gate: Gate) -> None:
    """What a life of three ranks does before it trains on a run of two."""
    shards = [_part(rank, FOREIGN) for rank in range(RANKS_NOW)]

    def right(rank: int, iteration: int, scalars: Any) -> bool:
        return same_bits(shards[rank], _part(rank, iteration)) and bool(scalars == scalars_of(iteration))

    _restart(gate, [_store(run_dir, rank) for rank in range(RANKS_NOW)], shards, right)


def _restart(
    gate: Gate, stores: Sequence[CheckpointStore], shards: Sequence[Shard], right: Callable[[int, int, Any], bool]
) -> None:
    gate.wait()
    try:
        stores[0].prepare()
        newest = stores[0].catalogue()[-1].iteration
        scalars = [store.load(newest, shard) for store, shard in zip(stores, shards, strict=True)]
    except (CPSRError, OSError) as error:
        gate.note(refused=f"{type(error).__name__}: {error}")
        return
    gate.note(newest=newest, equal=all(right(rank, newest, found) for rank, found in enumerate(scalars)))


def _judged(stage: Stage, error: str, call: Call, status: int, notes: dict[str, object]) -> Outcome:
    scenario = f"restart: {error}"
    if not stage.injected():
        return Outcome(scenario, str(call), False, False, False, 0.0, "the restart ended before that call")
    wrong = []
    if status != 0:
        wrong.append(f"the restart ended with status {status}")
    verdict = stage.judged(COMMITTED[-1:], COMMITTED)
    equal = verdict.state_equal and notes.get("equal", True) is True
    ending = str(notes.get("refused", f"restored {notes.get('newest')}"))
    what = "; ".join([*wrong, verdict.what, ending]) if wrong or verdict.what else ending
    return Outcome(scenario, str(call), True, not wrong and verdict.survived, equal, verdict.seconds, what)


def _store(run_dir: Path, rank: int) -> CheckpointStore:
    store = CheckpointStore(run_dir, rank, RANKS_NOW, RUN_ID, LIFE)

    def reshard(saved: SavedCheckpoint, into: Shard) -> Any:
        load_tensors(saved, rank % RANKS, into)
        return saved.small_state(rank % RANKS)

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
