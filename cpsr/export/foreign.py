"""What another tool's checkpoint holds, and the run directory that is made of it."""

import json
import os
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.adoption import imported_identity
from cpsr.checkpoint.files import make_directory, sync_directory, write_bytes
from cpsr.checkpoint.manifest import IMPORTED as LABEL
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.imported_state import IMPORTED
from cpsr.errors import CheckpointError, SaveError
from cpsr.state.scalars import DataPosition, Scalars
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["ForeignParameter", "ForeignState", "write_run"]

COMMIT_SECONDS = 60.0  # all parts are there before the commit begins


@dataclass(frozen=True)
class ForeignParameter:
    """One trained parameter.

    Attributes:
        weights: whole, in the dtype of the authoritative copy.
        moments: the optimizer's tensors of the parameter's shape, by the optimizer's key.
        numbers: what else the optimizer keeps for it, as a step count.
    """

    weights: torch.Tensor
    moments: Mapping[str, torch.Tensor]
    numbers: Mapping[str, float | int]


@dataclass(frozen=True)
class ForeignState:
    """A whole training state.

    Attributes:
        iteration: optimizer steps, skipped ones included.
        parameters: by name, as in the module.
        outside: buffers, frozen parameters, and further names of tied tensors.
        groups: the values of each parameter group of the optimizer, without the parameters.
        group_of: parameter -> its group; empty where only their order is known.
        counters: DeepSpeed's, as far as they are known.
        loss_scale: DeepSpeed's, by attribute.
        grad_scaler: state of torch's gradient scaler; None: there is none.
        schedule: `(state,)` of the learning-rate schedule, None inside where there was none; empty: not known.
    """

    iteration: int
    parameters: Mapping[str, ForeignParameter]
    outside: Mapping[str, torch.Tensor]
    groups: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    grad_scaler: Any = None
    schedule: tuple[Any, ...] = ()


def write_run(state: ForeignState, source: str, run_dir: Path) -> None:
    """Make a run directory with one committed checkpoint: at once, or not at all.

    Args:
        state: the training state.
        source: where it comes from, for people.
        run_dir: not there yet.

    Raises:
        SaveError: it could not be written; nothing is left at `run_dir`.
        UnsupportedEngineError: the schedule or a parameter group holds what is not plain data.
    """
    temporary = run_dir.with_name(f".{run_dir.name}.{os.getpid()}.tmp")
    run_id = uuid.uuid4().hex
    try:
        make_directory(temporary, fsync=True)
        store = CheckpointStore(temporary, 0, 1, run_id, 0, fsync=True)
        store.prepare()
        store.write(Snapshot(state.iteration, _shard(state), _scalars(state).to_tree()))
        result = store.commit(state.iteration, COMMIT_SECONDS, threading.Event())
        if not result.committed:
            raise SaveError(result.reason)
        tensors = {name: list(one.weights.shape) for name, one in state.parameters.items()}
        tensors |= {name: list(one.shape) for name, one in state.outside.items()}
        identity = imported_identity(run_id, source, tensors, sorted(state.outside))
        write_bytes(temporary / "run.json", json.dumps(identity, indent=1).encode("ascii"), fsync=True)
        if os.path.lexists(run_dir):
            raise SaveError(f"{run_dir} has appeared meanwhile; nothing was written over it")
        temporary.rename(run_dir)
        sync_directory(run_dir.parent)
    except (OSError, CheckpointError) as error:
        raise SaveError(f"{run_dir} could not be written ({error}); nothing is left there") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _shard(state: ForeignState) -> Shard:
    operators = {
        name: OperatorState(
            name,
            ParamSlice(_flat(one.weights), tuple(one.weights.shape)),
            {moment: _flat(values) for moment, values in one.moments.items()},
            state.iteration,
        )
        for name, one in state.parameters.items()
    }
    return Shard(operators, {name: one.detach().contiguous() for name, one in state.outside.items()})


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _scalars(state: ForeignState) -> Scalars:
    rates = [float(group["lr"]) for group in state.groups if group.get("lr") is not None]
    rate = sum(rates) / max(1, len(rates))
    engine: dict[str, Any] = {
        "iteration": state.iteration,
        "counters": dict(state.counters),
        "loss_scale": dict(state.loss_scale),
        "grad_scaler": state.grad_scaler,
        "numbers": {name: dict(one.numbers) for name, one in state.parameters.items()},
        "groups": [dict(group) for group in state.groups],
        "group_of": dict(state.group_of),
    }
    if state.schedule:
        engine["schedule"] = state.schedule[0]
    return Scalars(
        iteration=state.iteration,
        cumulative_learning_rate=0.0,  # a history begins here
        learning_rate=rate,
        peak_learning_rate=rate,
        origin=LABEL,
        lineage=[],
        history_start=state.iteration + 1,
        engine={IMPORTED: engine},
        rng={},
        data=DataPosition(),
    )
