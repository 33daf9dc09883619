"""One rank that saves its part of a state, or loads it on another number of ranks, by CPSR or by torch's DCP."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows

from cpsr.benchmarks.harness.ranks import join_ranks
from cpsr.checkpoint.manifest import step_name
from cpsr.checkpoint.resharding import load_resharded
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.verify import read_manifest
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["main"]

VOCABULARY, CONTEXT, MLP = 50_257, 1_024, 4  # GPT-2's
MOMENTS = ("exp_avg", "exp_avg_sq")
ITERATION = 10
COMMIT_SECONDS = 600.0
PERIOD = 65_521  # of the values; float32 holds them exactly


def main(run_dir: Path, place: str, work: str, width: int, layers: int, saved_by: int = 0) -> dict[str, Any] | None:
    """Do one piece of work.

    Args:
        run_dir: of the job, for its meeting.
        place: directory of the checkpoints.
        work: `save`; or `cpsr` or `dcp`: load what `save` has left there.
        width: of the model.
        layers: of it.
        saved_by: ranks that saved.

    Returns:
        Of a load: `seconds` from the barrier on, `disk_bytes`, the `part_bytes` of this rank and the `peak_bytes` of
        memory beside them. Raises CPSRError where a value is wrong.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    join_ranks(run_dir)
    shapes = dict(_shapes(width, layers))
    if work == "save":
        _save(Path(place), shapes)
        return None
    return _measured(_by_cpsr(Path(place), shapes) if work == "cpsr" else _by_dcp(Path(place), shapes))


def _shapes(width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of GPT-2's parameters."""
    yield "wte", (VOCABULARY, width)
    yield "wpe", (CONTEXT, width)
    for layer in range(layers):
        for name, rows, columns in (("attn", 3, 1), ("proj", 1, 1), ("fc", MLP, 1), ("out", 1, MLP)):
            yield f"h.{layer}.{name}.weight", (rows * width, columns * width)
            yield f"h.{layer}.{name}.bias", (rows * width,)
        for name in ("ln_1", "ln_2"):
            yield f"h.{layer}.{name}.weight", (width,)
            yield f"h.{layer}.{name}.bias", (width,)


def _values(kind: int, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements of a whole tensor, by their place."""
    first = start + 7 * kind + 131 * len(name)
    return ((torch.arange(first, first + stop - start) % PERIOD) * (kind + 1)).float()


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


def _shard(shapes: dict[str, tuple[int, ...]], fill: Callable[[int, str, int, int], torch.Tensor]) -> Shard:
    operators = {}
    for name, start, stop in _slices(shapes):
        values = [fill(kind, name, start, stop) for kind in range(1 + len(MOMENTS))]
        moments = dict(zip(MOMENTS, values[1:], strict=True))
        operators[name] = OperatorState(name, ParamSlice(values[0], shapes[name], start), moments, ITERATION)
    return Shard(operators)


def _blank(kind: int, name: str, start: int, stop: int) -> torch.Tensor:
    return torch.full((stop - start,), -1.0)  # touched, so that the memory is there


def _save(place: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = CheckpointStore(place / "cpsr", rank, ranks, "bench", 1)
    if rank == 0:
        store.prepare()
    dist.barrier()
    store.write(Snapshot(ITERATION, _shard(shapes, _values), {"rank": rank}))
    if rank == 0 and not store.commit(ITERATION, COMMIT_SECONDS, threading.Event()).committed:
        raise CPSRError("the checkpoint was not committed")
    gc.collect()
    dist.barrier()
    save(_tensors(shapes, filled=True), checkpoint_id=place / "dcp")
    _forget_files(place)


def _tensors(shapes: dict[str, tuple[int, ...]], *, filled: bool) -> dict[str, Any]:
    """The same state as DTensors, split by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        rows, inner = shape[0], torch.Size(shape[1:]).numel()
        length = -(-rows // dist.get_world_size())
        first = min(rows, dist.get_rank() * length)
        last = min(rows, first + length)
        for kind in range(1 + len(MOMENTS)):
            make = _values if filled else _blank
            local = make(kind, name, first * inner, last * inner).view(last - first, *shape[1:])
            stride = torch.empty(shape, device="meta").stride()
            found[f"{kind}.{name}"] = DTensor.from_local(
                local, mesh, [Rows(0)], shape=torch.Size(shape), stride=stride, run_check=False
            )
    return found


def _forget_files(place: Path) -> None:
    """Take the files out of the page cache: a restart meets a cold one."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _by_cpsr(place: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    directory = place / "cpsr" / "checkpoints" / step_name(ITERATION)
    into = _shard(shapes, _blank)
    yield sum(one.state_bytes for one in into.operators.values()), place / "cpsr"
    manifest = read_manifest(directory)
    if manifest.world_size == dist.get_world_size():
        store = CheckpointStore(place / "cpsr", dist.get_rank(), manifest.world_size, "bench", 1)
        store.load(ITERATION, into)
        disk = sum(size for size in manifest.ranks[dist.get_rank()].files.values())
    else:
        disk = load_resharded(directory, manifest, into).disk
    yield disk
    expected = _shard(shapes, _values)
    yield all(torch.equal(one, other) for (_, one), (_, other) in zip(into.tensors(), expected.tensors(), strict=True))


def _by_dcp(place: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    tensors = _tensors(shapes, filled=False)
    yield sum(one.to_local().nbytes for one in tensors.values()), place / "dcp"
    load(tensors, checkpoint_id=place / "dcp")
    yield 0
    expected = _tensors(shapes, filled=True)
    yield all(torch.equal(one.to_local(), expected[key].to_local()) for key, one in tensors.items())


def _measured(steps: Iterator[Any]) -> dict[str, Any]:
    part_bytes, place = next(steps)
    if dist.get_rank() == 0:
        _forget_files(place)
    gc.collect()
    dist.barrier()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here on
    started = perf_counter()
    disk_bytes = next(steps)
    seconds = perf_counter() - started
    peak = _resident("VmHWM") - before
    if not next(steps):
        raise CPSRError(f"rank {dist.get_rank()} has loaded other values than were saved")
    return {"seconds": seconds, "disk_bytes": disk_bytes, "part_bytes": part_bytes, "peak_bytes": peak}


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
