"""Run directories with checkpoints of several ranks, written by the store itself, without an engine."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.shard import OperatorState, ParamSlice, Shard

RUN_ID = "made"
SCALARS: dict[str, Any] = {
    "origin": "trained",
    "engine": {
        "counters": {"global_steps": 50, "global_samples": 400, "skipped_steps": 0},
        "param_groups": [{"lr": 0.1}],
        "optimizer_steps": [{"step": 50.0}],
        "schedule": [],
        "loss_scale": {},
    },
}


def write_identity(run_dir: Path, **changes: Any) -> None:
    """`run.json` of a DeepSpeed run; `changes` to its keys, or to those of its module."""
    module: dict[str, Any] = {"aliases": {}, "transient": [], "frozen": {}, "strides": {}, "extra": []}
    identity = {
        "run_id": RUN_ID,
        "world_size": 1,
        "engine": "DeepSpeedEngine",
        "zero_stage": 1,
        "precision": "fp32",
        "optimizer": "AdamW",
        "module": module,
    }
    for key, value in changes.items():
        (module if key in module else identity)[key] = value
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "run.json").write_text(json.dumps(identity))


def operator(
    name: str,
    values: torch.Tensor,
    shape: Sequence[int],
    offset: int = 0,
    moments: Sequence[str] = (),
    block: tuple[int, ...] | None = None,
) -> OperatorState:
    kept = {key: values + 1 + index for index, key in enumerate(moments or ("exp_avg", "exp_avg_sq"))}
    return OperatorState(name, ParamSlice(values, tuple(shape), offset, block), kept, 50)


def shard(*operators: OperatorState, **others: torch.Tensor) -> Shard:
    return Shard({item.name: item for item in operators}, others)


def write_checkpoint(run_dir: Path, *shards: Shard, iteration: int = 50, **store_options: Any) -> Path:
    """One committed checkpoint, a shard for each rank; its directory."""
    stores = [CheckpointStore(run_dir, rank, len(shards), RUN_ID, 1) for rank in range(len(shards))]
    stores[0].prepare()
    for store, part in zip(stores, shards, strict=True):
        store.write(Snapshot(iteration, part, SCALARS, **store_options))
    assert stores[0].commit(iteration, 5.0, threading.Event()).committed
    return stores[0].directory / f"step-{iteration:010d}"
