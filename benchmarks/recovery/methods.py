"""The ways to come back that are compared, by name."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from cpsr.benchmarks.recovery import guarded
from cpsr.benchmarks.recovery.components import IterationTime, ScaledSecant
from cpsr.benchmarks.recovery.sources import files_digest, predictor_files
from cpsr.errors import ConfigError
from cpsr.predictor.baselines import BASELINES, ORACLE, RECOMPUTE
from cpsr.predictor.elementwise import ElementwisePredictor
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import StatePredictor
from cpsr.predictor.series_predictor import SeriesPredictor
from cpsr.predictor.vitp import VITPPredictor

__all__ = [
    "ABLATION",
    "ARMS",
    "CELL_BEST",
    "DERIVED",
    "FULL_PREDICTOR",
    "HARNESS",
    "HARNESS_VERSION",
    "HINDSIGHT",
    "MOVED",
    "ORACLE",
    "PREDICTORS",
    "RECOMPUTE",
    "REHEARSED",
    "STALE",
    "Method",
    "find_methods",
    "measured_methods",
    "predictor_source",
    "sees_the_run",
]

STALE = "stale"  # what every method is paired with, beside recomputing
REHEARSED = "line-rehearsed"
# Recomputing to the failure, and then moving the weights as far as `line` does: what of its lead is the move's own.
MOVED = "recompute-moved"
# Recomputing costs the horizon by definition, and is not run; the oracle's cost is the error of the measurement.
HARNESS = (RECOMPUTE, MOVED, ORACLE)
# Chosen among the arms after they were measured: the first at each failure by what that failure itself cost, the
# second once for a whole cell, by its other failures.
HINDSIGHT, CELL_BEST = "line-hindsight", "line-cell-best"
DERIVED = (HINDSIGHT, CELL_BEST)
# Of what the benchmark gives to a predictor and keeps of it: raise it where learning, rehearsals or the kept fields
# change, and everything is formed again.
HARNESS_VERSION = 1


@dataclass(frozen=True)
class Method:
    """How a method's predictor is made.

    Attributes:
        make: the predictor's class, or a partial of it.
        window_checkpoints: length of its window where it is counted in checkpoints, whatever the interval.
        rehearses: recoveries are rehearsed during the run, and their outcomes recorded.
        learns_as: another method of the same predictor that learns the same, so that it is learned once.
        guarded: as the product runs it: limited, vetoed or shortened by the loss of probes, and declined where no less
            than the horizon is expected. Others are taken as they come.
    """

    make: Callable[..., StatePredictor]
    window_checkpoints: int | None = None
    rehearses: bool = False
    learns_as: str | None = None
    guarded: bool = False

    def predictor(self, interval: int) -> StatePredictor:
        """A new one, for checkpoints every `interval` iterations."""
        if self.window_checkpoints is None:
            return self.make()
        return self.make(window_iterations=(self.window_checkpoints - 1) * interval)


def _line(window_iterations: int, gain: float, base: Literal["checkpoint", "line"]) -> Method:
    return Method(partial(LinePredictor, window_iterations=window_iterations, gain=gain, base=base))


# Settings of the line that hindsight chooses among: from the plain line to the furthest that a window bears.
ARMS: dict[str, Method] = {
    "arm-w300-x1-line": _line(300, 1.0, "line"),
    "arm-w300-x2-c": _line(300, 2.0, "checkpoint"),
    "arm-w400-x2-c": _line(400, 2.0, "checkpoint"),
    "arm-w200-x3-c": _line(200, 3.0, "checkpoint"),
    "arm-w300-x4-c": _line(300, 4.0, "checkpoint"),
    "arm-w400-x4-line": _line(400, 4.0, "line"),
    "arm-w300-x3-c": _line(300, 3.0, "checkpoint"),
    "arm-w400-x5-c": _line(400, 5.0, "checkpoint"),
}

# The whole predictor, and the same with one component replaced: name -> what was done.
FULL_PREDICTOR = "vitp"
ABLATION = {
    "line": "no learned direction (the same wherever the calibration takes the line's)",
    "vitp-always": "no choice of direction: the learned one, always",
    "secant-scaled": "no denoising: the last two checkpoints, as far as their own path allows",
    "vitp-plain": "no gain: the line's own value at the failure",
    "vitp-6": "window of 6 checkpoints, not of iterations",
    "vitp-x2": "no calibrated setting: window 300, gain 2, from the checkpoint",
    "iteration-time": "iterations as time, not the cumulative learning rate",
}

PREDICTORS: dict[str, Method] = {
    **{name: Method(make, guarded=name == "line") for name, make in BASELINES.items() if name not in HARNESS},
    "line-6-x2": Method(partial(LinePredictor, gain=2.0, base="checkpoint"), window_checkpoints=6),
    "line-8-1.5": Method(partial(LinePredictor, gain=1.5, base="line"), window_checkpoints=8),
    REHEARSED: Method(LinePredictor, rehearses=True, guarded=True),
    "vitp": Method(VITPPredictor, guarded=True),
    "vitp-always": Method(partial(VITPPredictor, direction="vitp"), learns_as="vitp", guarded=True),
    "vitp-elementwise": Method(ElementwisePredictor),
    **ARMS,
    "secant-scaled": Method(ScaledSecant, guarded=True),
    "vitp-plain": Method(partial(VITPPredictor, gain=1.0, base="line"), learns_as="vitp", guarded=True),
    "vitp-6": Method(VITPPredictor, window_checkpoints=6, learns_as="vitp", guarded=True),
    "vitp-x2": Method(
        partial(VITPPredictor, window_iterations=300, gain=2.0, base="checkpoint"), learns_as="vitp", guarded=True
    ),
    "iteration-time": Method(IterationTime, guarded=True),
}
# Measured where they are asked for, and in their own places.
ASIDE = {*ARMS, *ABLATION} - {"line", "vitp-always"}


def find_methods(names: Iterable[str] | None) -> tuple[str, ...]:
    """Names of methods, checked; None is every one but the arms and the ablation's.

    Raises:
        ConfigError: there is no method of that name.
    """
    known = (RECOMPUTE, MOVED, *PREDICTORS, *DERIVED, ORACLE)
    if names is None:
        return tuple(name for name in known if name not in ASIDE)
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no method is called '{name}'; there are {', '.join(known)}")
    return chosen


def measured_methods(names: Iterable[str]) -> tuple[str, ...]:
    """What must be measured for these methods: the arms in place of what is chosen among them."""
    measured: dict[str, None] = {}
    for name in names:
        measured |= dict.fromkeys(ARMS if name in DERIVED else [name])
    return tuple(measured)


def sees_the_run(name: str, interval: int) -> bool:
    """Whether a method has something to do at the run's checkpoints, before the failure."""
    method = PREDICTORS[name]
    learn: Any = getattr(type(method.predictor(interval)), "learn", None)
    return method.rehearses or learn is not SeriesPredictor.learn  # that one learns nothing


def predictor_source(name: str) -> str:
    """Digest of everything that decides what a method predicts: its settings, its source, and all that this uses."""
    return _source(PREDICTORS[name])


@cache
def _source(method: Method) -> str:
    made = method.make
    settings: tuple[Any, ...] = (HARNESS_VERSION, method.window_checkpoints, method.rehearses, method.guarded)
    if isinstance(made, partial):
        settings = (*settings, made.args, sorted(made.keywords.items()))
        made = made.func
    files = predictor_files(Path(inspect.getfile(made)))
    if method.guarded:
        files |= predictor_files(Path(inspect.getfile(guarded)))
    return files_digest(files, f"{made.__qualname__} {settings}")
