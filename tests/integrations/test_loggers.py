"""Restarts and roll-backs in the loggers themselves; each test runs where its package is installed."""

from pathlib import Path

import pytest

from cpsr import Committed, Leaving, Restored, RolledBack
from cpsr.integrations.loggers import mlflow_events, tensorboard_events, wandb_events
from cpsr.life.events import Event

SCRATCH = Restored(0, None, None, "nothing", False, 0, "no checkpoint", 1, 1)
RESTART = Restored(8, 11, 8, "disk", False, 3, "the newest", 1, 1)
PREDICTED = Restored(11, 11, 8, "prediction", True, 0, "a line", 1, 1)
BACK = RolledBack(30, 8, "the predicted state diverged")
EVENTS: list[Event] = [SCRATCH, RESTART, Committed(12), PREDICTED, BACK, Leaving(20, "sigterm", True)]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    tell = tensorboard_events(writer)
    for event in EVENTS:
        tell(event)
    writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("cpsr/lost_iterations")] == [(8, 3), (11, 0), (8, 22)]
    texts = [one.tensor_proto.string_val[0].decode() for one in read.Tensors("cpsr/restart/text_summary")]
    assert texts == [
        "restart at iteration 8 (from disk): the newest",
        "restart at iteration 11 (predicted): a line",
        "back from iteration 30 to 8: the predicted state diverged",
    ]


def test_tensorboard_hides_the_discarded_steps(tmp_path: Path) -> None:
    """What the documented `purge_step` does: the value of a step is that of the life that trained it last."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for first, last, purge in [(1, 11, None), (9, 12, RESTART.iteration + 1)]:
        writer = SummaryWriter(tmp_path, purge_step=purge, filename_suffix=f".{first}")
        for step in range(first, last + 1):
            writer.add_scalar("loss", 100 * first + step, step)
        writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    expected = [*((step, 100 + step) for step in range(1, 9)), *((step, 900 + step) for step in range(9, 13))]
    assert [(one.step, one.value) for one in read.Scalars("loss")] == expected


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="cpsr", dir=tmp_path, mode="offline")
    tell = wandb_events(run)
    for event in EVENTS:
        tell(event)
    summary = dict(run.summary)
    run.finish()
    assert {name: value for name, value in summary.items() if name.startswith("cpsr/")} == {
        "cpsr/restarts": 3,
        "cpsr/iteration": 8,
        "cpsr/predicted": False,
        "cpsr/lost_iterations": 22,
    }


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"file://{tmp_path}")
    run_id = client.create_run(client.create_experiment("cpsr")).info.run_id
    tell = mlflow_events(client, run_id)
    for event in EVENTS:
        tell(event)
    history = client.get_metric_history(run_id, "cpsr.lost_iterations")
    assert sorted((one.step, one.value) for one in history) == [(8, 3), (8, 22), (11, 0)]
    tags = client.get_run(run_id).data.tags
    assert tags["cpsr.restart"] == "back from iteration 30 to 8: the predicted state diverged"
    assert tags["cpsr.predicted"] == "false"
