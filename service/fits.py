"""Fits: the curves of the loss, the predictor's error and the failure rate, as they were fitted."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from cpsr.journal import FitRow
from cpsr.service.parameters import RunDir, WindowQuery
from cpsr.service.rows import answered, newest

__all__ = ["Fit", "FitKind", "FitList", "router"]

router = APIRouter(tags=["fits"])

FitKind = Literal["loss", "predictor", "failure_rate"]


class Fit(BaseModel):
    """One curve, as it was fitted at an iteration."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "life": 0,
                    "iteration": 4000,
                    "kind": "failure_rate",
                    "result": {"failures": 2, "mtbf_hours": 9.1, "low_per_second": 8e-6, "high_per_second": 7e-5},
                    "created_unix_seconds": 1764000000.0,
                }
            ]
        }
    )

    life: int
    iteration: int
    kind: FitKind
    result: dict[str, Any] = Field(
        description="Coefficients with units in their names, covariance, errors; of a loss also `curve`: points of the "
        "curve and of the band that holds 95% of single losses, one span of the fit beyond the last loss included."
    )
    created_unix_seconds: float


class FitList(BaseModel):
    """The newest fits, newest first."""

    fits: list[Fit]
    total: int = Field(description="Of the kind, in the range of time.")


@router.get("/fits", operation_id="list_fits")
def list_fits(
    run_dir: RunDir,
    window: WindowQuery,
    kind: Annotated[FitKind | None, Query(description="Only curves of one kind.")] = None,
) -> FitList:
    """Curves as they were fitted: coefficients, errors and bands."""
    rows, total = newest(run_dir, FitRow, lambda row: answered(Fit, row), window, kind)
    return FitList(fits=rows, total=total)
