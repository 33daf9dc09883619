"""The ways to come back that are compared, by name."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from cpsr.benchmarks.recovery import guarded
from cpsr.benchmarks.recovery.methods.baselines import BASELINES, ORACLE, RECOMPUTE, LineValue, PlainLine
from cpsr.benchmarks.recovery.methods.elementwise import ElementwisePredictor
from cpsr.benchmarks.recovery.sources import files_digest, predictor_files
from cpsr.errors import ConfigError
from cpsr.predictor.protocol import StatePredictor
from cpsr.predictor.series_predictor import SeriesPredictor
from cpsr.predictor.vitp import VITPPredictor

__all__ = [
    "CHECKFREE",
    "DOUBLED",
    "HARNESS",
    "HARNESS_VERSION",
    "LINE",
    "MOVED",
    "ORACLE",
    "PLACEBO",
    "PREDICTORS",
    "RECOMPUTE",
    "SCAR",
    "STALE",
    "TWIN",
    "WEIGHTS_ONLY",
    "Method",
    "find_methods",
    "predictor_source",
    "sees_the_run",
]

STALE = "stale"  # what every method is paired with, beside recomputing
LINE = "line"  # what the product does
ONE_REACH = "line-one-reach"  # likewise, and every operator as far as the whole model
# Recomputing to the failure, and then moving the weights as far as `line` does: what of its lead is the move's own.
MOVED = "recompute-moved"
# Controls that show what the score is worth. The twin lost nothing: it was trained from the checkpoint to the failure
# on other batches, and its cost is chance. `doubled` is the true state with twice the `exp_avg_sq`: a lower rate for a
# while, which must cost something. The placebo moves each tensor of the checkpoint as far as `line` does, in a random
# direction.
TWIN = "twin"
DOUBLED = "doubled"
PLACEBO = "placebo"
# The last rung of the product's ladder, where every whole checkpoint is damaged.
WEIGHTS_ONLY = "weights-only"
# What others do where a part is lost.
SCAR = "scar"
CHECKFREE = "checkfree"
# Recomputing costs the horizon by definition, and is not run; the oracle's cost is the error of the measurement.
HARNESS = (RECOMPUTE, MOVED, ORACLE, TWIN, DOUBLED, PLACEBO, WEIGHTS_ONLY, SCAR, CHECKFREE)
# Of what the benchmark gives to a predictor and keeps of it: raise it where learning or the kept fields change, and
# everything is formed again.
HARNESS_VERSION = 3


@dataclass(frozen=True)
class Method:
    """How a method's predictor is made.

    Attributes:
        make: the predictor's class, or a partial of it.
        window_checkpoints: length of its window where it is counted in checkpoints, whatever the interval.
        learns_as: another method of the same predictor that learns the same, so that it is learned once.
        guarded: as the product runs it: limited, vetoed or shortened by the loss of probes, and declined where no less
            than the horizon is expected. Others are taken as they come.
    """

    make: Callable[..., StatePredictor]
    window_checkpoints: int | None = None
    learns_as: str | None = None
    guarded: bool = False

    def predictor(self, interval: int) -> StatePredictor:
        """A new one, for checkpoints every `interval` iterations."""
        if self.window_checkpoints is None:
            return self.make()
        return self.make(window_iterations=(self.window_checkpoints - 1) * interval)


PREDICTORS: dict[str, Method] = {
    **{
        name: Method(make, guarded=name in (LINE, ONE_REACH)) for name, make in BASELINES.items() if name not in HARNESS
    },
    "line-6-x2": Method(partial(PlainLine, gain=2.0), window_checkpoints=6),
    "line-8-1.5": Method(partial(LineValue, gain=1.5), window_checkpoints=8),
    "vitp": Method(VITPPredictor, guarded=True),
    "vitp-always": Method(partial(VITPPredictor, direction="vitp"), learns_as="vitp", guarded=True),
    "vitp-elementwise": Method(ElementwisePredictor),
}


def find_methods(names: Iterable[str] | None) -> tuple[str, ...]:
    """Names of methods, checked; None is every one.

    Raises:
        ConfigError: there is no method of that name.
    """
    known = (*HARNESS, *PREDICTORS)
    if names is None:
        return known
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no method is called '{name}'; there are {', '.join(known)}")
    return chosen


def sees_the_run(name: str, interval: int) -> bool:
    """Whether a method has something to do at the run's checkpoints, before the failure."""
    method = PREDICTORS[name]
    learn: Any = getattr(type(method.predictor(interval)), "learn", None)
    return learn is not SeriesPredictor.learn  # that one learns nothing


def predictor_source(name: str) -> str:
    """Digest of everything that decides what a method predicts: its settings, its source, and all that this uses."""
    return _source(PREDICTORS[name])


@cache
def _source(method: Method) -> str:
    made = method.make
    settings: tuple[Any, ...] = (HARNESS_VERSION, method.window_checkpoints, method.guarded)
    if isinstance(made, partial):
        settings = (*settings, made.args, sorted(made.keywords.items()))
        made = made.func
    files = predictor_files(Path(inspect.getfile(made)))
    if method.guarded:
        files |= predictor_files(Path(inspect.getfile(guarded)))
    return files_digest(files, f"{made.__qualname__} {settings}")
