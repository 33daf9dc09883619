"""The ways to come back that are compared, by name, and the state that each goes on from after a failure."""

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import torch

import cpsr.predictor
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.lost import BLOCK, LostPart, lost_part
from cpsr.benchmarks.recovery.trainer import State, Tensors
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.errors import ConfigError
from cpsr.predictor.calibration import of_part
from cpsr.predictor.guard import LENGTHS, Guard, measure, of_length, shorten
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Forecast, History, StatePredictor, Target
from cpsr.predictor.vitp import VITPPredictor

__all__ = [
    "LINE",
    "MOVED",
    "ORACLE",
    "PREDICTORS",
    "RECOMPUTE",
    "STALE",
    "WAYS",
    "Failure",
    "Formed",
    "Method",
    "find_methods",
    "form",
    "predictors_digest",
    "target_of",
]

RECOMPUTE = "recompute"
"""Exactly the newest checkpoint, and every iteration since trained again: no prediction, costs the horizon."""
LINE = "line"
"""What the product does."""
VERSION = 5  # of what is given to a predictor and kept of it: raise it where that changes, and all is measured again
DIGEST_CHARACTERS = 12
OTHER_SEED = 1000  # added to a run's seed: no run has such a one
SCAR_BLOCK_ELEMENTS = 1024
SCAR_WARM_UP_INTERVALS = 2  # until the parts are of different ages
PROBE_BATCHES = 4  # the product's default: the newest training batches before the checkpoint


class PlainLine(LinePredictor):
    """The line with one reach for all operators."""

    def _reach_factors(self, paths: Mapping[str, torch.Tensor], whole: float) -> dict[str, float]:
        return {}


class LineValue(PlainLine):
    """The line, which starts from its own value at the checkpoint and not from the checkpoint's weights."""

    _base = 1.0


@dataclass(frozen=True)
class Method:
    """How a method's predictor is made.

    Attributes:
        make: the predictor's class, or a partial of it.
        guarded: as the product runs it: limited, vetoed or shortened by the loss of probes, and declined where no less
            than the horizon is expected. Others are taken as they come.
    """

    make: Callable[..., StatePredictor]
    guarded: bool = False


PREDICTORS: dict[str, Method] = {
    "line-x2": Method(partial(PlainLine, 300, 2.0)),
    "line-base": Method(partial(LineValue, 300, 0.0)),
    "line-one-reach": Method(PlainLine, guarded=True),
    LINE: Method(LinePredictor, guarded=True),
    "vitp": Method(VITPPredictor, guarded=True),
    "vitp-always": Method(partial(VITPPredictor, direction="vitp"), guarded=True),
}


def find_methods(names: Iterable[str] | None) -> tuple[str, ...]:
    """Names of methods, checked; None is every one.

    Raises:
        ConfigError: there is no method of that name.
    """
    known = (RECOMPUTE, *WAYS, *PREDICTORS)
    if names is None:
        return known
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no method is called '{name}'; there are {', '.join(known)}")
    return chosen


@cache
def predictors_digest() -> str:
    """Of all that decides what methods predict: what was measured with other sources is measured anew."""
    hasher = hashlib.sha256(str(VERSION).encode())
    predictor = Path(inspect.getfile(cpsr.predictor)).parent
    for path in (*sorted(path for path in predictor.iterdir() if path.is_file()), Path(__file__)):
        hasher.update(path.name.encode() + path.read_bytes())
    return hasher.hexdigest()[:DIGEST_CHARACTERS]


@dataclass(frozen=True)
class Failure:
    """A run that fails, at one point.

    Attributes:
        trajectory: the run; its checkpoints are the history.
        point: where it fails.
    """

    trajectory: Trajectory
    point: Point

    @cached_property
    def checkpoint(self) -> State:
        """The fault-free run at the checkpoint, whose moments every method keeps, counting on from f."""
        return self.trajectory.at(self.point.checkpoint).state()

    @cached_property
    def exact(self) -> State:
        """The fault-free run at the failure."""
        trainer = self.trajectory.trainer()
        trainer.load(self.checkpoint)
        self.trajectory.advance(trainer, self.point.failure)
        return trainer.state()

    @cached_property
    def part(self) -> LostPart:
        """What is lost."""
        return lost_part(self.point.lost, self.exact, self.point.checkpoint // self.point.interval)


@dataclass(frozen=True)
class Formed:
    """What a method made of a failure.

    Attributes:
        state: where training goes on; None where the method advises against itself.
        reason: one sentence for people.
    """

    state: State | None
    reason: str


def form(method: str, failure: Failure) -> Formed:
    """The state that a method goes on from: its own where something was lost, and exact elsewhere."""
    formed = WAYS[method](failure) if method in WAYS else _predicted(method, failure)
    return formed if formed.state is None else replace(formed, state=failure.part.complete(formed.state))


def target_of(trajectory: Trajectory, iteration: int) -> Target:
    """A failure at that iteration as a predictor receives it."""
    workload = trajectory.workload
    return Target(iteration, workload.times[iteration], workload.peak_until(iteration))


def _predicted(method: str, failure: Failure) -> Formed:
    """The state at the failure as a predictor has it, which has seen the checkpoints one by one."""
    trajectory, point, predictor = failure.trajectory, failure.point, PREDICTORS[method].make()
    for newest in range(point.interval, point.checkpoint + 1, point.interval):
        for _ in predictor.learn(trajectory.history(newest, point.interval)):
            pass
    history = trajectory.history(point.checkpoint, point.interval)
    forecast = predictor.forecast(history, target_of(trajectory, point.failure))
    state: State | None = None
    if forecast.feasible and PREDICTORS[method].guarded:
        forecast, state = _guarded(predictor, history, forecast, failure)
    elif forecast.feasible:
        state = _applied(predictor, history, forecast, failure)
    if state is not None and not state.is_finite():
        return Formed(None, f"the predicted weights are not finite; {forecast.reason}")
    return Formed(state, forecast.reason)


def _applied(predictor: StatePredictor, history: History, forecast: Forecast, failure: Failure) -> State:
    """The state of a feasible forecast, exact outside of the lost part."""
    weights = {name: torch.empty_like(values) for name, values in failure.checkpoint.weights.items()}
    for name, start, values in predictor.predict(history, forecast):
        weights[name][start : start + values.numel()] = values
    formed = replace(failure.checkpoint, iteration=failure.point.failure, weights=weights)
    return failure.part.complete(formed)


def _guarded(
    predictor: StatePredictor, history: History, forecast: Forecast, failure: Failure
) -> tuple[Forecast, State | None]:
    """One prediction under the guard, as the product makes it in mode `auto`; the watch afterwards is not played."""
    horizon, checkpoint, trainer = failure.point.horizon, failure.checkpoint, failure.trajectory.trainer()
    charged = of_part(forecast, failure.part.share)
    if charged.expected_end_cost_iterations + charged.expected_deviation_iterations >= horizon:
        return replace(forecast, reason=f"recomputing {horizon} iterations is safer; {forecast.reason}"), None
    guard = Guard()
    moved = measure(history, forecast, predictor.predict(history, forecast))
    limited = shorten(forecast, dict(zip(moved.operators, guard.limit(moved).tolist(), strict=True)))
    decision = guard.finite(moved)
    if not decision.accepted:
        return replace(forecast, reason=decision.reason), None
    before = trainer.probe(checkpoint, PROBE_BATCHES)
    for length in LENGTHS:
        tried = of_length(limited, length)
        state = _applied(predictor, history, tried, failure)
        decision = guard.veto(before, trainer.probe(replace(state, iteration=checkpoint.iteration), PROBE_BATCHES))
        if decision.accepted:
            return replace(tried, reason=f"{tried.reason}; {decision.reason}"), state
    return replace(forecast, reason=decision.reason), None


# The ways that need no predictor


def _stale(failure: Failure) -> Formed:
    """The newest checkpoint as it is: the data since is skipped, its progress lost."""
    return Formed(replace(failure.checkpoint, iteration=failure.point.failure), "the checkpoint, further in the data")


def _oracle(failure: Failure) -> Formed:
    """The true state, which only a measurement has: its cost is the error of the measurement."""
    return Formed(failure.exact, "the true state")


def _moved(failure: Failure) -> Formed:
    """The true state at the failure, moved as far as `line` moves the checkpoint's; None where that declines.

    It costs the horizon, which is recomputed first, and has nothing to do with the failure: any run could do it at any
    time. What `line` costs less than it is what the prediction itself saves.
    """
    moved, exact, checkpoint = _predicted(LINE, failure), failure.exact, failure.checkpoint
    if moved.state is None:
        return moved
    before, after = checkpoint.weights, moved.state.weights
    weights = {name: values + (after[name] - before[name]) for name, values in exact.weights.items()}
    return replace(moved, state=replace(exact, weights=weights))


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
    """Control: each tensor of the checkpoint moved as far as `line` does, in a random direction."""
    moved = _predicted(LINE, failure)
    if moved.state is None:
        return moved
    generator = torch.Generator().manual_seed(failure.point.failure)
    weights = {}
    for name, values in failure.checkpoint.weights.items():
        direction = torch.randn(values.shape, generator=generator)
        weights[name] = values + direction * ((moved.state.weights[name] - values).norm() / direction.norm())
    return replace(moved, state=replace(moved.state, weights=weights), reason="a random direction, as far as the line")


def _scar(failure: Failure) -> Formed:
    """SCAR's running checkpoint at the failure: small parts are renewed often, those first that have moved most.

    It writes as many bytes as a whole checkpoint every interval: every 10 iterations the share of the blocks that has
    moved furthest since it was written. The moments go with the weights.

    Source: Qiao et al., Fault Tolerance in Iterative-Convergent Machine Learning, section 4 (priority checkpoints).
    """
    trajectory, point = failure.trajectory, failure.point
    every = trajectory.workload.snapshot_iterations
    begin = max(0, point.checkpoint - SCAR_WARM_UP_INTERVALS * point.interval)
    trainer = trajectory.at(begin)
    saved = trainer.state()
    for at in range(begin + every, point.failure + 1, every):
        trajectory.advance(trainer, at)
        saved = _renewed(saved, trainer.state(), every / point.interval)
    return Formed(replace(saved, iteration=point.failure), "the running checkpoint")


def _renewed(saved: State, now: State, share: float) -> State:
    """The saved state with the blocks renewed whose weights have moved furthest, as many as the share allows."""
    moved = {
        name: torch.stack([part.norm() for part in torch.split(now.weights[name] - values, SCAR_BLOCK_ELEMENTS)])
        for name, values in saved.weights.items()
    }
    every = torch.cat(list(moved.values()))
    least = every.sort(descending=True).values[max(0, round(share * len(every)) - 1)]

    def renewed(kept: Tensors, newest: Tensors) -> Tensors:
        chosen = {name: (moved[name] >= least).repeat_interleave(SCAR_BLOCK_ELEMENTS) for name in kept}
        return {
            name: torch.where(chosen[name][: values.numel()], newest[name], values) for name, values in kept.items()
        }

    return replace(
        saved,
        weights=renewed(saved.weights, now.weights),
        moments={moment: renewed(values, now.moments[moment]) for moment, values in saved.moments.items()},
    )


def _checkfree(failure: Failure) -> Formed:
    """The lost block as the weighted mean of those before and after it, without a checkpoint; None if it is no block.

    Each neighbour counts by its squared gradient norm, as its `exp_avg_sq` sums it up. The moments are formed likewise.

    Source: Blagoev et al., All is Not Lost: LLM Recovery without Checkpoints, Algorithm 1; there with the gradients of
    the last iteration.
    """
    lost: Collection[str] = failure.part.spans
    if not all(BLOCK.match(name) for name in lost):
        return Formed(None, "what was lost is no block")

    def beside(name: str, side: int) -> str:
        return BLOCK.sub(lambda block: f"blocks.{int(block[1]) + side}.", name, count=1)

    squares = failure.exact.moments["exp_avg_sq"]
    norms = {side: sum(float(squares[beside(name, side)].sum()) for name in lost) for side in (-1, 1)}
    before = norms[-1] / sum(norms.values())

    def formed(values: Tensors) -> Tensors:
        means = {name: before * values[beside(name, -1)] + (1 - before) * values[beside(name, 1)] for name in lost}
        return {**values, **means}

    moments = {moment: formed(values) for moment, values in failure.exact.moments.items()}
    state = replace(failure.exact, weights=formed(failure.exact.weights), moments=moments)
    return Formed(state, "the mean of the neighbours")


STALE, ORACLE, MOVED = "stale", "oracle", "recompute-moved"
WAYS: dict[str, Callable[[Failure], Formed]] = {
    STALE: _stale,
    MOVED: _moved,
    ORACLE: _oracle,
    "twin": _twin,
    "doubled": _doubled,
    "placebo": _placebo,
    "scar": _scar,
    "checkfree": _checkfree,
}
