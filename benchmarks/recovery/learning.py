"""What a method's predictor has learned from a run by one of its checkpoints, kept on disk along the way."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.harness.files import read_tree, write_tree
from cpsr.benchmarks.recovery.methods.roster import PREDICTORS, Method, predictor_source, sees_the_run
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.predictor.protocol import History, StatePredictor

__all__ = ["Learned", "learned", "lesson"]

KEPT_CHECKPOINTS = 10  # beside every state that was asked for, one in so many is kept to go on from


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
    if not sees_the_run(name, interval):
        return Learned()
    directory = _directory(name, trajectory, interval)
    at, known = _newest(directory, checkpoint)
    for newest in range(at + interval, checkpoint + 1, interval):
        predictor, seconds = lesson(PREDICTORS[name], interval, trajectory.history(newest, interval), known.state)
        known = Learned(predictor.state_dict(), known.seconds + seconds)
        if newest == checkpoint or newest // interval % KEPT_CHECKPOINTS == 0:
            write_tree(directory / f"{newest:05d}.safetensors", asdict(known))
    return known


def lesson(
    method: Method, interval: int, history: History, state: dict[str, Any] | None
) -> tuple[StatePredictor, float]:
    """A predictor that goes on from `state` and takes in the newest checkpoint; and the seconds of the latter."""
    predictor = method.predictor(interval)
    if state is not None:
        predictor.load_state_dict(state)
    started = time.perf_counter()
    for _ in predictor.learn(history):
        pass
    return predictor, time.perf_counter() - started


def _directory(name: str, trajectory: Trajectory, interval: int) -> Path:
    return trajectory.directory / "learned" / f"T{interval:03d}-{name}-{predictor_source(name)}"


def _newest(directory: Path, checkpoint: int) -> tuple[int, Learned]:
    kept = sorted(int(path.stem) for path in directory.glob("[0-9]*.safetensors"))
    before = [iteration for iteration in kept if iteration <= checkpoint]
    if not before:
        return 0, Learned()
    return before[-1], Learned(**read_tree(directory / f"{before[-1]:05d}.safetensors"))
