"""The comparison under kills, small: real ranks, real kills."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.replay.compared import DENSE, STALE, WINDOWS, Plan, compare, lag_iterations, lost_tokens
from cpsr.benchmarks.replay.mixture import Mixture

SMALL = Plan(48, 1, 1, Mixture(experts=4, layers=2, heads=2, width=16, context=16), interval_iterations=5)


@pytest.mark.slow
def test_every_way_meets_the_same_kills_and_only_stale_experts_lose_tokens(tmp_path: Path) -> None:
    with measuring("replay", None, tmp_path, timed=False) as call:
        found = json.loads(json.dumps(compare(call, SMALL)))["ways"]
    for name in (DENSE, WINDOWS):
        assert found[name]["methods"] == ["exact"]
        assert found[name]["lost_tokens"] == [0.0]
        assert found[name]["lag_iterations"] == [0.0]
        assert found[name]["same_bits"] == [True]
    assert found[STALE]["methods"] == ["stale"]
    assert found[STALE]["lost_tokens"][0] > 0
    assert found[STALE]["same_bits"] == [False]
    ((repeated,),) = found[WINDOWS]["repeated_iterations"]
    assert 4 <= repeated <= 8


def test_a_lag_is_the_gap_over_what_an_iteration_is_worth() -> None:
    control = {at: 5.0 - 0.01 * at for at in range(100)}
    behind = {at: 5.0 - 0.01 * (at - 3) for at in range(100)}
    assert lag_iterations(behind, control, 20) == pytest.approx((3.0, 0.03))
    assert lag_iterations(control, control, 20) == (0.0, 0.0)


def test_tokens_are_lost_once_where_two_failures_go_back_to_the_same_checkpoint() -> None:
    assert lost_tokens([(0, 0.0), (27, 100.0), (27, 100.0)]) == 100.0
    assert lost_tokens([(0, 0.0), (27, 100.0), (54, 90.0)]) == 190.0
    assert lost_tokens([(0, 0.0), (54, 90.0), (27, 100.0)]) == 100.0
