"""The ways to come back that are compared, by name, and the state that each goes on from after a failure."""

import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

import cpsr.predictor
from cpsr.benchmarks.recovery.failure import Failure, Formed
from cpsr.benchmarks.recovery.peers import checkfree, scar
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.errors import ConfigError
from cpsr.predictor.guard import Guard, attempts, measure, shorten
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import STALE_METHOD, Forecast, History, Target
from cpsr.predictor.vitp import VITPPredictor

__all__ = [
    "AUTO",
    "CONTROLS",
    "ORACLE",
    "RECOMPUTE",
    "STALE",
    "decide",
    "digest",
    "find_methods",
    "form",
    "repeats",
    "target_of",
]

RECOMPUTE = "recompute"
"""Exactly the newest checkpoint, and every iteration since trained again: no prediction, costs the horizon."""
AUTO = "auto"
"""What the product does: recompute, `stale` or `predicted`, whichever its rule expects to cost least."""
STALE, PREDICTED, ORACLE = "stale", "predicted", "oracle"
VERSION = 6  # of how states are formed: raise it where that changes, and all is measured again
DIGEST_CHARACTERS = 12
OTHER_SEED = 1000  # added to a run's seed: no run has such a one
PROBE_BATCHES = 4  # the product's default: the newest training batches before the checkpoint
# Iterations over which `made-up` trains the learning rate that was skipped. Over three schedules of a 0.1M GPT, all
# that are left ended lower after a failure, but no lower net of the control; 80 ended higher.
MADE_UP_ITERATIONS = 240


def find_methods(names: Iterable[str] | None) -> tuple[str, ...]:
    """Names of methods, checked; None is every one.

    Raises:
        ConfigError: there is no method of that name.
    """
    known = (RECOMPUTE, AUTO, *WAYS)
    if names is None:
        return known
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no method is called '{name}'; there are {', '.join(known)}")
    return chosen


def digest(method: str) -> str:
    """Of what decides a method's state: what was measured with other sources is measured anew."""
    return _predictor_digest() if method in PREDICTING else f"v{VERSION}"


@cache
def _predictor_digest() -> str:
    hasher = hashlib.sha256(str(VERSION).encode())
    predictor = Path(inspect.getfile(cpsr.predictor)).parent
    for path in sorted(path for path in predictor.iterdir() if path.is_file()):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()[:DIGEST_CHARACTERS]


def form(method: str, failure: Failure) -> Formed:
    """The state that a method goes on from: its own where something was lost, and exact at the failure elsewhere."""
    formed = WAYS[method](failure)
    if formed.state is None or repeats(method):  # that stands at the checkpoint, where everything goes back to
        return formed
    return replace(formed, state=failure.part.complete(formed.state))


def repeats(method: str) -> bool:
    """Whether the iterations from the checkpoint to the failure are trained again."""
    return method in (RECOMPUTE, MOVED_BACK)


def target_of(trajectory: Trajectory, iteration: int, lost_share: float = 1.0) -> Target:
    """A failure at that iteration as a predictor receives it."""
    workload = trajectory.workload
    return Target(iteration, workload.times[iteration], workload.peak_until(iteration), lost_share)


# The product's


def decide(failure: Failure) -> str:
    """Which of its ways the product takes in mode `auto`; the guard may still refuse a prediction."""
    _, _, forecast = _forecast(VITPPredictor(), failure)
    if not forecast.is_safe(failure.point.horizon):
        return RECOMPUTE
    return STALE if forecast.method == STALE_METHOD else PREDICTED


def _forecast(predictor: LinePredictor, failure: Failure) -> tuple[LinePredictor, History, Forecast]:
    """Of a predictor that has seen the checkpoints one by one."""
    trajectory, point = failure.trajectory, failure.point
    for newest in range(point.interval, point.checkpoint + 1, point.interval):
        for _ in predictor.learn(trajectory.history(newest, point.interval)):
            pass
    history = trajectory.history(point.checkpoint, point.interval)
    return predictor, history, predictor.forecast(history, target_of(trajectory, point.failure, failure.part.share))


@lru_cache(maxsize=2)  # of one failure: the control, the placebo and others take what was predicted
def _predicted(make: Callable[[], LinePredictor], failure: Failure) -> Formed:
    """The checkpoint moved by a predictor, whatever it expects that to cost; None where the guard refuses it."""
    predictor, history, forecast = _forecast(make(), failure)
    if not forecast.feasible:
        return Formed(None, forecast.reason)
    guard, trainer, checkpoint = Guard(), failure.trajectory.trainer(), failure.checkpoint
    moved = measure(history, forecast, predictor.predict(history, forecast))
    limited = shorten(forecast, dict(zip(moved.operators, guard.limit(moved).tolist(), strict=True)))
    decision = guard.finite(moved)
    before = trainer.probe(checkpoint, PROBE_BATCHES)
    for _, tried in attempts(limited, None) if decision.accepted else ():
        state = _applied(predictor, history, tried, failure)
        decision = guard.veto(before, trainer.probe(replace(state, iteration=checkpoint.iteration), PROBE_BATCHES))
        if decision.accepted:
            return Formed(state, f"{tried.reason}; {decision.reason}")
    return Formed(None, decision.reason)


def _applied(predictor: LinePredictor, history: History, forecast: Forecast, failure: Failure) -> State:
    """The state of a feasible forecast, exact outside of the lost part."""
    weights = {name: torch.empty_like(values) for name, values in failure.checkpoint.weights.items()}
    for name, start, values in predictor.predict(history, forecast):
        weights[name][start : start + values.numel()] = values
    formed = replace(failure.checkpoint, iteration=failure.point.failure, weights=weights)
    return failure.part.complete(formed)


class _Product(VITPPredictor):
    _always_moves = True


class _Line(LinePredictor):
    _always_moves = True


def _stale(failure: Failure) -> Formed:
    """The newest checkpoint as it is: the data since is skipped, its progress lost."""
    return Formed(replace(failure.checkpoint, iteration=failure.point.failure), "the checkpoint, further in the data")


# What any run could do, failed or not


def _moved(make: Callable[[], LinePredictor], failure: Failure) -> Formed:
    """Control: the true state at the failure, nothing lost, moved as far as a prediction moves the checkpoint's."""
    predicted, exact, checkpoint = _predicted(make, failure), failure.exact, failure.checkpoint
    if predicted.state is None:
        return predicted
    before, after = checkpoint.weights, predicted.state.weights
    weights = {name: values + (after[name] - before[name]) for name, values in exact.weights.items()}
    return replace(predicted, state=replace(exact, weights=weights))


def _moved_back(failure: Failure) -> Formed:
    """The checkpoint moved as `predicted` moves it, and all iterations since trained again (`predictor.move`)."""
    if failure.point.lost != "all":
        return Formed(None, "its control moves no more than what was lost")
    predicted = _predicted(_Product, failure)
    if predicted.state is None:
        return predicted
    moved = replace(failure.checkpoint, weights=predicted.state.weights)
    return replace(predicted, state=moved)


def _made_up(form_state: Callable[[Failure], Formed], failure: Failure) -> Formed:
    """A state, whose next iterations train at a higher rate: the sum is that of the iterations that were skipped."""
    workload, f = failure.trajectory.workload, failure.point.failure
    until = min(workload.iterations, f + MADE_UP_ITERATIONS)
    factor = 1.0 + (workload.times[f] - workload.times[failure.point.checkpoint]) / (
        workload.times[until] - workload.times[f]
    )
    return replace(form_state(failure), rate_factor=factor, rate_until=until)


# Controls


def _oracle(failure: Failure) -> Formed:
    """The true state, which only a measurement has: its cost is the error of the measurement."""
    return Formed(failure.exact, "the true state")


def _twin(failure: Failure) -> Formed:
    """Control: trained from the checkpoint to the failure on other batches: nothing was lost, its cost is chance."""
    trainer = failure.trajectory.trainer()
    trainer.load(failure.checkpoint)
    while trainer.iteration < failure.point.failure:
        trainer.step(batches_of=failure.trajectory.seed + OTHER_SEED)
    return Formed(trainer.state(), "trained to the failure on other batches")


def _doubled(failure: Failure) -> Formed:
    """Control: the true state with twice the `exp_avg_sq`, so a lower rate for a while, which must cost something."""
    exact = failure.exact
    doubled = {name: 2.0 * values for name, values in exact.moments["exp_avg_sq"].items()}
    return Formed(replace(exact, moments=exact.moments | {"exp_avg_sq": doubled}), "exp_avg_sq doubled")


def _placebo(failure: Failure) -> Formed:
    """Control: each tensor of the checkpoint moved as far as `predicted` does, in a random direction."""
    moved = _predicted(_Product, failure)
    if moved.state is None:
        return moved
    generator = torch.Generator().manual_seed(failure.point.failure)
    weights = {}
    for name, values in failure.checkpoint.weights.items():
        direction = torch.randn(values.shape, generator=generator)
        weights[name] = values + direction * ((moved.state.weights[name] - values).norm() / direction.norm())
    return replace(moved, state=replace(moved.state, weights=weights), reason="a random direction, as far")


MOVED_BACK = "moved-then-recompute"
WAYS: dict[str, Callable[[Failure], Formed]] = {
    STALE: _stale,
    PREDICTED: partial(_predicted, _Product),
    "moved": partial(_moved, _Product),
    MOVED_BACK: _moved_back,
    "predicted-line": partial(_predicted, _Line),
    "moved-line": partial(_moved, _Line),
    "made-up": partial(_made_up, _stale),
    "made-up-exact": partial(_made_up, _oracle),
    ORACLE: _oracle,
    "twin": _twin,
    "doubled": _doubled,
    "placebo": _placebo,
    "scar": scar,
    "checkfree": checkfree,
}
CONTROLS = {PREDICTED: "moved", MOVED_BACK: "moved", "predicted-line": "moved-line", "made-up": "made-up-exact"}
"""What an arm does beside coming back, done at the failure with nothing lost: its end cost is taken off the arm's."""
PREDICTING = (PREDICTED, "moved", MOVED_BACK, "predicted-line", "moved-line", "placebo")
