from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from cpsr import CPSRRecovery
from cpsr.engines.torch import TorchAdapter
from cpsr.predictor.protocol import Forecast, History, Target


def test_a_rehearsal_predicts_with_what_was_learned_by_its_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = {"interval_iterations": 10, "fsync": False, "full_checkpoints": 5}
    config = {"run_dir": str(tmp_path), "checkpoint": kept}
    known: list[int] = []
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        predictor = recovery._predictor

        def forecast(history: History, target: Target) -> Forecast:
            known.append(len(predictor.state_dict()["outcomes"]))
            return predictor.forecast(history, target)

        for batch in recovery.resume(torch.randn(45, 8, 4)):
            if recovery.iteration == 25:
                predictor.record({"outcome": "kept"})
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if recovery.iteration % 10 == 5:  # no checkpoint is skipped because the disk is busy
                assert recovery._saver.settle(10.0)
        predictor.record({"outcome": "kept"})
        for checkpoint in (20, 40):
            into = recovery._pool.acquire(checkpoint)
            assert into is not None
            recovery._restorer.rehearse(into, checkpoint + 5, forecast)
            recovery._pool.release(into)
        assert known == [0, 1]
        assert len(predictor.state_dict()["outcomes"]) == 2, "the run's own knowledge is back"


@pytest.mark.parametrize(("mode", "asked"), [("auto", False), ("predict", True)])
def test_a_plan_that_recomputes_is_followed_where_the_choice_is_left_to_it(
    tmp_path: Path, mode: Literal["auto", "predict"], asked: bool
) -> None:
    checkpoint = {"interval_iterations": 10, "fsync": False, "shared_memory": False}
    config = {"run_dir": str(tmp_path), "checkpoint": checkpoint, "mode": mode}

    def life(iterations: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
            recovery._saver.plan = replace(recovery.plan, mode="recompute")
            for batch in recovery.resume(torch.randn(100, 8, 4)):
                loss = (model(batch) - batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                assert recovery._saver.settle(10.0)
                if recovery.iteration == iterations:
                    raise RuntimeError("the end of this life")

    with pytest.raises(RuntimeError, match="the end of this life"):
        life(45)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    with CPSRRecovery(TorchAdapter(model, torch.optim.AdamW(model.parameters())), config) as recovery:
        restored = recovery.restored
    assert (restored.forecast is not None) is asked
    assert ("plan finds recomputing cheaper" in restored.reason) is not asked
    if not asked:
        assert (restored.method, restored.restored_iteration) == ("exact", 40)
