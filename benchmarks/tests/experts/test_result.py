"""From curves and samples to lags, intervals, aims, tables and plots."""

from dataclasses import replace
from io import StringIO
from typing import Any

import numpy
import pytest
from rich.console import Console

from cpsr.benchmarks.experts.costs import Cost, costs, mean_interval
from cpsr.benchmarks.experts.names import CATCH_UP, EVERYTHING, STALE, TURNS
from cpsr.benchmarks.experts.plot import draw
from cpsr.benchmarks.experts.policies import IN_TURN, IN_WINDOW
from cpsr.benchmarks.experts.report import show
from cpsr.benchmarks.experts.result import Result, compared, recovered, stalled
from cpsr.benchmarks.experts.tasks import FailingTask, Failures, Mixture
from cpsr.errors import CPSRError

CHUNKS = 4
RESTORED = (300, 500)
TASK = FailingTask(failures=Failures(at=(305, 505), end=670, fault_free_end=720))
MACHINE = {"cpu_model": "a processor", "cores": 2, "load_before": 0.1, "date": "2026-01-01T00:00:00"}


def curve(first: int, last: int, shift: float) -> dict[str, Any]:
    """Losses that fall steadily with a bend, `shift` iterations behind, on chunks that differ."""
    iterations = numpy.arange(first, last + 1, 10)
    losses = 2.0 + 5.0 * numpy.exp(-(iterations - shift) / 400.0)
    return {"iterations": iterations.tolist(), "losses": (losses[:, None] + 0.1 * numpy.arange(CHUNKS)).tolist()}


def followed(stale: float, caught_up: float) -> dict[str, Any]:
    """What a job reports whose failures each put a run so many iterations further behind."""
    account = {"portion_lost": 0.05, "momentary_total": 0.1, "momentary_mean": 0.05}
    runs = []
    for mode, lag in ((STALE, stale), (CATCH_UP, caught_up)):
        failures = [
            {"curve": curve(300, 500, lag), "ages": [0, 30], "saved_experts": [1, 1, 1]},
            {"curve": curve(500, 670, 2 * lag), "ages": [10, 20], "saved_experts": [2]},
        ]
        runs.append({"policy": IN_TURN, "mode": mode, "account": account, "failures": failures})
    return {"fault_free": curve(100, 720, 0.0), "runs": runs}


def of_seeds(*lags: tuple[float, float]) -> list[Cost]:
    return [
        cost
        for seed, (stale, caught_up) in enumerate(lags)
        for cost in costs(TASK.model_copy(update={"seed": seed}), followed(stale, caught_up))
    ]


def test_a_run_that_is_shifted_lags_by_the_shift() -> None:
    stale, caught_up = costs(TASK, followed(8.0, 3.0))
    assert (stale.mode, caught_up.mode) == (STALE, CATCH_UP)
    assert stale.lags_iterations == pytest.approx((8.0, 16.0), abs=0.1)
    assert caught_up.final_lag_iterations == pytest.approx(6.0, abs=0.1)
    assert stale.obstacles == (None, None)
    assert stale.restored == RESTORED
    assert stale.expert_age_iterations == 15
    assert stale.experts_per_checkpoint == (3 * 1 + 2) / 4


def test_gaps_are_of_the_newest_validation_of_each_iteration() -> None:
    stale, _ = costs(TASK, followed(8.0, 3.0))
    assert stale.iterations == tuple(range(300, 671, 10))
    fault_free, late = (numpy.mean(curve(500, 500, lag)["losses"]) for lag in (0.0, 16.0))
    assert stale.gaps_nats[stale.iterations.index(500)] == pytest.approx(late - fault_free)
    assert stale.mean_gap_nats == pytest.approx(numpy.mean(stale.gaps_nats))
    at_once = [stale.gaps_nats[stale.iterations.index(restored)] for restored in RESTORED]
    assert stale.injection_gap_nats == pytest.approx(numpy.mean(at_once))


def test_a_lag_that_is_not_there_is_no_number() -> None:
    beyond, _ = costs(TASK, followed(300.0, 0.0))
    assert beyond.lags_iterations[0] == pytest.approx(200)
    assert beyond.standard_errors_iterations[0] is None
    assert str(beyond.obstacles[0]).startswith("counted as the bound")
    short = followed(1.0, 1.0)
    short["runs"][0]["failures"][1]["curve"] = curve(500, 540, 0.0)
    none, _ = costs(TASK, short)
    assert none.final_lag_iterations is None
    assert str(none.obstacles[1]).startswith("no lag can be determined")


def test_a_training_that_diverged_is_named() -> None:
    diverged = followed(1.0, 1.0)
    diverged["runs"][1]["failures"][0]["curve"]["losses"][3][0] = float("nan")
    with pytest.raises(
        CPSRError, match=r"top-1, one rank, seed 0, in turn \(PEC\), stale, catching up: .* 330 .* diverged"
    ):
        costs(TASK, diverged)


def test_intervals_over_seeds_are_students() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.high - found.value == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert found.value - found.low == pytest.approx(found.high - found.value)
    with pytest.raises(ValueError, match="two of them"):
        mean_interval([1.0])


def test_catching_up_is_compared_with_half_of_what_stale_experts_cost() -> None:
    runs = of_seeds((8.0, 3.0), (10.0, 4.0), (9.0, 5.0))
    stale, caught_up = recovered(runs)
    assert (stale.mode, caught_up.mode) == (STALE, CATCH_UP)
    assert stale.seeds == 3
    assert stale.lag_iterations is not None
    assert stale.lag_iterations.value == pytest.approx(18.0, abs=0.2)
    assert stale.portion_lost == pytest.approx(0.05)
    assert stale.experts_per_checkpoint == 1.25
    (found,) = compared(runs)
    assert found.lag_share == pytest.approx(12 / 27, abs=0.01)
    assert found.lag_beyond_aim is not None
    assert found.lag_beyond_aim.value == pytest.approx(8.0 - 9.0, abs=0.1)
    result = Result(recovered=[stale, caught_up], compared=[found])
    assert list(result.aims().values()) == [True]
    (worse,) = compared(of_seeds((8.0, 5.0), (10.0, 6.0)))
    assert list(Result(compared=[worse]).aims().values()) == [False]


def stall_job(seconds_with: float, snapshot_bytes: int) -> dict[str, Any]:
    pair = {"with_seconds": seconds_with, "without_seconds": 1.0}
    turns = {"pairs": [pair] * 4, "stall_seconds": [0.002] * 10, "skipped": 0, "rounds": 5, "step_seconds": 0.1}
    turns |= {"state_bytes": 10_000_000, "snapshot_bytes": snapshot_bytes}
    whole = {"pairs": [pair | {"with_seconds": 1.12}] * 4, "rounds": 1, "snapshot_bytes": 10_000_000}
    return {EVERYTHING: turns | whole, TURNS: turns}


@pytest.mark.parametrize(("seconds", "met"), [(1.01, True), (1.05, False)])
def test_the_aim_for_stalls_is_met_by_the_whole_interval(seconds: float, met: bool) -> None:
    everything, turns = stalled("a model", stall_job(seconds, 2_000_000))
    assert (everything.rounds, turns.rounds) == (1, 5)
    assert turns.added.value == pytest.approx(seconds - 1)
    assert list(Result(stalls=[everything, turns]).aims().values()) == [False, met]


def test_policies_of_one_model_are_drawn_on_one_scale() -> None:
    runs = of_seeds((8.0, 3.0), (10.0, 4.0))
    others = [replace(run, policy=IN_WINDOW) for run in of_seeds((16.0, 9.0), (20.0, 8.0))]
    axes = draw(Result(), [*runs, *others], MACHINE)["failures"].axes
    gaps, lags, other_gaps, other_lags = (one.get_ylim() for one in axes)
    assert (gaps, lags) == (other_gaps, other_lags)
    assert lags[1] > 40


def test_tables_and_plots_show_all_that_was_measured() -> None:
    runs = of_seeds((8.0, 3.0), (10.0, 4.0))
    stalls = stalled("a model", stall_job(1.02, 2_000_000))
    result = Result(None, stalls, recovered(runs), compared(runs), skews={"a model": 0.123})
    written = StringIO()
    show(Console(width=200, file=written), MACHINE, result)
    text = written.getvalue()
    for expected in (
        "experts in turn, rounds of 5",
        "2.0 of 10.0",
        Mixture().label,
        "1.25",
        "18.0",
        "0.39",
        "skew of 0.12",
        "load before 0.1",
    ):
        assert expected in text
    figures = draw(result, runs, MACHINE)
    assert list(figures) == ["stall", "failures"]
    assert [len(figure.axes) for figure in figures.values()] == [1, 2]
