"""`cpsr bench network`: pretrain the predictor's network on the prior's runs, and judge it on those left out."""

import hashlib
import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from numpy.typing import NDArray

from cpsr.benchmarks.harness.files import write_tensors
from cpsr.benchmarks.harness.measurement import Measurement, measuring
from cpsr.benchmarks.harness.processes import Workers, default_workers
from cpsr.benchmarks.recovery.prior import CACHE, RUNS, PriorRun
from cpsr.predictor.calibration import WINDOWS_ITERATIONS
from cpsr.predictor.network import MIN_SNAPSHOTS, cosines
from cpsr.predictor.pieces import gram
from cpsr.predictor.protocol import HistoryEntry
from cpsr.predictor.statistics import MAX_SNAPSHOTS, OperatorMotion
from cpsr.predictor.training import MIN_LATER, Examples, Head, Question, Windows, windows

__all__ = ["folds", "main", "mean_cosine"]

INTERVALS = (20, 50)  # between the checkpoints that the network sees
HISTORY_ITERATIONS = 400  # the default of `checkpoint.history_span_iterations`
APART_ITERATIONS = 100  # windows of one run to train on: closer ones show the same motion
STEPS = 1_000  # the cosine on tasks that were left out rises no more after that
SEED = 0
# The motion after a checkpoint is that of the line through the checkpoints of so many iterations, as in training.
LATER_ITERATIONS = (100, 200)
BLOCK_ELEMENTS = 1 << 23  # of differences between all snapshots of a run: 64 MiB
DIGITS = 4

_Result = TypeVar("_Result")
# Windows as they go from one process to another: each tensor of torch's would take a file descriptor.
_Sent = tuple[tuple[HistoryEntry, ...], NDArray[numpy.float32], NDArray[numpy.float32]]


@dataclass(frozen=True)
class Way:
    """A network that is followed along a run.

    Attributes:
        pretrained: on other runs; else it starts at the line.
        updates: on the run itself, at each checkpoint.
    """

    pretrained: bool
    updates: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{'pretrained' if self.pretrained else 'untrained'}, {self.updates} updates a checkpoint"


LINE = "line"
WAYS = (Way(False, 8), Way(True, 0), Way(True, 8), Way(True, 32))


@dataclass(frozen=True)
class Judged:
    """A run at an interval, by networks whose pretraining left out its group.

    Attributes:
        run: name of its workload.
        left_out: the group.
        interval: between checkpoints.
        iterations: of the checkpoints at which directions were asked for.
        cosines: with the later motion, mean over the operators by the distance that they moved; the line's and of each
            way by its name, one for each checkpoint.
    """

    run: str
    left_out: str
    interval: int
    iterations: Sequence[int]
    cosines: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class _Asked:
    run: PriorRun
    left_out: str
    cache: Path
    parameters: NDArray[numpy.float32]


def main(
    cache: Path | None = None,
    weights: Path | None = None,
    json_path: Path | None = None,
    workers: int | None = None,
    *,
    runs: Sequence[PriorRun] = RUNS,
) -> None:
    """Pretrain, judge, print, and write the weights where that is asked for.

    Args:
        cache: keeps the runs; None: `runs/bench-prior`.
        weights: where a network goes that is pretrained on all runs; None: none is.
        json_path: where the figures go.
        workers: processes, of one thread each; None: up to two.
        runs: that are trained on, and judged without their group.

    Raises:
        CPSRError: the cache is damaged.
    """
    cache = cache or CACHE
    cache.mkdir(parents=True, exist_ok=True)
    with (
        measuring("network", json_path, place=cache, timed=False) as call,
        Workers(workers or default_workers()) as pool,
    ):
        reading = call.progress.add_task("runs read", total=len(runs))
        taken = _windows_of_all(runs, cache, pool, lambda done: call.progress.update(reading, completed=done))
        if weights is not None:
            head = _pretrained(_joined(taken, runs))
            source = {"source": json.dumps(_source(taken))}
            write_tensors(weights, {"parameters": head.parameters.detach()}, source)
            call.console.print(f"weights: {weights}")
        left_out = folds(runs)
        heads = {
            name: _pretrained(_joined(taken, [run for run in runs if run not in mine]))
            for name, mine in left_out.items()
        }
        judging = call.progress.add_task("runs judged", total=len(runs))
        found = _judge(left_out, heads, cache, pool, lambda done: call.progress.update(judging, completed=done))
        _show(call, found)
        shipped = {} if weights is None else {"weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
        figures = {"data": _source(taken), **shipped, "judged": [asdict(one) for one in found]}
        call.leave(figures)


def folds(runs: Sequence[PriorRun]) -> dict[str, list[PriorRun]]:
    """The runs that are left out together: those of a group, or of a schedule where all are of one group."""
    by_group = {run.group for run in runs}
    found: dict[str, list[PriorRun]] = {}
    for run in runs:
        found.setdefault(run.group if len(by_group) > 1 else run.workload.schedule, []).append(run)
    return found


def _joined(taken: Mapping[PriorRun, Sequence[Windows]], runs: Sequence[PriorRun]) -> list[Windows]:
    return [window for run in runs for window in taken[run]]


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


def _show(call: Measurement, found: Sequence[Judged]) -> None:
    """Mean cosines by what was left out and by interval, and how far each way is above the line, over groups."""
    groups = list(dict.fromkeys(one.left_out for one in found))
    rows = []
    for way in found[0].cosines:
        parts = [[one for one in found if one.left_out == group] for group in groups]
        parts += [[one for one in found if one.interval == interval] for interval in INTERVALS]
        rows.append((way, *(f"{mean_cosine(part, way):.4f}" for part in parts), _over_line(found, way)))
    call.table(
        "Mean cosine with the motion of the next 100 to 200 iterations",
        ("direction", *groups, *(f"interval {interval}" for interval in INTERVALS), "over the line's"),
        rows,
        caption="each group's runs by a network pretrained on the others; +- the standard error over groups",
    )


def mean_cosine(found: Sequence[Judged], way: str) -> float:
    """Mean over runs and intervals, each the mean of its checkpoints; of at least one."""
    return float(numpy.mean([numpy.mean(one.cosines[way]) for one in found]))


def _over_line(found: Sequence[Judged], way: str) -> str:
    if way == LINE:
        return ""
    by_group: dict[str, list[float]] = {}
    for one in found:
        by_group.setdefault(one.left_out, []).append(mean_cosine([one], way) - mean_cosine([one], LINE))
    means = [float(numpy.mean(values)) for values in by_group.values()]
    error = f" +- {numpy.std(means, ddof=1) / len(means) ** 0.5:.4f}" if len(means) > 1 else ""
    return f"{numpy.mean(means):+.4f}{error}"


class _Every:
    """Windows of many runs; each question is about a random one."""

    def __init__(self, taken: Sequence[Windows]) -> None:
        self._taken = taken

    def draw(self, generator: torch.Generator) -> Question:
        """A random query of random windows."""
        place = int(torch.randint(len(self._taken), (1,), generator=generator, device="cpu"))
        return self._taken[place].draw(generator)


def _windows_of_all(
    runs: Sequence[PriorRun], cache: Path, workers: Workers, tick: Callable[[int], None] = lambda done: None
) -> dict[PriorRun, list[Windows]]:
    """Windows of every run to train on; what is missing in the cache is trained.

    Args:
        runs: to look at.
        cache: of their trajectories.
        workers: processes that read them.
        tick: called with the number of runs done.
    """
    found = workers.each(_windows_of, [(run, cache) for run in runs], tick)
    return {run: [_received(one) for one in taken] for run, taken in zip(runs, found, strict=True)}


def _pretrained(taken: Sequence[Windows]) -> Head:
    """A network trained on windows of many runs; the same windows give the same network."""
    head, generator, every = Head.untrained(), torch.Generator(device="cpu").manual_seed(SEED), _Every(taken)
    for _ in range(STEPS):
        _update(head, every, generator)
    return head


def _judge(
    folds: Mapping[str, Sequence[PriorRun]],
    heads: Mapping[str, Head],
    cache: Path,
    workers: Workers,
    tick: Callable[[int], None] = lambda done: None,
) -> list[Judged]:
    """Every run at every interval, by all ways and the line.

    Args:
        folds: the runs of each group.
        heads: for each group, pretrained on the others.
        cache: of the runs' trajectories.
        workers: processes that look at one run each.
        tick: called with the number of runs done.
    """
    asked = [
        _Asked(run, name, cache, heads[name].parameters.detach().numpy())
        for name, runs in folds.items()
        for run in runs
    ]
    return [one for found in workers.each(_judged, asked, tick) for one in found]


def _windows_of(asked: tuple[PriorRun, Path]) -> list[_Sent]:
    run, cache = asked
    motions = _motions(run, cache)
    found: list[Windows] = []
    for interval in INTERVALS:
        for newest in range(APART_ITERATIONS, run.workload.iterations + 1, APART_ITERATIONS):
            found += _learnable(motions, newest, interval)
    return [(one.points, one.products.numpy(), one.weights.numpy()) for one in found]


def _received(sent: _Sent) -> Windows:
    points, products, weights = sent
    return Windows(points, torch.from_numpy(products), torch.from_numpy(weights))


def _judged(asked: _Asked) -> list[Judged]:
    motions = _motions(asked.run, asked.cache)
    return [_judged_at(interval, asked, motions) for interval in INTERVALS]


def _judged_at(interval: int, asked: _Asked, motions: Mapping[str, OperatorMotion]) -> Judged:
    """Score each way at a checkpoint, and then let it learn from the motion up to there, as a running job does."""
    start = torch.from_numpy(asked.parameters)
    heads = {way: Head(start) if way.pretrained else Head.untrained() for way in WAYS}
    examples = Examples()
    iterations: list[int] = []
    found: dict[str, list[float]] = {LINE: [], **{way.name: [] for way in WAYS}}
    for newest in range(interval, asked.run.workload.iterations + 1, interval):
        questions = _questions(motions, newest, interval)
        if questions:
            iterations.append(newest)
            found[LINE].append(_cosine(None, questions))
            for way, head in heads.items():
                found[way.name].append(_cosine(head, questions))
        for window in _learnable(motions, newest, interval):
            examples.add(window)
        for way, head in heads.items():
            generator = torch.Generator(device="cpu").manual_seed(newest)
            for _ in range(way.updates if len(examples) else 0):
                _update(head, examples, generator)
    return Judged(asked.run.workload.name, asked.left_out, interval, iterations, found)


def _questions(motions: Mapping[str, OperatorMotion], newest: int, interval: int) -> list[Question]:
    """For the motion after that checkpoint, given those of the longest window of a forecast up to it."""
    last = newest + max(LATER_ITERATIONS)
    whole = next(iter(motions.values())).points[-1].iteration
    seen = _checkpoints(newest, interval, max(WINDOWS_ITERATIONS))
    if last > whole or len(seen) < MIN_SNAPSHOTS:
        return []
    questions = []
    for window in _drained(windows(_between(motions, [*seen, *range(newest + interval, last + 1, interval)]))):
        for reach in LATER_ITERATIONS:
            later = [place for place, point in enumerate(window.points) if newest < point.iteration <= newest + reach]
            if len(later) >= MIN_LATER:
                questions.append(window.question(range(len(seen)), later))
    return questions


def _cosine(head: Head | None, questions: Sequence[Question]) -> float:
    """Mean cosine of a head's directions, or the line's, with the later motion, by the distance moved."""
    total = weights = 0.0
    with torch.no_grad():
        for question in questions:
            straight = question.over_window(question.geometry.line.expand(len(question.weights), -1))
            rows = straight if head is None else head.answer(question)
            total += float((cosines(rows, question.later, question.products) * question.weights).sum())
            weights += float(question.weights.sum())
    return round(total / weights, DIGITS)


def _learnable(motions: Mapping[str, OperatorMotion], newest: int, interval: int) -> list[Windows]:
    """What a running job learns from at that checkpoint."""
    seen = _checkpoints(newest, interval, HISTORY_ITERATIONS)[-MAX_SNAPSHOTS:]
    return _drained(windows(_between(motions, seen))) if len(seen) > 1 else []


def _checkpoints(newest: int, interval: int, span: int) -> list[int]:
    """Iterations of the checkpoints up to that one, not more than `span` iterations before it."""
    newest -= newest % interval
    return list(range(max(interval, newest - span // interval * interval), newest + 1, interval))


def _between(motions: Mapping[str, OperatorMotion], iterations: Sequence[int]) -> dict[str, OperatorMotion]:
    found = {}
    for name, motion in motions.items():
        products = motion.between(iterations)
        assert products is not None  # intervals are multiples of the snapshots'
        points = tuple(point for point in motion.points if point.iteration in set(iterations))
        found[name] = OperatorMotion(motion.numel, points, products)
    return found


def _motions(run: PriorRun, cache: Path) -> dict[str, OperatorMotion]:
    """Every operator's motion over the whole run."""
    trajectory = run.in_cache(cache).trajectory()
    trajectory.extend(run.workload.iterations)
    history = trajectory.history(run.workload.iterations, math.gcd(*INTERVALS))
    found = {}
    for name in history.operators:
        products = gram(history, name, block_elements=BLOCK_ELEMENTS)
        found[name] = OperatorMotion(history.numel(name), history.entries, products)
    return found


def _update(head: Head, questions: Examples | _Every, generator: torch.Generator) -> None:
    for _ in head.step(questions.draw(generator)):
        pass


def _drained(work: Generator[Any, None, _Result]) -> _Result:
    while True:
        try:
            next(work)
        except StopIteration as ended:
            result: _Result = ended.value
            return result
