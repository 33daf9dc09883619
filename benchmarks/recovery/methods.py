"""The ways to come back that are compared, by name, and what their predictors have learned from a run."""

import hashlib
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import cpsr.predictor
from cpsr.benchmarks.harness.files import read_tree, write_tree
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.errors import ConfigError
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import HistoryEntry, StatePredictor, Target
from cpsr.predictor.series import Series, too_far, too_few
from cpsr.predictor.series_predictor import Fit, SeriesPredictor, newest_row
from cpsr.predictor.vitp import VITPPredictor

__all__ = [
    "CHECKFREE",
    "DOUBLED",
    "HARNESS",
    "LINE",
    "MOVED",
    "ORACLE",
    "PLACEBO",
    "PREDICTORS",
    "RECOMPUTE",
    "SCAR",
    "STALE",
    "TWIN",
    "Learned",
    "find_methods",
    "learned",
    "predictors_digest",
    "sees_the_run",
]

RECOMPUTE = "recompute"
"""Exactly the newest checkpoint, and every iteration since trained again: no prediction, costs the horizon."""
ORACLE = "oracle"
"""The true state at the failure, which only a measurement has: its cost is the error of the measurement."""
STALE = "stale"
"""The newest checkpoint as it is: the data since is skipped, its progress lost."""
LINE = "line"
"""What the product does."""
MOVED = "recompute-moved"
"""Recomputing to the failure, and then moving the weights as far as `line` does: what of its lead is the move's own."""
TWIN = "twin"
"""Control: trained from the checkpoint to the failure on other batches: nothing was lost, its cost is chance."""
DOUBLED = "doubled"
"""Control: the true state with twice the `exp_avg_sq`, so a lower rate for a while, which must cost something."""
PLACEBO = "placebo"
"""Control: each tensor of the checkpoint moved as far as `line` does, in a random direction."""
SCAR, CHECKFREE = "scar", "checkfree"
"""What others do where a part is lost."""
HARNESS = (RECOMPUTE, MOVED, ORACLE, TWIN, DOUBLED, PLACEBO, SCAR, CHECKFREE)
VERSION = 4  # of what is given to a predictor and kept of it: raise it where that changes, and all is formed again
DIGEST_CHARACTERS = 12
KEPT_CHECKPOINTS = 10  # beside every lesson that was asked for, one in so many is kept to go on from


class Stale(SeriesPredictor):
    """See `STALE`."""

    name = STALE

    def _obstacle(self, points: Sequence[HistoryEntry], target: Target) -> str | None:
        return too_few(points, 1) or too_far(target, points, extrapolates=False)

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        return Fit(newest_row(len(points)))


class PlainLine(LinePredictor):
    """The line with one reach for all operators."""

    def _factor(self, operator: str, series: Series) -> float:
        return 1.0


class LineValue(PlainLine):
    """The line, which starts from its own value at the checkpoint and not from the checkpoint's weights."""

    _base = 1.0


@dataclass(frozen=True)
class Method:
    """How a method's predictor is made.

    Attributes:
        make: the predictor's class, or a partial of it.
        learns_as: another method of the same predictor that learns the same, so that it is learned once.
        guarded: as the product runs it: limited, vetoed or shortened by the loss of probes, and declined where no less
            than the horizon is expected. Others are taken as they come.
    """

    make: Callable[..., StatePredictor]
    learns_as: str | None = None
    guarded: bool = False


PREDICTORS: dict[str, Method] = {
    STALE: Method(Stale),
    "line-x2": Method(partial(PlainLine, 300, 2.0, name="line-x2")),
    "line-base": Method(partial(LineValue, 300, 0.0, name="line-base")),
    "line-one-reach": Method(partial(PlainLine, name="line-one-reach"), guarded=True),
    LINE: Method(LinePredictor, guarded=True),
    "vitp": Method(VITPPredictor, guarded=True),
    "vitp-always": Method(partial(VITPPredictor, direction="vitp"), learns_as="vitp", guarded=True),
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


def sees_the_run(name: str) -> bool:
    """Whether a method has something to do at the run's checkpoints, before the failure."""
    learn: Any = getattr(type(PREDICTORS[name].make()), "learn", None)
    return learn is not SeriesPredictor.learn  # that one learns nothing


@cache
def predictors_digest() -> str:
    """Of all that decides what methods predict: what was formed by other sources is formed anew."""
    hasher = hashlib.sha256(str(VERSION).encode())
    predictor = Path(inspect.getfile(cpsr.predictor)).parent
    for path in (*sorted(path for path in predictor.iterdir() if path.is_file()), Path(__file__)):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()[:DIGEST_CHARACTERS]


@dataclass(frozen=True)
class Learned:
    """A predictor's knowledge at a checkpoint.

    Attributes:
        state: for `load_state_dict`; None where the method sees nothing before the failure.
        seconds: spent on learning so far.
    """

    state: dict[str, Any] | None = None
    seconds: float = 0.0


def learned(name: str, trajectory: Trajectory, interval: int, checkpoint: int) -> Learned:
    """What a method knows after it has seen the run's checkpoints one by one, up to and with `checkpoint`.

    It goes on from the newest state on disk. Every checkpoint is learned by a predictor that has just loaded the state
    of the one before, as after a failure. The result then does not depend on where an earlier call left off.

    Args:
        name: of the method.
        trajectory: the run.
        interval: iterations between its checkpoints.
        checkpoint: the last one to learn from.

    Raises:
        CPSRError: a file of the cache is damaged.
    """
    name = PREDICTORS[name].learns_as or name
    if not sees_the_run(name):
        return Learned()
    directory = trajectory.directory / "learned" / f"T{interval:03d}-{name}-{predictors_digest()}"
    kept = [int(path.stem) for path in directory.glob("[0-9]*.safetensors") if int(path.stem) <= checkpoint]
    at, known = max(kept, default=0), Learned()
    if kept:
        known = Learned(**read_tree(directory / f"{at:05d}.safetensors"))
    for newest in range(at + interval, checkpoint + 1, interval):
        predictor = PREDICTORS[name].make()
        if known.state is not None:
            predictor.load_state_dict(known.state)
        started = time.perf_counter()
        for _ in predictor.learn(trajectory.history(newest, interval)):
            pass
        known = Learned(predictor.state_dict(), known.seconds + time.perf_counter() - started)
        if newest == checkpoint or newest // interval % KEPT_CHECKPOINTS == 0:
            write_tree(directory / f"{newest:05d}.safetensors", asdict(known))
    return known
