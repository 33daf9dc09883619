"""One prediction under the guard, as `CPSRRecovery` makes it in mode `auto`; the watch afterwards is not played."""

from dataclasses import replace

from cpsr.benchmarks.recovery.lost import LostPart
from cpsr.benchmarks.recovery.predict import applied, target_of
from cpsr.benchmarks.recovery.trainer import State, Trainer
from cpsr.benchmarks.recovery.workload import Workload
from cpsr.predictor.calibration import of_part
from cpsr.predictor.displacement import measure, of_length, shorten
from cpsr.predictor.guard import LENGTHS, Guard
from cpsr.predictor.protocol import Forecast, History, StatePredictor

__all__ = ["PROBE_BATCHES", "guarded_state"]

PROBE_BATCHES = 4  # the product's default: the newest training batches before the checkpoint


def guarded_state(
    predictor: StatePredictor,
    history: History,
    workload: Workload,
    failure: int,
    checkpoint: State,
    trainer: Trainer,
    part: LostPart | None = None,
) -> tuple[Forecast, State | None]:
    """The forecast, and the state that training goes on from; None where recomputing is chosen instead.

    Args:
        predictor: as far as it has learned.
        history: up to the checkpoint.
        workload: whose schedule gives the times.
        failure: iteration at which the run is lost.
        checkpoint: the run's state at the last checkpoint; its moments are kept.
        trainer: evaluates the probes; its state is lost.
        part: that is lost, whose share of the expected cost is charged; None: all.
    """
    forecast = predictor.forecast(history, target_of(workload, failure))
    if not forecast.feasible:
        return forecast, None
    horizon = failure - checkpoint.iteration
    charged = of_part(forecast, 1.0 if part is None else part.share)
    if charged.expected_end_cost_iterations + charged.expected_deviation_iterations >= horizon:
        reason = f"recomputing {horizon} iterations is the safer choice; {forecast.reason}"
        return replace(forecast, feasible=False, reason=reason), None
    guard = Guard()
    moved = measure(history, forecast, predictor.predict(history, forecast))
    limited = shorten(forecast, dict(zip(moved.operators, guard.limit(moved).tolist(), strict=True)))
    decision = guard.finite(moved)
    if not decision.accepted:
        return replace(forecast, feasible=False, reason=decision.reason), None
    before = trainer.probe(checkpoint, PROBE_BATCHES)
    for length in LENGTHS:
        tried = of_length(limited, length)
        state = applied(predictor, history, tried, failure, checkpoint, part)
        decision = guard.veto(before, trainer.probe(replace(state, iteration=checkpoint.iteration), PROBE_BATCHES))
        if decision.accepted:
            return replace(tried, reason=f"{tried.reason}; {decision.reason}"), state
    return replace(forecast, feasible=False, reason=decision.reason), None
