"""The state that is saved and loaded: GPT-2's parameters, with values that are found again by their place."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from cpsr.benchmarks.harness.processes import status_bytes
from cpsr.errors import CPSRError

__all__ = ["KINDS", "MOMENTS", "fill", "forget_files", "holds", "measured", "parameter_shapes"]

VOCABULARY, CONTEXT, MLP = 50_257, 1_024, 4  # GPT-2's
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = 1 + len(MOMENTS)  # of values of a parameter
PERIOD = 65_521  # of the values; float32 holds them exactly


def parameter_shapes(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a GPT-2 of this size, by name."""
    return dict(_shapes(width, layers))


def _shapes(width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte", (VOCABULARY, width)
    yield "wpe", (CONTEXT, width)
    for layer in range(layers):
        for name, rows, columns in (("attn", 3, 1), ("proj", 1, 1), ("fc", MLP, 1), ("out", 1, MLP)):
            yield f"h.{layer}.{name}.weight", (rows * width, columns * width)
            yield f"h.{layer}.{name}.bias", (rows * width,)
        for name in ("ln_1", "ln_2"):
            yield f"h.{layer}.{name}.weight", (width,)
            yield f"h.{layer}.{name}.bias", (width,)


def fill(into: torch.Tensor, kind: int, name: str, start: int) -> torch.Tensor:
    """Write the values of a range of a parameter.

    Args:
        into: contiguous float32, which is filled.
        kind: 0 for the weights, then the moments.
        name: of the parameter.
        start: first element of the range in the whole parameter.

    Returns:
        `into`.
    """
    for part, values in _parts(into, kind, name, start):
        part.copy_(values)
    return into


def holds(found: torch.Tensor, kind: int, name: str, start: int) -> bool:
    """Whether a contiguous tensor holds what `fill` writes there."""
    return all(torch.equal(part, values.expand_as(part)) for part, values in _parts(found, kind, name, start))


def _parts(whole: torch.Tensor, kind: int, name: str, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The periods of a tensor as rows, and their values; then the rest that is shorter."""
    first = start + 7 * kind + 131 * len(name)
    values = ((torch.arange(first, first + PERIOD) % PERIOD) * (kind + 1)).float()
    flat = whole.view(-1)
    periods, rest = divmod(flat.numel(), PERIOD)
    yield flat[: periods * PERIOD].view(periods, PERIOD), values
    yield flat[periods * PERIOD :], values[:rest]


def measured(steps: Iterator[Any]) -> dict[str, Any]:
    """Time one load.

    Args:
        steps: yields three times: the bytes of this rank's part, and the directory that it reads; after the load the
            bytes that it read; then whether the values are those that were saved.

    Returns:
        `seconds` from the barrier on, `disk_bytes`, the `part_bytes`, and the `peak_bytes` of memory beside them.

    Raises:
        CPSRError: a value is wrong.
    """
    part_bytes, place = next(steps)
    if dist.get_rank() == 0:
        forget_files(place)
    gc.collect()
    dist.barrier()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here on
    started = perf_counter()
    disk_bytes = next(steps)
    seconds = perf_counter() - started
    peak = status_bytes("VmHWM") - before
    if not next(steps):
        raise CPSRError(f"rank {dist.get_rank()} has loaded other values than were saved")
    return {"seconds": seconds, "disk_bytes": disk_bytes, "part_bytes": part_bytes, "peak_bytes": peak}


def forget_files(place: Path) -> None:
    """Take the files out of the page cache: a restart meets a cold one."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
