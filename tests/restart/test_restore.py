import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from cpsr import CPSRRecovery
from cpsr.checkpoint.tiers import Source
from cpsr.engines.torch import TorchAdapter
from cpsr.errors import CheckpointError
from cpsr.predictor.protocol import Forecast, History, Target
from cpsr.predictor.vitp import VITPPredictor
from cpsr.restart.prediction import StatePrediction
from cpsr.restart.restore import Restored
from cpsr.restart.sources import MemorySources
from cpsr.state.shard import Shard
from tests.committed import wait_until_committed
from tests.costs import priced

INTERVAL = 5
Mode = Literal["auto", "predict", "exact"]


class Regression(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.linear(batch) - 2.0 * batch).square().mean()
        return loss


def job(seed: int = 0) -> tuple[Regression, TorchAdapter]:
    torch.manual_seed(seed)
    model = Regression()
    return model, TorchAdapter(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def settings(run_dir: Path, mode: Mode = "predict", **sections: Any) -> dict[str, Any]:
    # What a life leaves in memory is exact, and would spare the next one its prediction.
    checkpoint = {"interval_iterations": INTERVAL, "shared_memory": False}
    restart = {"loss_tolerance_nats": 10.0}
    return {"run_dir": str(run_dir), "mode": mode, "checkpoint": checkpoint, "restart": restart, **sections}


def fail_at(
    iterations: int, run_dir: Path, mode: Mode = "predict", not_finite_at: int | None = None, **sections: Any
) -> Restored:
    """A life that ends in its training loop; how it began."""
    model, adapter = job()

    def life() -> None:
        for batch in recovery.resume(torch.randn(100, 8, 4)):
            adapter.optimizer.zero_grad()
            model(batch).backward()
            adapter.optimizer.step()
            if recovery.iteration == not_finite_at:
                model.linear.bias.data.fill_(math.nan)
            since = recovery.iteration - 1 - recovery.restored.restored_iteration
            if since > 0 and since % INTERVAL == 0:  # the snapshot of the step before is complete
                wait_until_committed(run_dir, recovery.iteration - 1)
            if recovery.iteration == iterations:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), CPSRRecovery(adapter, settings(run_dir, mode, **sections)) as recovery:
        life()
    return recovery.restored


def test_a_state_in_memory_that_cannot_be_read_leaves_the_checkpoint_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "exact")
    config["checkpoint"]["shared_memory"] = True
    config["memory"] = {"interval_iterations": 2}
    model, adapter = job()
    kept: dict[int, torch.Tensor] = {}

    def life() -> None:
        for batch in recovery.resume(torch.randn(100, 8, 4)):
            kept[recovery.iteration] = model.linear.weight.detach().clone()
            if recovery.iteration == 2 * INTERVAL + 3:
                wait_until_committed(tmp_path, 2 * INTERVAL)
                raise ZeroDivisionError
            adapter.optimizer.zero_grad()
            model(batch).backward()
            adapter.optimizer.step()

    with pytest.raises(ZeroDivisionError), CPSRRecovery(adapter, config) as recovery:
        life()

    def torn(memory: MemorySources, source: Source, into: Shard) -> Any:
        assert source.iteration > 2 * INTERVAL
        for _, values in into.tensors():
            values.fill_(7)
        raise CheckpointError("torn")

    monkeypatch.setattr(MemorySources, "load", torn)
    model, adapter = job(seed=1)
    with CPSRRecovery(adapter, config) as recovery:
        assert recovery.restored.restored_iteration == 2 * INTERVAL
        assert torch.equal(model.linear.weight, kept[2 * INTERVAL])


def price(monkeypatch: pytest.MonkeyPatch, skip: float, move: float) -> None:
    """See `priced`, however young the run is."""
    monkeypatch.setattr("cpsr.predictor.line.table", lambda: priced(skip, move))
    monkeypatch.setattr("cpsr.predictor.calibration.YOUNGEST_ITERATIONS", 0)


@pytest.mark.parametrize(
    ("skip", "move", "asked", "method", "at"),
    [
        (0.9, -0.1, False, "line", 23),
        (0.9, 0.1, True, "stale", 23),
        (1.5, -0.1, False, "exact", 20),
        (1.5, -0.1, True, "line", 20),
        (0.9, -0.1, True, "line", 23),  # a failure costs less there, and both gain by the move
        (1.5, 0.1, True, "exact", 20),
    ],
)
def test_auto_takes_the_way_that_is_expected_to_cost_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: float, move: float, asked: bool, method: str, at: int
) -> None:
    price(monkeypatch, skip, move)
    fail_at(23, tmp_path, "auto", predictor={"move": asked})
    restored = fail_at(24, tmp_path, "auto", predictor={"move": asked})
    assert (restored.method, restored.restored_iteration) == (method, at), restored.reason
    assert restored.predicted is (method != "exact")
    if restored.predicted:
        assert restored.expected_end_cost_iterations is not None
        assert restored.expected_end_cost_iterations < 3  # what recomputing costs
    if at == 20:
        assert restored.scalars is not None
        assert restored.data == restored.scalars.data  # with the random states of batches that are drawn ahead


def test_every_rank_asks_as_often_whether_or_not_it_can_predict_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(23, tmp_path, "auto", predictor={"move": True})
    asked: list[int] = []

    def none(_predictor: VITPPredictor, _history: History, target: Target) -> Forecast:
        asked.append(target.iteration)
        return Forecast("vitp", False, {}, 3.0, "no operator here was saved in every checkpoint", {})

    monkeypatch.setattr(VITPPredictor, "forecast", none)
    assert fail_at(24, tmp_path, "auto", predictor={"move": True}).method == "exact"
    assert asked == [23, 20, 20]  # another rank, which can, also asks what a move would cost


def test_weights_before_a_checkpoint_that_is_not_finite_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    price(monkeypatch, 0.9, 0.1)
    fail_at(23, tmp_path, not_finite_at=20)
    restored = fail_at(24, tmp_path)
    assert restored.forecast is not None
    assert restored.forecast.settings["base_iteration"] == 15
    assert restored.guard["loss"]["reason"] == "vetoed: the loss at the checkpoint is nan"
    assert (restored.method, restored.restored_iteration) == ("exact", 20)


def test_a_stale_state_has_the_weights_of_the_checkpoint_unrounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    price(monkeypatch, 0.9, 0.1)
    monkeypatch.setattr(StatePrediction, "_write", lambda *_: pytest.fail("what is read from a history is float32"))
    fail_at(23, tmp_path)
    assert fail_at(24, tmp_path).method == "stale"
