"""The losses of runs that were really trained, with the second moments that show their phases."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.harness.files import open_tensors, read_json
from cpsr.benchmarks.recovery.trajectory import SEGMENT_ITERATIONS, VALIDATION_ITERATIONS
from cpsr.errors import CPSRError
from cpsr.journal.reader import JournalReader

__all__ = ["RunLosses", "read_runs"]

MOMENTS = "exp_avg_sq/"


@dataclass(frozen=True)
class RunLosses:
    """One loss curve of one run.

    Attributes:
        run: name of the run.
        kind: `training` for the losses of single batches, `validation` for always the same data.
        iterations: `(points,)` ascending.
        losses: `(points,)` in nats, finite and positive.
        left_out: losses that were not.
        mean_exp_avg_sq: by iteration, where the run kept them.
        phases: first and last iteration, and what ended them, of those that the run itself recorded.
    """

    run: str
    kind: str
    iterations: NDArray[numpy.int64]
    losses: NDArray[numpy.float64]
    left_out: int
    mean_exp_avg_sq: dict[int, float] = field(default_factory=dict)
    phases: tuple[tuple[int, int, str], ...] = ()


def read_runs(directory: Path) -> list[RunLosses]:
    """The curves of a run directory (from its journal), or of a run that the recovery benchmark keeps.

    Raises:
        CPSRError: the directory is neither, or is damaged.
    """
    if read_json(directory / "identity.json") is not None:
        return _from_segments(directory)
    with JournalReader(directory / "journal.db") as journal:
        steps = [step for step in journal.losses() if step.applied and step.loss is not None]
        phases = tuple((row.first_iteration, row.last_iteration, row.ended_by) for row in journal.phases())
    iterations, losses = numpy.array([step.iteration for step in steps]), numpy.array([step.loss for step in steps])
    usable = _usable(losses)
    return [
        RunLosses(
            run="/".join(directory.resolve().parts[-2:]),
            kind="training",
            iterations=iterations[usable],
            losses=losses[usable],
            left_out=int((~usable).sum()),
            phases=phases,
        )
    ]


def _from_segments(directory: Path) -> list[RunLosses]:
    training, validation, moments, end = [], [], {}, 0
    for end, path in _segments(directory):
        with open_tensors(path) as file:
            training.append(file.get_tensor("training").numpy())
            validation.append(file.get_tensor("validation").numpy().mean(axis=1))
            values = [file.get_tensor(key).double() for key in list(file.keys()) if key.startswith(MOMENTS)]
        moments[end] = float(sum(value.sum() for value in values)) / sum(value.numel() for value in values)
    if not end:
        raise CPSRError(f"{directory} has no segment of a run yet; `cpsr bench recovery` trains them")
    curves = []
    for kind, step, parts in (("training", 1, training), ("validation", VALIDATION_ITERATIONS, validation)):
        iterations, losses = numpy.arange(step, end + 1, step), numpy.concatenate(parts)
        usable, name = _usable(losses), directory.name.rpartition("-")[0]
        curves.append(
            RunLosses(name, kind, iterations[usable], losses[usable], int((~usable).sum()), mean_exp_avg_sq=moments)
        )
    return curves


def _segments(directory: Path) -> Iterator[tuple[int, Path]]:
    """Whole segments from the beginning to the first that is missing, with the iterations at which they end."""
    end = SEGMENT_ITERATIONS
    while (path := directory / f"segment-{end:05d}.safetensors").exists():
        yield end, path
        end += SEGMENT_ITERATIONS


def _usable(losses: NDArray[numpy.float64]) -> NDArray[numpy.bool_]:
    return numpy.isfinite(losses) & (losses > 0)
