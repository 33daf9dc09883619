"""The one line on how a run came back answers: what was lost, from where each rank continues, what it costs."""

from dataclasses import replace
from typing import Any

import pytest

from cpsr.checkpoint.tiers import Source, Tier
from cpsr.journal import Beginning
from cpsr.life.recovery_message import recovery_message
from cpsr.predictor.protocol import Forecast
from cpsr.restart.restored_state import Recomputes, Restored

KILLED = "rank 1 was killed (SIGKILL)"
LINE = Forecast(
    "line",
    True,
    {},
    -12.4,
    "the numbers of the fit",
    {"used_iterations": [60, 70, 80], "expected_deviation_iterations": 7.6, "move_iterations": -20.0},
)
STALE = Forecast("stale", True, {}, 7.6, "", {"base_iteration": 80, "expected_deviation_iterations": 2.0})
UNCHECKED = {"loss": {"accepted": True, "reason": "not evaluated: no weight was moved"}}
CHECKED: dict[str, Any] = {"loss": {"accepted": True, "reason": "", "loss_predicted": 1.2412, "loss_checkpoint": 1.52}}
REFUSED: dict[str, Any] = {
    "tried": [1.0],
    "loss": {"accepted": False, "reason": "", "loss_predicted": 2.31, "loss_checkpoint": 1.52},
}


def sources(*tiers: Tier, iteration: int = 91) -> tuple[Source, ...]:
    return tuple(Source(rank, tier, iteration) for rank, tier in enumerate(tiers))


EXACT = Restored(
    Beginning.EXACT, 80, 80, 91, "mode exact: 11 iterations", sources=sources("disk", "disk", iteration=80)
)
PREDICTED = Restored(
    Beginning.PREDICTED, 91, 80, 91, "", sources=sources("predicted", "predicted"), forecast=LINE, guard=CHECKED
)


@pytest.mark.parametrize(
    ("restored", "cause", "message"),
    [
        (
            replace(PREDICTED, sources=sources("departure", "predicted")),
            KILLED,
            "Rank 1 was killed (SIGKILL) after iteration 91 and left no state. Ranks 0 and 1 continue at iteration 91: "
            "rank 0 exact from memory, rank 1 predicted from checkpoint 80 (line over 3 checkpoints). Predicted "
            "state; expected cost -12 ± 8 iterations: skipping costs 8, the move gains 20, as it would without a "
            "failure (exact: 11 iterations later). Check passed: loss 1.24, checkpoint 1.52.",
        ),
        (
            replace(PREDICTED, forecast=STALE, guard=UNCHECKED),
            KILLED,
            "Rank 1 was killed (SIGKILL) after iteration 91. All ranks continue at iteration 91, with the weights of "
            "checkpoint 80; 11 iterations are skipped. Stale state; expected cost 8 ± 2 iterations (exact: 11 "
            "iterations later). Not checked: no weight was moved.",
        ),
        (
            replace(PREDICTED, forecast=replace(STALE, settings={"base_iteration": 60}), guard=UNCHECKED),
            None,
            "All ranks continue at iteration 91, with the weights of checkpoint 60; 31 iterations are skipped. Stale "
            "state; expected cost 8 iterations (exact: 11 iterations later). Not checked: no weight was moved.",
        ),
        (
            replace(PREDICTED, forecast=STALE, sources=sources("departure", "predicted")),
            KILLED,
            "Rank 1 was killed (SIGKILL) after iteration 91 and left no state. Ranks 0 and 1 continue at iteration 91: "
            "rank 0 exact from memory, rank 1 with the weights of checkpoint 80; 11 iterations are skipped. Stale "
            "state; expected cost 8 ± 2 iterations (exact: 11 iterations later). Check passed: loss 1.24, checkpoint "
            "1.52.",
        ),
        (
            replace(PREDICTED, restored_iteration=80, forecast=replace(LINE, expected_end_cost_iterations=-20.0)),
            KILLED,
            "Rank 1 was killed (SIGKILL) after iteration 91. All ranks continue at iteration 80, moved from checkpoint "
            "80 (line over 3 checkpoints). Predicted state; expected cost -9 ± 8 iterations: recomputing costs 11, the "
            "move gains 20, as it would without a failure (exact: 11 iterations later). Check passed: loss 1.24, "
            "checkpoint 1.52.",
        ),
        (
            EXACT,
            KILLED,
            "Rank 1 was killed (SIGKILL) after iteration 91. All ranks continue at iteration 80, exact from checkpoint "
            "80. Exact: 11 iterations later.",
        ),
        (
            replace(EXACT, recomputes=Recomputes.PREDICTION_REFUSED, forecast=LINE, guard=REFUSED),
            KILLED,
            "Rank 1 was killed (SIGKILL) after iteration 91. All ranks continue at iteration 80, exact from checkpoint "
            "80. Exact: 11 iterations later; the predicted state failed its check. Check failed: "
            "loss 2.31, checkpoint 1.52.",
        ),
        (
            replace(
                EXACT,
                beginning=Beginning.EMERGENCY_DUMP,
                restored_iteration=91,
                sources=sources("departure", "departure"),
            ),
            "rank 1 failed (ValueError: bad batch)",
            "Rank 1 failed (ValueError: bad batch) after iteration 91. All ranks continue at iteration 91, with their "
            "last weights and moments, from memory. Random states and registered objects are those of "
            "checkpoint 80.",
        ),
        (
            Restored(Beginning.SCRATCH, 0, None, None, "no checkpoint has been committed yet"),
            KILLED,
            "Rank 1 was killed (SIGKILL). Training begins at iteration 0: no checkpoint has been committed yet.",
        ),
    ],
)
def test_the_line_says_what_a_user_asks(restored: Restored, cause: str | None, message: str) -> None:
    assert recovery_message(restored, cause, "") == message


def test_every_reason_to_recompute_is_explained() -> None:
    lines = {why: recovery_message(replace(EXACT, recomputes=why, forecast=LINE), None, "") for why in Recomputes}
    plain = recovery_message(EXACT, None, "")
    assert plain.endswith("Exact: 11 iterations later.")
    assert all(line.startswith(plain[:-1] + "; ") for line in lines.values())
    assert len(set(lines.values())) == len(Recomputes)


@pytest.mark.parametrize("restored", [EXACT, replace(EXACT, restored_iteration=91)])
def test_an_exact_restart_tells_whether_it_is_checked(restored: Restored) -> None:
    line = recovery_message(restored, KILLED, "not checked: no step is repeated")
    assert line.endswith(". Not checked: no step is repeated.")
    assert "checked" not in recovery_message(replace(restored, beginning=Beginning.OLDER_EXPERTS), KILLED, "checked")
