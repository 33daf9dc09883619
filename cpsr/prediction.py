"""Take an engine that stands at its last checkpoint to the step of the failure, by prediction and under guard."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from cpsr.checkpoint.history import DiskHistory
from cpsr.checkpoint.store import CheckpointStore
from cpsr.config import GuardConfig
from cpsr.engines.adapter import EngineAdapter
from cpsr.group import Group
from cpsr.predictor.displacement import Displacements, measure, of_length, shorten
from cpsr.predictor.guard import LENGTHS, Guard
from cpsr.predictor.protocol import Forecast, History, StatePredictor, Target
from cpsr.probes import Probes
from cpsr.scalars import Scalars

__all__ = ["Forecaster", "Prediction", "StatePrediction"]

Forecaster = Callable[[History, Target], Forecast]

NO_PROBES = (
    "there are no probe batches on some rank: where the module does not return its loss, give loss_fn, and on "
    "pipelines probe_batches with it"
)
SHORTENED_NAMES = 8  # names of shortened operators that the journal lists; their number is always given


@dataclass(frozen=True)
class Prediction:
    """What came of an attempt to predict.

    Attributes:
        accepted: the engine holds the predicted state; False: its weights may be anything and must be restored.
        reason: one sentence for people.
        forecast: how the predictor meant to form the state.
        target: where it was to be.
        guard: the guard's numbers, for the journal.
        predict_seconds: reading the history, forming the weights and writing them into the engine's master weights.
        inject_seconds: pushing them down and evaluating the probes.
    """

    accepted: bool
    reason: str
    forecast: Forecast
    target: Target
    guard: dict[str, Any]
    predict_seconds: float = 0.0
    inject_seconds: float = 0.0


class StatePrediction:
    """Predicts on all ranks together; every method is a collective.

    Args:
        adapter: the engine, exactly at the checkpoint.
        group: the ranks.
        store: the run's checkpoints: the history.
        predictor: forms the forecast.
        probes: what the loss veto evaluates.
        config: the guard's limits.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        group: Group,
        store: CheckpointStore,
        predictor: StatePredictor,
        probes: Probes,
        config: GuardConfig,
    ) -> None:
        self._adapter = adapter
        self._group = group
        self._store = store
        self._predictor = predictor
        self._probes = probes
        self._config = config
        self._guard = Guard(config.loss_tolerance_nats, config.displacement_limit)

    def attempt(
        self,
        scalars: Scalars,
        failure_iteration: int,
        recomputed_iterations: int | None,
        forecaster: Forecaster | None = None,
        *,
        partial: bool = True,
        stale: bool = False,
        only: Collection[str] | None = None,
        left: Callable[[], bool] | None = None,
    ) -> Prediction:
        """Predict the state at the failure, write it into the engine and judge it.

        Args:
            scalars: the checkpoint's small state.
            failure_iteration: f.
            recomputed_iterations: refuse where the expected lag is not below these, which going on exactly would have
                to recompute; None predicts whatever it costs.
            forecaster: decides instead of the predictor's own `forecast`; the same on every rank.
            partial: whether partial checkpoints count, those between the checkpoint and the failure too: each rank's
                operators are then predicted from their own newest weights, while moments are the checkpoint's.
            stale: whether going on exactly would go on with the experts that are older than the checkpoint, too: then
                what these lag is no reason to refuse.
            only: operators of this rank to write; the others stay what the engine holds. None: all.
            left: puts what is left of this rank's exact state at the failure into the engine, and says whether that is
                all of it, so that nothing is predicted here; a collective.

        Returns:
            Where it is not accepted, the engine's counters and perhaps its weights have been changed.
        """
        started = time.perf_counter()
        ahead = failure_iteration - scalars.iteration
        history = self._history(scalars, failure_iteration, partial)
        try:
            loss_checkpoint = self.probe_loss(scalars.probes)
            rates = self._adapter.skip_ahead(ahead)
            # No earlier than a partial checkpoint: the same rates were added there in another order.
            times = [entry.time for entry in history.entries if entry.iteration > scalars.iteration]
            target = Target(
                failure_iteration,
                max([scalars.cumulative_learning_rate + sum(rates), *times]),
                max([scalars.peak_learning_rate, *rates]),
            )
            forecast = (forecaster or self._predictor.forecast)(history, target)
            refusal = _refusal(forecast, recomputed_iterations, stale=stale)
            if not self._group.all(refusal is None):
                return Prediction(False, refusal or "another rank cannot predict its part", forecast, target, {})
            limited, guard = self._limit(history, forecast)
            if not guard["finite"]["accepted"]:
                return Prediction(False, guard["finite"]["reason"], forecast, target, guard)
            decided = time.perf_counter() - started
            lost = left is None or not left()
            if left is not None and not self.finite():
                return Prediction(False, "what a rank left is not finite", forecast, target, guard)
            names = None if only is None else frozenset(only)
            return self._write_and_judge(
                scalars, history, limited, target, loss_checkpoint, guard, decided, lost=lost, only=names
            )
        finally:
            history.close()

    def _write_and_judge(
        self,
        scalars: Scalars,
        history: DiskHistory,
        forecast: Forecast,
        target: Target,
        loss_checkpoint: float | None,
        guard: dict[str, Any],
        predict_seconds: float,
        *,
        lost: bool,
        only: frozenset[str] | None,
    ) -> Prediction:
        """Write the state, where this rank's is lost, shorter and shorter until the guard accepts it."""
        inject_seconds = 0.0
        guard["tried"] = []
        for length in LENGTHS:
            started = time.perf_counter()
            tried = of_length(forecast, length)
            if lost:
                self._write(history, tried, only)
            written = time.perf_counter()
            self._adapter.push_down()
            accepted, reason = self.judge(scalars, loss_checkpoint, guard)
            guard["tried"].append({"length": length, **guard["loss"]})
            predict_seconds += written - started
            inject_seconds += time.perf_counter() - written
            if accepted:
                break
        if length < 1.0:
            reason += f"; at {length:g} of the displacement's length, longer ones were vetoed" if accepted else ""
        return Prediction(accepted, f"{tried.reason}; {reason}", tried, target, guard, predict_seconds, inject_seconds)

    def _history(self, scalars: Scalars, failure_iteration: int, partial: bool) -> DiskHistory:
        """The checkpoints that every rank can read and that led to this state, or on from it to the failure."""
        newest = failure_iteration if partial else scalars.iteration
        history = DiskHistory(self._store.directory, self._group.rank, before=newest + 1, partial=partial)
        readable = self._group.gather([entry.iteration for entry in history.entries])
        common = set(readable[0]).intersection(*readable[1:])
        history.keep({iteration for iteration in common if iteration >= scalars.history_start})
        return history

    def _limit(self, history: DiskHistory, forecast: Forecast) -> tuple[Forecast, dict[str, Any]]:
        names = sorted({name for part in self._group.gather(list(history.operators)) for name in part})
        moved = measure(history, forecast, self._predictor.predict(history, forecast), names)
        for sums in (moved.predicted_squared, moved.history_squared, moved.not_finite):
            self._group.reduce(sums)
        finite = self._guard.finite(moved)
        scales = self._scales(moved)
        shortened = sorted(name for name, scale in scales.items() if scale < 1.0)
        guard = {
            "finite": {"accepted": finite.accepted, "reason": finite.reason, **finite.numbers},
            "shortened": len(shortened),
            "shortened_names": shortened[:SHORTENED_NAMES],
            "smallest_scale": min(scales.values(), default=1.0),
        }
        limited = shorten(forecast, scales)
        settings = {**limited.settings, "limited_operators": len(shortened)}
        if history.partial_iterations:  # no rank's own word: what is measured is of all of them
            own_series = int(self._group.sum(settings.get("own_series_operators", 0)))
            settings |= {"own_series_operators": own_series}
        # A rank may hold only tensors that kept the line's direction: all name what any of them did.
        methods = self._group.gather(limited.method)
        method = self._predictor.name if self._predictor.name in methods else methods[0]
        return replace(limited, method=method, settings=settings), guard

    def _scales(self, moved: Displacements) -> dict[str, float]:
        return dict(zip(moved.operators, self._guard.limit(moved).tolist(), strict=True))

    def _write(self, history: DiskHistory, forecast: Forecast, only: frozenset[str] | None) -> None:
        operators = self._adapter.shard().operators
        with torch.no_grad():
            for name, start, values in self._predictor.predict(history, forecast):
                if only is None or name in only:
                    operators[name].parameter.values[start : start + values.numel()].copy_(values)

    def probe_loss(self, saved: list[Any]) -> float | None:
        """Mean loss of saved probes over all ranks with the engine's present weights; None where there are none."""
        count = int(self._group.reduce(torch.tensor([self._probes.count(saved)]), "min").item())
        if count == 0:
            return None
        losses = self._probes.losses(saved, count)
        if not self._group.all(len(losses) == count):
            return None
        return self._group.mean(sum(losses) / count)

    def finite(self) -> bool:
        """Whether every weight and moment of every rank is; a collective."""
        tensors = (tensor for _, tensor in self._adapter.shard().tensors() if tensor.is_floating_point())
        return self._group.all(all(bool(torch.isfinite(tensor).all()) for tensor in tensors))

    def judge(
        self, scalars: Scalars, loss_checkpoint: float | None, guard: dict[str, Any], what: str = "predicted state"
    ) -> tuple[bool, str]:
        """Compare the probes' loss with the engine's present weights to that at the checkpoint; a collective.

        Args:
            scalars: the checkpoint's small state, which holds the probes.
            loss_checkpoint: their loss there, None where it could not be evaluated: then nothing is vetoed.
            guard: takes the numbers, for the journal.
            what: the engine holds, for people.

        Returns:
            Whether the state is accepted, and why.
        """
        loss_predicted = self.probe_loss(scalars.probes)
        if loss_checkpoint is None or loss_predicted is None:
            why = self._probes.off or NO_PROBES
            guard["loss"] = {"accepted": True, "reason": f"not evaluated: {why}"}
            return True, f"no loss veto: {why}"
        decision = self._guard.veto(loss_checkpoint, loss_predicted, what=what)
        guard["loss"] = {"accepted": decision.accepted, "reason": decision.reason, **decision.numbers}
        return decision.accepted, decision.reason


def _refusal(forecast: Forecast, recomputed_iterations: int | None, *, stale: bool) -> str | None:
    if not forecast.feasible:
        return f"prediction is not feasible: {forecast.reason}"
    expected = forecast.expected_lag_iterations
    if stale:  # of what was taken with the checkpoint
        expected = float(forecast.settings.get("expected_lag_iterations", expected))
    if recomputed_iterations is not None and expected >= recomputed_iterations:
        return (
            f"recomputing {recomputed_iterations} iterations costs no more than a prediction, which is expected to "
            f"cost {expected:.0f}"
        )
    return None
