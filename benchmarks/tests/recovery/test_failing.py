"""Several failures in one run: recovered from its own past, and set beside recomputing at equal work."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.recovery import failing
from cpsr.benchmarks.recovery.failing import FailingRun, failure_points, follow, recomputing_losses
from cpsr.benchmarks.recovery.failures import main
from cpsr.benchmarks.recovery.grid import Point, Selection
from cpsr.benchmarks.recovery.jobs import Run
from cpsr.benchmarks.recovery.methods import roster as methods
from cpsr.benchmarks.recovery.methods.roster import Method
from cpsr.benchmarks.recovery.predict import predicted_state
from cpsr.benchmarks.recovery.workload import WORKLOADS
from cpsr.benchmarks.tests.recovery.test_learning import Watcher
from cpsr.benchmarks.tests.recovery.tiny import TINY, fault_free, one_thread
from cpsr.errors import ConfigError
from cpsr.predictor.line import LinePredictor

INTERVAL = 50


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    cache = tmp_path_factory.mktemp("cache")
    with one_thread():
        fault_free(cache, TINY.iterations)
        yield Run(TINY, 0, cache)


@given(st.sampled_from([1000, 2400, 3000]), st.sampled_from([20, 50, 100]), st.integers(1, 4))
def test_failures_are_spread_with_a_checkpoint_between_them(iterations: int, interval: int, count: int) -> None:
    points = failure_points(iterations, interval, count)
    assert len(points) == count
    for number, point in enumerate(points, 1):
        assert abs(point.failure / iterations - number / (count + 1)) <= interval / iterations
        assert point.checkpoint % interval == 0
        assert 0 < point.horizon < interval
    for one, other in pairwise(points):
        assert other.checkpoint >= one.failure + 60


def test_too_many_failures_are_refused() -> None:
    with pytest.raises(ConfigError, match="30 failures in 1000 iterations"):
        failure_points(1000, 50, 30)


def test_with_the_true_state_the_run_is_the_one_that_never_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = run.trajectory()

    def truth(*of: object) -> object:
        forecast, _ = predicted_state(*of)  # type: ignore[arg-type]  # passed on as they came
        return forecast, trajectory.at(of[3]).state()  # type: ignore[arg-type]

    monkeypatch.setattr(failing, "predicted_state", truth)
    record = follow(FailingRun(run, failure_points(TINY.iterations, INTERVAL, 2), "line-w200"))
    assert [recovery["predicted"] for recovery in record["recoveries"]] == [True, True]
    assert record["work"] == record["iterations"]
    true = trajectory.curve(0, TINY.iterations)
    expected = dict(zip(true.iterations.tolist(), true.losses.mean(axis=1).tolist(), strict=True))
    on_grid = [(at, loss) for at, loss in zip(record["iterations"], record["losses"], strict=True) if at % 5 == 0]
    assert len(on_grid) > 100
    assert all(expected[at] == loss for at, loss in on_grid)


def test_a_declined_recovery_repeats_what_was_lost(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def declined(*of: object) -> object:
        return predicted_state(*of)[0], None  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(failing, "predicted_state", declined)
    points = failure_points(TINY.iterations, INTERVAL, 2)
    record = follow(FailingRun(run, points, "line-w300"))
    lost = sum(point.horizon for point in points)
    assert (record["work"][-1], record["iterations"][-1]) == (TINY.iterations + lost, TINY.iterations)
    true = run.trajectory().curve(0, TINY.iterations)
    work = numpy.array(record["work"], dtype=float)
    expected = recomputing_losses(work, points, true.iterations.astype(float), true.losses.mean(axis=1))
    assert numpy.array_equal(expected, record["losses"])


def test_every_recovery_is_predicted_from_the_recovered_runs_checkpoints(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods.PREDICTORS, "watcher", Method(Watcher))
    first, second = points = failure_points(TINY.iterations, INTERVAL, 2)
    seen: list[list[int]] = []
    shown: list[bool] = []

    def watched(predictor: Watcher, history: object, *of: object) -> object:
        seen.append(list(predictor.seen))
        newest = history.entries[-1].iteration  # type: ignore[attr-defined]
        true = run.trajectory().history(newest, INTERVAL)
        operator = true.operators[0]
        numel = true.numel(operator)
        pair = [one.read(operator, len(one.entries) - 1, 0, numel) for one in (history, true)]  # type: ignore[attr-defined]
        shown.append(bool((pair[0] == pair[1]).all()))
        return predicted_state(predictor, history, *of)  # type: ignore[arg-type]

    monkeypatch.setattr(failing, "predicted_state", watched)
    record = follow(FailingRun(run, points, "watcher"))
    assert shown == [True, False]  # the second history descends from the first recovery
    assert seen[0] == list(range(50, first.checkpoint + 1, 50))
    # Nothing is committed in the 60 iterations after a predicted restart.
    commits = [at for at in range(first.checkpoint + 50, second.checkpoint + 1, 50) if at >= first.failure + 60]
    assert seen[1] == seen[0] + commits
    assert [recovery["checkpoint"] for recovery in record["recoveries"]] == [first.checkpoint, second.checkpoint]
    left = [path.name for path in (run.trajectory().directory / "failures").iterdir() if path.is_dir()]
    assert left == []


def test_weights_that_are_not_finite_are_recomputed_and_a_diverged_run_is_below_nothing(
    run: Run, tmp_path: Path
) -> None:
    class Wild(LinePredictor):
        factor = float("nan")

        def predict(self, history: Any, forecast: Any) -> Any:
            return ((name, start, values * self.factor) for name, start, values in super().predict(history, forecast))

    class Wilder(Wild):
        factor = 1e20

    points = failure_points(TINY.iterations, INTERVAL, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(methods.PREDICTORS, "wild", Method(Wild))
        patch.setitem(methods.PREDICTORS, "wilder", Method(Wilder))
        assert [recovery["predicted"] for recovery in follow(FailingRun(run, points, "wild"))["recoveries"]] == [False]
        record = follow(FailingRun(run, points, "wilder"))
        assert record["losses"][-1] is None
        patch.setitem(WORKLOADS, TINY.name, TINY)
        main(
            Selection("tiny", (TINY.name,), (INTERVAL,), (0.5,), 1, 1, ("wilder",)), 1, run.cache, tmp_path / "out.json"
        )
    (report,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (report["below"], report["final_gap_nats"]) == (0.0, None)


def test_a_finished_run_is_not_followed_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one = FailingRun(run, failure_points(TINY.iterations, INTERVAL, 1), "stale")
    record = follow(one)
    monkeypatch.setattr(failing, "_Course", None)  # calling it would raise
    assert follow(one) == record


def test_recomputing_stands_still_for_the_work_it_repeats() -> None:
    points = (Point(50, 0.3, 100, 140), Point(50, 0.6, 200, 240))
    iterations = numpy.arange(0.0, 401.0)
    work = numpy.array([139.0, 140.0, 180.0, 279.0, 280.0, 320.0])
    standing = recomputing_losses(work, points, iterations, iterations)
    assert standing.tolist() == [139.0, 100.0, 140.0, 239.0, 200.0, 240.0]


def test_a_call_leaves_figures_and_a_plot(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, TINY.name, TINY)
    selection = Selection("tiny", (TINY.name,), (INTERVAL,), (0.5,), 1, 1, ("recompute", "stale", "line", "oracle"))
    main(selection, 2, run.cache, tmp_path / "out.json")
    report, points = json.loads((tmp_path / "out.json").read_text()), failure_points(TINY.iterations, INTERVAL, 2)
    assert [one["method"] for one in report["runs"]] == ["stale", "line"]
    for one in report["runs"]:
        assert 0 <= one["below"] <= 1
        assert [recovery["failure"] for recovery in one["recoveries"]] == [point.failure for point in points]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"line: below recomputing [\d.]+% of the time over 1 runs", capsys.readouterr().out)
