"""`cpsr bench network`: pretrain the predictor's network on the prior's runs; `bench recovery` judges it."""

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from cpsr.benchmarks.harness.files import write_tensors
from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.prior import CACHE, RUNS, PriorRun
from cpsr.predictor.network import SHAPES
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import MAX_SNAPSHOTS, OperatorMotion
from cpsr.predictor.training import Head, Windows, windows
from cpsr.predictor.weight_pieces import gram

__all__ = ["initial_parameters", "main"]

INTERVALS = (20, 50)  # between the checkpoints that the network sees
HISTORY_ITERATIONS = 400  # as many as a run keeps, see `cpsr.checkpoint.catalogue`
APART_ITERATIONS = 100  # windows of one run to train on: closer ones show the same motion
STEPS = 1_000  # the cosine on tasks that were left out rises no more after that
SEED = 0
START_SEED = 20_261_121
GPT_RUNS = tuple(run for run in RUNS if run.family.startswith("gpt"))  # those that the shipped network has seen

# Windows as they go from one process to another: each tensor of torch's would take a file descriptor.
_Sent = tuple[tuple[HistoryEntry, ...], NDArray[numpy.float32], NDArray[numpy.float32]]


def main(
    weights: Path,
    cache: Path | None = None,
    workers: int | None = None,
    *,
    runs: Sequence[PriorRun] = GPT_RUNS,
) -> None:
    """Pretrain a network on the GPTs among the runs of the prior, and write its weights.

    `runs` are trained on.

    Raises:
        CPSRError: the cache is damaged.
    """
    cache = cache or CACHE
    cache.mkdir(parents=True, exist_ok=True)
    with (
        measuring("network", None, place=cache, timed=False) as call,
        Workers(workers or default_workers()) as pool,
    ):
        reading = call.progress.add_task("runs read", total=len(runs))
        taken = _windows_of_all(runs, cache, pool, lambda done: call.progress.update(reading, completed=done))
        head = _pretrained([window for run in runs for window in taken[run]])
        source = {"source": json.dumps(_source(taken))}
        write_tensors(weights, {"parameters": head.parameters.detach()}, source)
        call.console.print(f"weights: {weights}; their worth: cpsr bench recovery --methods predicted,predicted-line")


def _source(taken: Mapping[PriorRun, Sequence[Windows]]) -> dict[str, Any]:
    """What a network was pretrained on."""
    return {
        "made_by": "cpsr bench network",
        "target": "later motion",
        "runs": {run.workload.name: run.seed for run in taken},
        "intervals": list(INTERVALS),
        "windows": sum(map(len, taken.values())),
        "steps": STEPS,
        "seed": SEED,
    }


def _windows_of_all(
    runs: Sequence[PriorRun], cache: Path, workers: Workers, tick: Callable[[int], None]
) -> dict[PriorRun, list[Windows]]:
    """Windows of every run to train on; what is missing in the cache is trained."""
    found = workers.each(_windows_of, [(run, cache) for run in runs], tick)
    return {
        run: [
            Windows(points, torch.from_numpy(products), torch.from_numpy(weights)) for points, products, weights in sent
        ]
        for run, sent in zip(runs, found, strict=True)
    }


def _pretrained(taken: Sequence[Windows]) -> Head:
    """A network trained on windows of many runs; the same windows give the same network."""
    head = Head.of(initial_parameters(torch.Generator(device="cpu").manual_seed(START_SEED)))
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    for _ in range(STEPS):
        place = int(torch.randint(len(taken), (1,), generator=generator, device="cpu"))
        head = head.trained(taken[place], generator)
    return head


def initial_parameters(generator: torch.Generator) -> torch.Tensor:
    """Weights of an untrained network, `(PARAMETERS,)` float32: its directions are exactly the line's."""
    pieces = []
    for name, shape in SHAPES.items():
        piece = torch.zeros(shape, dtype=torch.float32, device="cpu")
        if "norm" in name:
            piece[0] = 1.0
        elif not name.endswith("bias") and name != "head.weight":
            piece = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / math.sqrt(shape[-1])
        pieces.append(piece.flatten())
    return torch.cat(pieces)


def _windows_of(asked: tuple[PriorRun, Path]) -> list[_Sent]:
    """What a running job learns from at its checkpoints, every 100 iterations."""
    run, cache = asked
    history = run.in_cache(cache).trajectory().history(run.workload.iterations, math.gcd(*INTERVALS))
    motions = {
        name: OperatorMotion(history.numel(name), history.entries, gram(history, name)) for name in history.operators
    }
    found: list[Windows] = []
    for interval in INTERVALS:
        for at in range(APART_ITERATIONS, run.workload.iterations + 1, APART_ITERATIONS):
            newest = at - at % interval
            oldest = max(interval, newest - HISTORY_ITERATIONS // interval * interval)
            seen = list(range(oldest, newest + 1, interval))[-MAX_SNAPSHOTS:]
            taken = _drained(windows(_between(motions, seen))) if len(seen) > 1 else None
            found += [] if taken is None else [taken]
    return [(one.points, one.products.numpy(), one.weights.numpy()) for one in found]


def _between(motions: Mapping[str, OperatorMotion], iterations: Sequence[int]) -> dict[str, OperatorMotion]:
    found = {}
    for name, motion in motions.items():
        products = motion.between(iterations)
        assert products is not None  # intervals are multiples of the snapshots'
        points = tuple(point for point in motion.points if point.iteration in set(iterations))
        found[name] = OperatorMotion(motion.numel, points, products)
    return found


def _drained(work: Generator[None, None, Windows | None]) -> Windows | None:
    while True:
        try:
            next(work)
        except StopIteration as ended:
            found: Windows | None = ended.value
            return found
