"""One rank that saves its part of a state, or loads it on another number of ranks, by CPSR or by torch's DCP."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.benchmarks.reshard.values import (
    KINDS,
    MOMENTS,
    fill,
    forget_files,
    holds,
    measured,
    parameter_shapes,
)
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.saved import SavedCheckpoint
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import read_manifest
from cpsr.elastic.resharded_load import load_tensors
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["main"]

ITERATION = 10
COMMIT_SECONDS = 600.0


def main(run_dir: Path, place: str, work: str, width: int, layers: int) -> dict[str, Any] | None:
    """Do one piece of work.

    Args:
        run_dir: of the job, for its meeting.
        place: directory of the checkpoints.
        work: `save`; or `cpsr` or `dcp`: load what `save` has left there.
        width: of the model.
        layers: of it.

    Returns:
        Of a load what `measured` finds, whose values it compares.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    join_ranks(run_dir)
    shapes = parameter_shapes(width, layers)
    if work == "save":
        _save(Path(place), shapes)
        return None
    return measured(_by_cpsr(Path(place), shapes) if work == "cpsr" else _by_dcp(Path(place), shapes))


def _slices(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    """This rank's ranges, of all parameters in one flat tensor, as ZeRO cuts it."""
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    length = -(-total // dist.get_world_size())
    first, place = dist.get_rank() * length, 0
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        start, stop = max(0, first - place), min(numel, first + length - place)
        if start < stop:
            yield name, start, stop
        place += numel


def _shard(shapes: dict[str, tuple[int, ...]], *, filled: bool) -> Shard:
    operators = {}
    for name, start, stop in _slices(shapes):
        values = [_tensor(kind, name, start, stop, filled=filled) for kind in range(KINDS)]
        moments = dict(zip(MOMENTS, values[1:], strict=True))
        operators[name] = OperatorState(name, ParamSlice(values[0], shapes[name], start), moments, ITERATION)
    return Shard(operators)


def _tensor(kind: int, name: str, start: int, stop: int, *, filled: bool) -> torch.Tensor:
    blank = torch.full((stop - start,), -1.0)  # touched, so that the memory is there
    return fill(blank, kind, name, start) if filled else blank


def _save(place: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = CheckpointStore(place / "cpsr", rank, ranks, "bench", 1)
    if rank == 0:
        store.prepare()
    dist.barrier()
    store.write(Snapshot(ITERATION, _shard(shapes, filled=True), {"rank": rank}))
    if rank == 0 and not store.commit(ITERATION, COMMIT_SECONDS, threading.Event()).committed:
        raise CPSRError("the checkpoint was not committed")
    gc.collect()
    dist.barrier()
    save(_tensors(shapes, filled=True), checkpoint_id=place / "dcp")
    forget_files(place)


def _tensors(shapes: dict[str, tuple[int, ...]], *, filled: bool) -> dict[str, Any]:
    """The same state as DTensors, split by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        first, last, inner = _rows(shape)
        for kind in range(KINDS):
            local = _tensor(kind, name, first * inner, last * inner, filled=filled).view(last - first, *shape[1:])
            stride = torch.empty(shape, device="meta").stride()
            found[f"{kind}.{name}"] = DTensor.from_local(
                local, mesh, [Rows(0)], shape=torch.Size(shape), stride=stride, run_check=False
            )
    return found


def _rows(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """This rank's first row of a parameter, the one after its last, and the elements of a row."""
    length = -(-shape[0] // dist.get_world_size())
    first = min(shape[0], dist.get_rank() * length)
    return first, min(shape[0], first + length), torch.Size(shape[1:]).numel()


def _by_cpsr(place: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    directory = place / "cpsr" / "checkpoints" / step_name(ITERATION)
    into = _shard(shapes, filled=False)
    yield sum(one.state_bytes for one in into.operators.values()), place / "cpsr"
    manifest = read_manifest(directory)
    if manifest.world_size == dist.get_world_size():
        store = CheckpointStore(place / "cpsr", dist.get_rank(), manifest.world_size, "bench", 1)
        store.load(ITERATION, into)
        disk = sum(file.bytes for file in manifest.ranks[dist.get_rank()].files.values())
    else:
        disk = load_tensors(SavedCheckpoint(directory, manifest), dist.get_rank() % manifest.world_size, into)
    yield disk
    yield all(
        holds(values, kind, name, one.parameter.offset)
        for name, one in into.operators.items()
        for kind, values in enumerate((one.parameter.values, *(one.moments[key] for key in MOMENTS)))
    )


def _by_dcp(place: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    tensors = _tensors(shapes, filled=False)
    yield sum(one.to_local().nbytes for one in tensors.values()), place / "dcp"
    load(tensors, checkpoint_id=place / "dcp")
    yield 0
    for name, shape in shapes.items():
        first, _, inner = _rows(shape)
        parts = [tensors[f"{kind}.{name}"].to_local() for kind in range(KINDS)]
        if not all(holds(part, kind, name, first * inner) for kind, part in enumerate(parts)):
            yield False
    yield True
