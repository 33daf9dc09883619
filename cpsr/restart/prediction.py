"""Advances an engine from its checkpoint to the step of the failure, by a prediction that is checked on probes."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from cpsr.checkpoint.history import DiskHistory, RankSlices
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.adapter import EngineAdapter
from cpsr.errors import UnsupportedEngineError
from cpsr.job import Job
from cpsr.journal import Beginning
from cpsr.predictor.guard import Guard, attempts, measure, shorten
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import STALE_METHOD, Forecast, Target
from cpsr.restart.restored_state import Recomputes, Refusal, RefusedError, Restored
from cpsr.state import codec
from cpsr.state.small_state import Scalars

__all__ = ["LossFunction", "Probes", "StatePrediction"]

logger = logging.getLogger(__name__)

LossFunction = Callable[[Any], torch.Tensor]

NO_PROBES = (
    "there are no probe batches on some rank: where the module does not return its loss, give loss_fn, and on "
    "pipelines probe_batches with it"
)
SHORTENED_NAMES = 8  # names of shortened operators that the journal lists; their number is always given


class Probes:
    """The last few inputs of training, or the user's batches.

    Args:
        adapter: the engine.
        keep: number of recent inputs to keep; 0 turns probes off.
        loss_fn: the user's loss of one batch, without backward; where None, the module itself must return a loss.
        batches: held-out batches of the user's, used instead of recent inputs.

    Attributes:
        of_batches: whether inputs are batches of the data loader; else those of forwards.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        keep: int,
        loss_fn: LossFunction | None = None,
        batches: Sequence[Any] | None = None,
    ) -> None:
        self._adapter = adapter
        self._loss_fn = loss_fn
        self.of_batches = loss_fn is not None
        self._fixed = None if batches is None else [self._as_probe(batch) for batch in batches]
        self._recent: deque[dict[str, Any]] = deque(maxlen=keep)
        self._checked = False
        self.off: str | None = "restart.probe_batches is 0" if keep == 0 and batches is None else None

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember (not copy) the inputs of a training forward."""
        if self._fixed is None and self.off is None:
            self._recent.append({"args": args, "kwargs": kwargs})

    def on_batch(self, batch: Any) -> None:
        """Remember (not copy) a batch of the data loader."""
        if self._fixed is None and self.off is None:
            self._recent.append({"batch": batch})

    def saved(self) -> list[Any]:
        """The recent inputs, for a checkpoint; empty where no loss could be evaluated from them."""
        if self._loss_fn is None and not self._adapter.can_evaluate:
            return []
        if not self._checked and self._recent:
            self._checked = True  # inputs of one kind come from one loop
            try:
                codec.encode(list(self._recent))
            except UnsupportedEngineError as error:
                self._turn_off(f"recent inputs are not plain data ({error})")
                self._recent.clear()
        return list(self._recent)

    def count(self, saved: list[Any]) -> int:
        """Probes that this rank can evaluate."""
        return len(saved if self._fixed is None else self._fixed)

    def losses(self, saved: list[Any], count: int) -> list[float]:
        """This rank's loss of the first `count` probes with the present weights, in nats.

        Args:
            saved: what `saved` returned when the checkpoint was taken; not used where the user gave batches.
            count: the same on every rank: an evaluation may be a collective.

        Returns:
            Nothing where the module gives no loss; `off` then says why.
        """
        probes = saved if self._fixed is None else self._fixed
        try:
            return [self._loss(_to_device(probe, self._adapter.device)) for probe in probes[:count]]
        except Exception as error:  # noqa: BLE001 - no error of a user's loss may prevent a restart
            self._turn_off(f"{type(error).__name__}: {error}")
            return []

    def _turn_off(self, why: str) -> None:
        self.off = why
        logger.warning("the guard's loss veto is off: %s; give loss_fn together with probe_batches to turn it on", why)

    def _loss(self, probe: dict[str, Any]) -> float:
        with self._adapter.evaluation():
            if self._loss_fn is None:
                return float(self._adapter.evaluate(tuple(probe["args"]), probe["kwargs"]))
            return float(self._loss_fn(probe["batch"]))

    def _as_probe(self, batch: Any) -> dict[str, Any]:
        if self._loss_fn is not None:
            return {"batch": batch}
        if isinstance(batch, dict):
            return {"args": (), "kwargs": batch}
        return {"args": tuple(batch) if isinstance(batch, list | tuple) else (batch,), "kwargs": {}}


class StatePrediction:
    """Predicts on all ranks together; every method is a collective."""

    def __init__(self, job: Job, store: CheckpointStore, predictor: LinePredictor, probes: Probes) -> None:
        self._adapter = job.adapter
        self._group = job.group
        self._store = store
        self.predictor = predictor
        self._probes = probes
        self._guard = Guard(job.config.restart.loss_tolerance_nats)
        self._moves = job.config.predictor.move

    def attempt(
        self,
        exact: Restored,
        iteration: int,
        take_dump: Callable[[], bool] | None,
        *,
        recomputed_iterations: int | None,
        lost_here: bool,
    ) -> Restored:
        """Predict a state, write it into the engine and judge it.

        Args:
            exact: how the life would begin at the checkpoint, which the engine holds.
            iteration: of the state: f, or that of the checkpoint, whose weights are then moved alone.
            take_dump: loads this rank's emergency dump into the engine, and returns whether there was one, so that
                nothing is predicted here; a collective. None: no rank has left one.
            recomputed_iterations: refuse where the expected end cost and its uncertainty are not below these, which an
                exact restart recomputes up to `iteration`; None predicts at any expected cost.
            lost_here: whether this rank's state is lost; that of the others is exact. The expected end cost is that of
                the share of all elements that is lost.

        Returns:
            How the life begins, without sources.

        Raises:
            RefusedError: nothing can be predicted, it would cost more than recomputing, or the guard refuses it. The
                engine's counters and perhaps its weights have been changed.
        """
        started, scalars = time.perf_counter(), exact.scalars
        assert scalars is not None
        history = self._history(scalars)
        try:
            share = self._lost_share(lost_here=lost_here)
            rates = self._adapter.skip_ahead(iteration - scalars.iteration)
            target = Target(
                iteration,
                scalars.cumulative_learning_rate + sum(rates),
                max([scalars.peak_learning_rate, *rates]),
                share,
                moves=not rates,
            )
            forecast = self.predictor.forecast(history, target)
            refusal = self._refusal(forecast, history, scalars, iteration, recomputed_iterations)
            if not self._group.all(refusal is None):
                raise _refused(refusal or "another rank cannot predict its part", forecast, {})
            limited, guard = self._limit(history, forecast)
            if not guard["finite"]["accepted"]:
                raise _refused(guard["finite"]["reason"], forecast, guard)
            # A checkpoint that is not finite is left out: its moments then go with the weights of one before it.
            changed = take_dump is not None or forecast.settings["base_iteration"] != scalars.iteration
            unmoved = not changed and forecast.method == STALE_METHOD
            loss_checkpoint = None if unmoved else self.probe_loss(scalars.probes)
            decided = time.perf_counter() - started
            lost = take_dump is None or not take_dump()
            if take_dump is not None and not self.finite():
                raise _refused("what a rank left is not finite", forecast, guard)
            tries = attempts(limited, recomputed_iterations)
            tried, reason, seconds = self._write_and_judge(
                scalars, history, tries, loss_checkpoint, guard, lost=lost, changed=changed
            )
            seconds = decided + seconds[0], seconds[1]
            if not guard["loss"]["accepted"]:
                raise _refused(reason, tried, guard, *seconds)
            return replace(
                exact,
                beginning=Beginning.PREDICTED,
                restored_iteration=iteration,
                reason=reason,
                forecast=tried,
                guard=guard,
                cumulative_learning_rate=target.time,
                predict_seconds=seconds[0],
                inject_seconds=exact.inject_seconds + seconds[1],
            )
        finally:
            history.close()

    def _lost_share(self, *, lost_here: bool) -> float:
        """Share of all ranks' elements that is lost; what several ranks own counts as often."""
        own = float(sum(one.parameter.numel for one in self._adapter.shard().operators.values()))
        lost, total = self._group.reduce(
            torch.tensor([own * lost_here, own], dtype=torch.float64, device="cpu")
        ).tolist()
        return lost / total if total else 1.0

    def _refusal(
        self,
        forecast: Forecast,
        history: DiskHistory,
        scalars: Scalars,
        iteration: int,
        recomputed_iterations: int | None,
    ) -> str | None:
        """Why this is not done, by the expected end costs; None where it may be; a collective."""
        ahead = iteration - scalars.iteration
        rival = math.inf
        if self._moves and recomputed_iterations is not None and ahead:
            here = Target(scalars.iteration, scalars.cumulative_learning_rate, scalars.peak_learning_rate, moves=True)
            moved = self.predictor.forecast(history, here)
            if moved.is_safe(recomputed_iterations - ahead):
                rival = ahead + moved.expected_end_cost_iterations
        if not forecast.feasible:
            return f"prediction is not feasible: {forecast.reason}"
        cost = f"{forecast.expected_end_cost_iterations:.0f} ± {forecast.expected_deviation_iterations:.0f}"
        if recomputed_iterations is not None and not forecast.is_safe(recomputed_iterations):
            return (
                f"recomputing {recomputed_iterations} iterations is the safer choice: the expected end cost of a "
                f"prediction is {cost}"
            )
        if forecast.expected_end_cost_iterations >= rival:
            return f"moving the checkpoint and recomputing is expected to cost {rival:.0f}, a prediction {cost}"
        return None

    def _write_and_judge(
        self,
        scalars: Scalars,
        history: DiskHistory,
        tries: Iterable[tuple[float, Forecast]],
        loss_checkpoint: float | None,
        guard: dict[str, Any],
        *,
        lost: bool,
        changed: bool,
    ) -> tuple[Forecast, str, tuple[float, float]]:
        """Write the predicted state where this rank's is lost, with shorter displacements until the guard accepts.

        Args:
            scalars: the checkpoint's small state.
            history: of the checkpoints.
            tries: lengths and forecasts, in order; at least one.
            loss_checkpoint: as in `judge`.
            guard: takes the numbers, for the journal.
            lost: whether this rank's state is.
            changed: whether the weights of some rank are not the checkpoint's: else an unmoved state needs no loss.

        Returns:
            What was written last, the reason to keep or refuse it, and seconds that predicting and injecting took.
        """
        predict_seconds = inject_seconds = 0.0
        guard["tried"] = []
        for length, tried in tries:
            started = time.perf_counter()
            kept = tried.method == STALE_METHOD and not changed
            if lost and not (kept and length == 1.0):  # else the engine has these weights already, unrounded
                self._write(history, tried)
            written = time.perf_counter()
            self._adapter.push_down()
            if kept:
                accepted, reason = True, "no loss veto: no weight was moved"
                guard["loss"] = {"accepted": True, "reason": "not evaluated: no weight was moved"}
            else:
                accepted, reason = self.judge(scalars, loss_checkpoint, guard)
            guard["tried"].append({"length": length, **guard["loss"]})
            predict_seconds += written - started
            inject_seconds += time.perf_counter() - written
            if accepted:
                break
        if length < 1.0 and accepted:
            reason += f"; at {length:g} of the displacement's length, longer ones were vetoed"
        return tried, f"{tried.reason}; {reason}", (predict_seconds, inject_seconds)

    def _history(self, scalars: Scalars) -> DiskHistory:
        """The checkpoints that every rank can read and that led to this state."""
        slices = RankSlices.of(self._group.rank, self._group.size, self._adapter.shard())
        history = DiskHistory(self._store.directory, slices, before=scalars.iteration + 1)
        readable = self._group.gather([entry.iteration for entry in history.entries])
        common = set(readable[0]).intersection(*readable[1:])
        history.keep({iteration for iteration in common if iteration >= scalars.history_start})
        return history

    def _limit(self, history: DiskHistory, forecast: Forecast) -> tuple[Forecast, dict[str, Any]]:
        names = sorted({name for part in self._group.gather(list(history.operators)) for name in part})
        moved = measure(history, forecast, self.predictor.predict(history, forecast), names)
        sums = moved.predicted_squared, moved.history_squared, moved.not_finite
        reduced = self._group.reduce(torch.cat([one.flatten() for one in sums]))
        for one, total in zip(sums, torch.split(reduced, [one.numel() for one in sums]), strict=True):
            one.copy_(total.view_as(one))
        finite = self._guard.finite(moved)
        scales = dict(zip(moved.operators, self._guard.limit(moved).tolist(), strict=True))
        shortened = sorted(name for name, scale in scales.items() if scale < 1.0)
        guard = {
            "finite": {"accepted": finite.accepted, "reason": finite.reason, **finite.numbers},
            "shortened": len(shortened),
            "shortened_names": shortened[:SHORTENED_NAMES],
            "smallest_scale": min(scales.values(), default=1.0),
        }
        limited = shorten(forecast, scales)
        # A rank may hold no older expert, or only tensors that kept the direction of the line: all name what any did.
        told = self._group.gather([limited.settings.get("held_operators", 0), limited.method])
        held, methods = max(held for held, _ in told), [method for _, method in told]
        settings = {**limited.settings, "limited_operators": len(shortened), "held_operators": held}
        method = self.predictor.name if self.predictor.name in methods else methods[0]
        return replace(limited, method=method, settings=settings), guard

    def _write(self, history: DiskHistory, forecast: Forecast) -> None:
        operators = self._adapter.shard().operators
        with torch.no_grad():
            for name, start, values in self.predictor.predict(history, forecast):
                operators[name].parameter.values[start : start + values.numel()].copy_(values)

    def probe_loss(self, saved: list[Any]) -> float | None:
        """Mean loss of saved probes over all ranks with the engine's present weights; None where there are none."""
        count = int(self._group.reduce(torch.tensor([self._probes.count(saved)], device="cpu"), "min").item())
        if count == 0:
            return None
        losses = self._probes.losses(saved, count)
        own = [sum(losses) / count, float(len(losses) == count)]
        total, evaluated = self._group.reduce(torch.tensor(own, dtype=torch.float64, device="cpu")).tolist()
        return total / self._group.size if evaluated == self._group.size else None

    def finite(self) -> bool:
        """Whether every weight and moment of every rank is finite; a collective."""
        tensors = (tensor for _, tensor in self._adapter.shard().tensors() if tensor.is_floating_point())
        return self._group.all(all(map(_is_finite, tensors)))

    def judge(
        self, scalars: Scalars, loss_checkpoint: float | None, guard: dict[str, Any], what: str = "predicted state"
    ) -> tuple[bool, str]:
        """Compare the probes' loss with the engine's present weights to that at the checkpoint; a collective.

        Args:
            scalars: the checkpoint's small state, which holds the probes.
            loss_checkpoint: their loss there, None where it could not be evaluated: then nothing is vetoed.
            guard: takes the numbers, for the journal.
            what: name of the engine's present state, for messages.

        Returns:
            Whether the state is accepted, and why.
        """
        loss_predicted = None if loss_checkpoint is None else self.probe_loss(scalars.probes)
        if loss_checkpoint is None or loss_predicted is None:
            why = self._probes.off or NO_PROBES
            guard["loss"] = {"accepted": True, "reason": f"not evaluated: {why}"}
            return True, f"no loss veto: {why}"
        decision = self._guard.veto(loss_checkpoint, loss_predicted, what=what)
        guard["loss"] = {"accepted": decision.accepted, "reason": decision.reason, **decision.numbers}
        return decision.accepted, decision.reason


def _refused(
    reason: str, forecast: Forecast, guard: dict[str, Any], predict_seconds: float = 0.0, inject_seconds: float = 0.0
) -> RefusedError:
    dear = Recomputes.CHEAPER if forecast.feasible else Recomputes.INFEASIBLE
    why = Recomputes.PREDICTION_REFUSED if guard else dear
    return RefusedError(Refusal(why, reason, forecast, guard, predict_seconds, inject_seconds))


def _is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite; one that is reaches the sum, which takes a third of the time."""
    return math.isfinite(float(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_to_device(item, device) for item in value])
    return value
