"""Restarts and roll-backs in TensorBoard, W&B and MLflow: callbacks for `recovery.on_event`.

Nothing of the three packages is imported: each callback takes the object that the script logs with.
"""

from collections.abc import Callable
from typing import Any

from cpsr.life.events import Event, EventCallback, Restored, RolledBack

__all__ = ["mlflow_events", "tensorboard_events", "wandb_events"]

Note = Callable[[int, int, bool, str], None]


def tensorboard_events(writer: Any) -> EventCallback:
    """Note restarts as a text and a scalar at the step where training continues.

    TensorBoard hides discarded steps only for a writer that is made with
    `purge_step=recovery.iteration + 1`, inside the `with` block.

    Args:
        writer: a `SummaryWriter` of torch or tensorboardX.
    """

    def note(step: int, lost_iterations: int, predicted: bool, text: str) -> None:
        writer.add_text("cpsr/restart", text, step)
        writer.add_scalar("cpsr/lost_iterations", lost_iterations, step)
        writer.flush()

    return _noting(note)


def wandb_events(run: Any) -> EventCallback:
    """Note restarts as an alert and in the summary; `iteration` becomes the axis of all metrics.

    W&B refuses steps that are earlier than its newest: log `{"iteration": recovery.iteration, ...}` without `step`.

    Args:
        run: what `wandb.init()` returned.
    """
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")

    def note(step: int, lost_iterations: int, predicted: bool, text: str) -> None:
        run.summary["cpsr/restarts"] = (run.summary.get("cpsr/restarts") or 0) + 1
        run.summary["cpsr/iteration"] = step
        run.summary["cpsr/predicted"] = predicted
        run.summary["cpsr/lost_iterations"] = lost_iterations
        run.alert(title="CPSR restart", text=text)

    return _noting(note)


def mlflow_events(client: Any, run_id: str) -> EventCallback:
    """Note restarts as tags of the run, and as a metric at the step where training continues.

    Args:
        client: an `mlflow.MlflowClient`.
        run_id: of the run that the script logs to.
    """

    def note(step: int, lost_iterations: int, predicted: bool, text: str) -> None:
        client.set_tag(run_id, "cpsr.restart", text)
        client.set_tag(run_id, "cpsr.predicted", str(predicted).lower())
        client.log_metric(run_id, "cpsr.lost_iterations", lost_iterations, step=step)

    return _noting(note)


def _noting(note: Note) -> EventCallback:
    """Call `note` with the step, the iterations that are trained again, the label, and one sentence."""

    def on_event(event: Event) -> None:
        if isinstance(event, Restored) and event.source != "nothing":
            label = "predicted" if event.predicted else f"from {event.source}"
            text = f"restart at iteration {event.iteration} ({label}): {event.reason}"
            note(event.iteration, event.lost_iterations, event.predicted, text)
        elif isinstance(event, RolledBack):
            lost = event.from_iteration - event.to_iteration
            text = f"back from iteration {event.from_iteration} to {event.to_iteration}: {event.reason}"
            note(event.to_iteration, lost, False, text)

    return on_event
