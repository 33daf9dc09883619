"""One method over the history: its peak memory, and its time beside reading the same checkpoints once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy
import torch

from cpsr.benchmarks.harness.processes import MemoryPeak, Resident, wait_for
from cpsr.benchmarks.predictor_cost.history import BYTES_PER_VALUE, SPAN_ITERATIONS, SyntheticHistory
from cpsr.checkpoint.history import DiskHistory
from cpsr.demo.model import GPT, GPTConfig
from cpsr.errors import ConfigError, CPSRError
from cpsr.predictor.guard import measure
from cpsr.predictor.line import CHUNK_ELEMENTS, LinePredictor
from cpsr.predictor.protocol import Forecast, History, StatePredictor, Target
from cpsr.predictor.vitp import VITPPredictor

__all__ = ["METHODS", "MethodSamples", "Repeat", "find_methods", "measure_method", "training_seconds"]

# Over the whole history, at a fixed gain: what calibration would choose is of no interest here, and may be less.
METHODS: dict[str, Callable[..., StatePredictor]] = {
    "line": partial(LinePredictor, SPAN_ITERATIONS, 2.0),
    # What a job has that configures nothing: it takes the line's direction, and has learned from all but the newest
    # checkpoint, which it need not read again to find them finite.
    "default": partial(VITPPredictor, SPAN_ITERATIONS, 2.0),
    # In its own direction from the start, as it is after some training.
    "vitp": partial(VITPPredictor, SPAN_ITERATIONS, 2.0, direction="vitp"),
}

TRAINING_ITERATIONS = 5
WARM_UP_ITERATIONS = 1  # makes the moments
TRAINING_TOKENS = 256

Result = TypeVar("Result")


@dataclass(frozen=True)
class Repeat:
    """Seconds of one turn; the files are in the page cache and mapped, for prediction and reading alike.

    Attributes:
        sum_seconds: every piece of the checkpoints in use summed once: reading alone.
        forecast_seconds: deciding, with the check for damaged values.
        predict_seconds: forming all weights, which are thrown away.
        limit_seconds: forming them once more beside their history's pace, as the guard has it before they are written.
    """

    sum_seconds: float
    forecast_seconds: float
    predict_seconds: float
    limit_seconds: float


@dataclass
class MethodSamples:
    """Everything measured of one method.

    Attributes:
        method: its name.
        used_bytes: of the checkpoints that its forecast rests on.
        open_seconds: opening the history, every file's hash included.
        learn_seconds: taking in the newest checkpoint.
        slice_seconds: the longest of its slices.
        slice_p99_seconds: of a hundred slices 99 are no longer.
        first_seconds: forecast and prediction right after opening, when no page is mapped yet.
        peak: memory above the level before the history was opened, over opening, learning and all predictions.
        repeats: the turns behind the first.
    """

    method: str
    used_bytes: int
    open_seconds: float
    learn_seconds: float
    slice_seconds: float
    slice_p99_seconds: float
    first_seconds: float
    peak: Resident
    repeats: list[Repeat] = field(default_factory=list)


def find_methods(methods: str) -> list[str]:
    """Names, comma-separated; ConfigError where there is no method of a name."""
    names = [name.strip() for name in methods.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        raise ConfigError(f"--methods: {', '.join(unknown)} not known; there are {', '.join(METHODS)}")
    return names


def measure_method(method: str, synthetic: SyntheticHistory, repeats: int) -> MethodSamples:
    """Open the history as a recovery does, and predict from it again and again; in a process of its own.

    Raises:
        CPSRError: the method cannot predict from this history.
    """
    # What a training process has anyway, before the level is taken: torch's threads, and the modules of an optimizer.
    torch.ones(CHUNK_ELEMENTS).sum()
    torch.optim.AdamW([torch.zeros(1)])
    predictor, target = METHODS[method](), synthetic.target
    with MemoryPeak() as memory:
        open_seconds, history = _timed(lambda: DiskHistory(synthetic.directory / "checkpoints", part=0))
        slices = _learned_before_the_newest(predictor, synthetic)
        first_seconds, forecast = _timed(lambda: _predicted(predictor, history, target))
        entries = _used_entries(history, forecast)
        turns = [_repeat(predictor, history, target, forecast, entries) for _ in range(repeats)]
    parameters = sum(history.numel(operator) for operator in history.operators)
    history.close()
    return MethodSamples(
        method,
        used_bytes=len(entries) * parameters * BYTES_PER_VALUE,
        open_seconds=open_seconds,
        learn_seconds=sum(slices),
        slice_seconds=max(slices, default=0.0),
        slice_p99_seconds=float(numpy.quantile(slices, 0.99)) if slices else 0.0,
        first_seconds=first_seconds,
        peak=memory.above_before,
        repeats=turns,
    )


def _repeat(
    predictor: StatePredictor, history: History, target: Target, forecast: Forecast, entries: Sequence[int]
) -> Repeat:
    summed, _ = _timed(lambda: _read(history, entries, torch.sum))
    forecast_seconds, again = _timed(lambda: predictor.forecast(history, target))
    predict_seconds, _ = _timed(lambda: _consume(predictor, history, again))
    limit_seconds, _ = _timed(lambda: measure(history, forecast, predictor.predict(history, forecast)))
    return Repeat(summed, forecast_seconds, predict_seconds, limit_seconds)


def _predicted(predictor: StatePredictor, history: History, target: Target) -> Forecast:
    forecast = predictor.forecast(history, target)
    if not forecast.feasible:
        raise CPSRError(f"{predictor.name} cannot predict from this history: {forecast.reason}")
    _consume(predictor, history, forecast)
    return forecast


def _consume(predictor: StatePredictor, history: History, forecast: Forecast) -> None:
    for _ in predictor.predict(history, forecast):
        pass


def _learned_before_the_newest(predictor: StatePredictor, synthetic: SyntheticHistory) -> list[float]:
    """Seconds of each slice of learning; what is learned from a checkpoint is committed with the next one only."""
    history = DiskHistory(synthetic.directory / "checkpoints", part=0, before=synthetic.iterations[-1])
    seconds = []
    started = time.perf_counter()
    for _ in predictor.learn(history):
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    history.close()
    return seconds


def _used_entries(history: History, forecast: Forecast) -> list[int]:
    used = set(forecast.settings["used_iterations"])
    return [position for position, entry in enumerate(history.entries) if entry.iteration in used]


def _read(history: History, entries: Sequence[int], use: Callable[[torch.Tensor], object]) -> None:
    """Every piece of those entries once, in the order and the lengths in which a prediction reads them."""
    for operator in history.operators:
        numel = history.numel(operator)
        for start in range(0, numel, CHUNK_ELEMENTS):
            for entry in entries:
                use(history.read(operator, entry, start, min(start + CHUNK_ELEMENTS, numel)))


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def training_seconds(config: GPTConfig, device: str) -> list[float]:
    """Seconds of each of five iterations: forward, backward and AdamW in float32, one sequence of 256 tokens a batch.

    Takes 16 bytes a parameter of the device's memory, and the activations.

    Args:
        config: shape of the model.
        device: `cpu` or `cuda`.
    """
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = []
    for _ in range(WARM_UP_ITERATIONS + TRAINING_ITERATIONS):
        window = torch.randint(config.vocabulary, (1, min(TRAINING_TOKENS, config.context) + 1)).to(device)
        wait_for(device)
        started = time.perf_counter()
        optimizer.zero_grad()
        model(window).backward()
        optimizer.step()
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP_ITERATIONS:]
