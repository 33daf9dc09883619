"""Backtests: how well the predictor would have predicted past checkpoints."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import BacktestRow
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, newest

__all__ = ["Backtest", "BacktestList", "router"]

router = APIRouter(tags=["backtests"])


class Backtest(BaseModel):
    """One checkpoint, predicted from those before it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "life": 0,
                    "iteration": 4200,
                    "checkpoints": 42,
                    "result": {"line_cosine": 0.61, "vitp_cosine": 0.66, "mean_square_motion": 1.5e-7},
                    "created_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    life: int
    iteration: int
    checkpoints: int = Field(description="How many the predictor had learned from by then.")
    result: dict[str, Any] = Field(description="Cosines of the predicted direction with the motion of the weights.")
    created_unix_seconds: float


class BacktestList(BaseModel):
    """The newest backtests, newest first."""

    backtests: list[Backtest]
    total: int = Field(description="In the range of time.")


@router.get("/backtests", operation_id="list_backtests")
def list_backtests(run_dir: RunDir, window: WindowQuery) -> BacktestList:
    """Backtests of the predictor, as they were recorded when the curves were fitted."""
    rows, total = newest(run_dir, BacktestRow, lambda row: answered(Backtest, row), window)
    return BacktestList(backtests=rows, total=total)
