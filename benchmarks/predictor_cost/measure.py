"""One method over the history: its peak memory, and its time beside reading the same checkpoints once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy
import torch

from cpsr.benchmarks.harness.checkpoint_files import slices_in
from cpsr.benchmarks.harness.processes import MemoryPeak, own_bytes, wait_for
from cpsr.benchmarks.predictor_cost.history import BYTES_PER_VALUE, SPAN_ITERATIONS, SyntheticHistory
from cpsr.checkpoint.history import DiskHistory
from cpsr.demo.model import GPT, GPTConfig
from cpsr.errors import CPSRError
from cpsr.predictor.guard import measure
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Forecast, History
from cpsr.predictor.vitp import VITPPredictor
from cpsr.predictor.weight_pieces import CHUNK_ELEMENTS

__all__ = ["METHODS", "MethodSamples", "measure_method", "training_seconds"]

# Over the whole history, at a fixed gain: what calibration would choose is of no interest here, and may be less.
METHODS: dict[str, Callable[..., LinePredictor]] = {
    "line": partial(LinePredictor, SPAN_ITERATIONS, 2.0),
    # What a job has that configures nothing, at its peak learning rate: it takes the line's direction, and has learned
    # from all but the newest checkpoint, which it need not read again to find them finite.
    "default": partial(VITPPredictor, SPAN_ITERATIONS, 2.0),
    # In its own direction, as a job has it below the peak learning rate.
    "vitp": partial(VITPPredictor, SPAN_ITERATIONS, 2.0, direction="vitp"),
}

TRAINING_ITERATIONS = 5
WARM_UP_ITERATIONS = 1  # makes the moments
TRAINING_TOKENS = 256

Result = TypeVar("Result")


@dataclass(frozen=True)
class MethodSamples:
    """Everything measured of one method; the files are in the page cache and mapped.

    Attributes:
        method: its name.
        used_bytes: of the checkpoints that its forecast rests on.
        peak_bytes: of its own memory above the level before the history was opened, over all of it.
        recovery_seconds: opening the history, every file's hash included; forecast and prediction when no page is
            mapped yet; and forming the weights once more beside their history's pace, as the guard has it.
        slice_seconds: of each slice of learning one checkpoint.
        read_seconds: of each turn: every piece of the checkpoints in use summed once, which is reading alone.
        forecast_seconds: of each turn: deciding, with the check for damaged values.
        predict_seconds: of each turn: forming all weights, which are thrown away.
    """

    method: str
    used_bytes: int
    peak_bytes: int
    recovery_seconds: float
    slice_seconds: list[float]
    read_seconds: list[float]
    forecast_seconds: list[float]
    predict_seconds: list[float]

    @property
    def both_seconds(self) -> list[float]:
        """Of each turn: forecast and prediction."""
        return [one + other for one, other in zip(self.forecast_seconds, self.predict_seconds, strict=True)]


def measure_method(method: str, synthetic: SyntheticHistory, repeats: int) -> MethodSamples:
    """Open the history as a recovery does, and predict from it again and again; in a process of its own.

    Raises:
        CPSRError: the method cannot predict from this history.
    """
    # What a training process has anyway, before the level is taken: torch's threads, and the modules of an optimizer.
    torch.ones(CHUNK_ELEMENTS).sum()
    torch.optim.AdamW([torch.zeros(1)])
    predictor, target = METHODS[method](), synthetic.target
    read, forecasts, predictions = list[float](), list[float](), list[float]()
    checkpoints = synthetic.directory / "checkpoints"
    part = slices_in(checkpoints)
    with MemoryPeak(own_bytes) as memory:
        open_seconds, history = _timed(lambda: DiskHistory(checkpoints, part))
        slices = _learned_before_the_newest(predictor, synthetic)
        first_seconds, forecast = _timed(lambda: predictor.forecast(history, target))
        if not forecast.feasible:
            raise CPSRError(f"{predictor.name} cannot predict from this history: {forecast.reason}")
        first_seconds += _timed(lambda: _consume(predictor, history, forecast))[0]
        limit_seconds, _ = _timed(lambda: measure(history, forecast, predictor.predict(history, forecast)))
        used = set(forecast.settings["used_iterations"])
        entries = [position for position, entry in enumerate(history.entries) if entry.iteration in used]
        for _ in range(repeats):
            read.append(_timed(lambda: _read(history, entries))[0])
            forecasts.append(_timed(lambda: predictor.forecast(history, target))[0])
            predictions.append(_timed(lambda: _consume(predictor, history, forecast))[0])
    parameters = sum(history.numel(operator) for operator in history.operators)
    history.close()
    return MethodSamples(
        method,
        used_bytes=len(entries) * parameters * BYTES_PER_VALUE,
        peak_bytes=memory.peak_bytes - memory.before_bytes,
        recovery_seconds=open_seconds + first_seconds + limit_seconds,
        slice_seconds=slices,
        read_seconds=read,
        forecast_seconds=forecasts,
        predict_seconds=predictions,
    )


def _consume(predictor: LinePredictor, history: History, forecast: Forecast) -> None:
    for _ in predictor.predict(history, forecast):
        pass


def _learned_before_the_newest(predictor: LinePredictor, synthetic: SyntheticHistory) -> list[float]:
    """Seconds of each slice of learning; what is learned from a checkpoint is committed with the next one only."""
    checkpoints = synthetic.directory / "checkpoints"
    history = DiskHistory(checkpoints, slices_in(checkpoints), before=synthetic.iterations[-1])
    work, seconds, done = predictor.learn(history), list[float](), object()
    while True:
        taken, found = _timed(lambda: next(work, done))
        if found is done:
            history.close()
            return seconds
        seconds.append(taken)


def _read(history: History, entries: Sequence[int]) -> None:
    """Sum every piece of those entries once, in the order and the lengths in which a prediction reads them."""
    for operator in history.operators:
        numel = history.numel(operator)
        for start in range(0, numel, CHUNK_ELEMENTS):
            for entry in entries:
                history.read(operator, entry, start, min(start + CHUNK_ELEMENTS, numel)).sum()


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def training_seconds(config: GPTConfig, device: str) -> float:
    """Seconds of five iterations: forward, backward and AdamW in float32, one sequence of 256 tokens a batch.

    Takes 16 bytes a parameter of the device's memory, and the activations.
    """
    torch.manual_seed(0)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds = numpy.zeros(WARM_UP_ITERATIONS + TRAINING_ITERATIONS)
    for place in range(len(seconds)):
        window = torch.randint(config.vocabulary, (1, min(TRAINING_TOKENS, config.context) + 1)).to(device)
        wait_for(device)
        started = time.perf_counter()
        optimizer.zero_grad()
        model(window).backward()
        optimizer.step()
        wait_for(device)
        seconds[place] = time.perf_counter() - started
    return float(seconds[WARM_UP_ITERATIONS:].sum())
