"""The recovery benchmark: paired to the bit, resumable anywhere, and right in its arithmetic."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cpsr.benchmarks.recovery import measure
from cpsr.benchmarks.recovery.digits import DigitsTask
from cpsr.benchmarks.recovery.gpt import SIZES, GPTTask
from cpsr.benchmarks.recovery.grid import FULL, QUICK, Cell, Point, points, selection
from cpsr.benchmarks.recovery.measure import Outcome, PointMeasurement, needed_until
from cpsr.benchmarks.recovery.methods import roster as methods
from cpsr.benchmarks.recovery.methods.roster import Method
from cpsr.benchmarks.recovery.result import summarise
from cpsr.benchmarks.recovery.run import main
from cpsr.benchmarks.recovery.statistics import (
    Mean,
    Sample,
    cell_results,
    grid_mean,
    mean_interval,
    samples_of,
    verdict,
)
from cpsr.benchmarks.recovery.task import Task
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS
from cpsr.benchmarks.tests.recovery.tiny import METHODS, SELECTION, TINY, TinyTask, measured
from cpsr.errors import ConfigError, CPSRError
from cpsr.predictor.line import LinePredictor

POINT = Point(interval=50, fraction=0.5, checkpoint=450, failure=488)
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(WORKLOADS, TINY.name, TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the fault-free run in it."""
    cache = tmp_path_factory.mktemp("cache")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trajectory(cache).extend(needed_until(POINT))
    torch.set_num_threads(threads)
    return cache


def trajectory(cache: Path, seed: int = 0, task: Task | None = None) -> Trajectory:
    return Trajectory(TINY, task or TinyTask(), seed, cache)


@pytest.mark.slow
def test_a_killed_benchmark_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "cpsr.benchmarks.tests.recovery.tiny", str(killed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Once while the fault-free run is trained, once while recoveries are measured.
    for pattern, count in (("*/segment-*.safetensors", 5), ("*/points/*/curve-*.json", 3)):
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        while len(list(killed.glob(pattern))) < count:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = set(killed.rglob("curve-*.json"))
    main(SELECTION, killed, tmp_path / "killed.json")
    assert set(killed.rglob("curve-*.json")) > before
    main(SELECTION, whole, tmp_path / "whole.json")
    assert measured(tmp_path / "killed.json") == measured(tmp_path / "whole.json")


def test_a_finished_call_measures_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(SELECTION, intervals=(50,), points=1)
    main(one, tmp_path / "cache", tmp_path / "first.json")
    monkeypatch.setattr(Trajectory, "at", None)  # calling it would raise
    monkeypatch.setattr(PointMeasurement, "_train", None)
    main(one, tmp_path / "cache", tmp_path / "second.json")
    assert measured(tmp_path / "first.json") == measured(tmp_path / "second.json")


def test_a_run_interrupted_between_segments_is_bitwise_the_uninterrupted_one(tmp_path: Path, cache: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trajectory(tmp_path).extend(150, interrupt)
    trajectory(tmp_path).extend(150)
    assert trajectory(tmp_path).missing(150) == 0
    for end in (50, 100, 150):
        name = f"{trajectory(cache).directory.name}/segment-{end:05d}.safetensors"
        assert (tmp_path / name).read_bytes() == (cache / name).read_bytes()


def test_the_oracle_follows_the_fault_free_run_bit_by_bit(cache: Path) -> None:
    run = trajectory(cache)
    outcome = PointMeasurement(run, POINT).outcome("oracle")
    assert outcome.curve is not None
    recovered = numpy.array(outcome.curve["losses"])
    on_grid = [at for at in outcome.curve["iterations"] if at % 5 == 0]
    assert len(on_grid) == 32
    # The first one is the failure's own, which is no multiple of five.
    assert numpy.array_equal(recovered[1:], run.curve(on_grid[0], on_grid[-1]).losses)
    assert outcome.curve["gaps_nats"] == [0.0] * 33
    assert outcome.curve["lag"]["local_iterations"] == 0.0


def test_an_oracle_that_differs_stops_the_benchmark(cache: Path) -> None:
    run = trajectory(cache)
    PointMeasurement(run, POINT).outcome("oracle")
    directory = run.directory / "points" / "T050-f00488"
    formed = json.loads((directory / f"formed-oracle-harness{methods.HARNESS_VERSION}.json").read_text())
    path = directory / f"curve-{formed['state']}.json"
    kept = path.read_text()
    curve = json.loads(kept)
    curve["losses"][20][3] += 1e-9
    path.write_text(json.dumps(curve | {"fitter": "another"}))
    with pytest.raises(CPSRError, match="fault-free losses"):
        PointMeasurement(run, POINT).outcome("oracle")
    path.write_text(kept)


def test_stale_starts_with_the_checkpoint_at_the_failures_place(cache: Path) -> None:
    run = trajectory(cache)
    outcome = PointMeasurement(run, POINT).outcome("stale")
    assert outcome.curve is not None
    # Right at injection it has the losses of the checkpoint, 38 iterations earlier.
    assert outcome.curve["losses"][0] == run.curve(450, 450).losses[0].tolist()
    assert outcome.curve["iterations"][0] == POINT.failure


def test_methods_with_the_same_prediction_share_one_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = PointMeasurement(trajectory(cache), POINT)
    plain = measurement.outcome("line-x2")
    monkeypatch.setitem(methods.PREDICTORS, "again", Method(partial(LinePredictor, 300, 2.0, "checkpoint")))
    same = measurement.outcome("again")
    assert plain.curve == same.curve
    assert plain.lag_iterations is not None


def test_a_changed_predictor_is_formed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = PointMeasurement(trajectory(cache), POINT)
    before = measurement.outcome("line")
    monkeypatch.setitem(methods.PREDICTORS, "line", methods.PREDICTORS["line-8-1.5"])
    monkeypatch.setattr(measure, "predictor_source", lambda name: "changed")
    after = measurement.outcome("line")
    assert after.curve != before.curve
    assert after.settings == measurement.outcome("line-8-1.5").settings


def test_a_method_that_advises_against_itself_costs_the_horizon(cache: Path) -> None:
    early = Point(interval=50, fraction=0.25, checkpoint=100, failure=148)  # two checkpoints
    outcome = PointMeasurement(trajectory(cache), early).outcome("line")
    assert not outcome.predicted
    assert outcome.lag_iterations == 48.0
    assert "3 usable checkpoints, and there are 2" in outcome.reason


def test_a_diverged_recovery_has_no_lag(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wild(LinePredictor):
        def predict(self, history: Any, forecast: Any) -> Any:
            return ((name, start, values * 1e20) for name, start, values in super().predict(history, forecast))

    monkeypatch.setitem(methods.PREDICTORS, "wild", Method(partial(Wild, 300, 1.0, "checkpoint")))
    outcome = PointMeasurement(trajectory(cache), POINT).outcome("wild")
    assert outcome.lag_iterations is None
    assert "diverged" in outcome.reason


def test_weights_that_differ_from_the_cached_run_stop_the_benchmark(tmp_path: Path) -> None:
    run = trajectory(tmp_path)
    run.extend(100)
    path = run.directory / "segment-00100.safetensors"
    tensors = load_file(path)
    tensors["weights/60/0.bias"][3] += 1e-6
    save_file(tensors, path)
    assert run.at(55).iteration == 55
    with pytest.raises(CPSRError, match=r"iteration 60 .*'0\.bias'"):
        run.at(65)


def test_a_torn_file_of_the_cache_is_named(tmp_path: Path) -> None:
    run = trajectory(tmp_path)
    run.extend(50)
    path = run.directory / "segment-00050.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CPSRError, match="segment-00050"):
        run.at(50)


def test_the_caches_key_changes_with_all_that_matters(tmp_path: Path, cache: Path) -> None:
    names = [trajectory(cache).directory.name]
    assert trajectory(tmp_path).directory.name == names[0]
    names.append(trajectory(tmp_path, seed=1).directory.name)
    names.append(trajectory(tmp_path, task=TinyTask(noise=0.2)).directory.name)
    for change in ({"iterations": 1050}, {"peak_learning_rate": 2e-3}, {"schedule": "constant"}):
        names.append(Trajectory(dataclasses.replace(TINY, **change), TinyTask(), 0, tmp_path).directory.name)
    torch.set_num_threads(2)
    names.append(trajectory(tmp_path).directory.name)
    assert len({name.rpartition("-")[2] for name in names}) == len(names)


@pytest.mark.parametrize("task", [GPTTask(SIZES["gpt-0.4M"]), DigitsTask()], ids=["gpt", "digits"])
def test_a_batch_is_a_function_of_seed_and_iteration_alone(task: Task) -> None:
    def flat(seed: int, iteration: int) -> torch.Tensor:
        batch = task.batch(seed, iteration)
        return batch if isinstance(batch, torch.Tensor) else batch[0]

    first = flat(0, 7)
    torch.manual_seed(5)
    flat(0, 8)
    assert torch.equal(flat(0, 7), first)
    assert not torch.equal(flat(0, 8), first)
    assert not torch.equal(flat(1, 7), first)


def test_the_history_holds_the_checkpoints_and_nothing_later(cache: Path) -> None:
    run = trajectory(cache)
    history = run.history(450, 50)
    assert [entry.iteration for entry in history.entries] == list(range(50, 451, 50))
    entry = history.entries[-1]
    assert (entry.time, entry.learning_rate) == (TINY.times[450], TINY.learning_rate(450))
    kept = run.at(450).weights()
    assert set(history.operators) == set(kept)
    for name, values in kept.items():
        assert history.numel(name) == values.numel()
        assert torch.equal(history.read(name, 8, 2, values.numel()), values[2:])
    with pytest.raises(ValueError, match="interval 25"):
        run.history(450, 25)


@given(st.sampled_from([20, 50, 100, 300, 500]), st.sampled_from([0.25, 0.5, 0.75]), st.integers(1, 12))
def test_failure_points_lie_between_two_checkpoints_and_stay(interval: int, fraction: float, count: int) -> None:
    chosen = points(3000, interval, fraction, count)
    assert len(set(chosen)) == count
    assert points(3000, interval, fraction, count + 1)[:count] == chosen
    for point in chosen:
        assert point.checkpoint % interval == 0
        assert 0.68 * interval < point.horizon < interval
        assert abs(point.failure / 3000 - fraction) <= 0.06 + interval / 3000
        if interval <= 100:
            assert needed_until(point) <= 3000


def test_options_change_the_quick_and_the_full_selection() -> None:
    assert selection() == QUICK
    assert selection(full=True) == FULL
    chosen = selection(points=2, workloads="digits,gpt-0.8M-cosine", methods="line,stale", infeasible=True)
    assert chosen.workloads == ("digits-cosine", "digits-constant", "gpt-0.8M-cosine")
    assert (chosen.points, chosen.methods, chosen.intervals) == (2, ("line", "stale"), (50, 300, 500))
    assert selection(intervals="100, 20,100").intervals == (100, 20)
    for wrong in ({"workloads": "gpt"}, {"methods": "lime"}):
        with pytest.raises(ConfigError, match=r"no (workload|method) is called '(gpt|lime)'"):
            selection(**wrong)  # type: ignore[arg-type]  # one of two names


def outcome(method: str, lag: float | None, checkpoint: int, seed: int = 0, predicted: bool = True) -> Outcome:
    return Outcome(method, seed, Point(50, 0.5, checkpoint, checkpoint + 40), predicted, "", lag)


def test_a_cell_divides_each_lag_by_its_horizon_and_pairs_by_failure() -> None:
    lags = {500: (10.0, 30.0), 600: (-10.0, 20.0), 700: (20.0, 34.0), 800: (0.0, 16.0)}
    of = [outcome("line", line, at) for at, (line, _) in lags.items()]
    of += [outcome("stale", stale, at) for at, (_, stale) in reversed(lags.items())]
    line, stale = cell_results(Cell("tiny", 50, 0.5), of)
    assert (line.method, line.points, line.lag_iterations.value) == ("line", 4, 5.0)
    assert line.lag.value == pytest.approx(0.125)
    assert line.against_recompute.value == pytest.approx(-0.875)
    assert line.against_stale is not None
    assert line.against_stale.value == pytest.approx(-20 / 40)
    assert line.verdicts == {"recompute": "better", "stale": "better"}
    assert stale.verdicts == {"recompute": "better"}


def test_a_failure_without_a_lag_is_counted_and_forbids_a_verdict() -> None:
    of = [outcome("line", 10.0, at) for at in (500, 550, 600, 650)] + [outcome("line", None, 700)]
    (line,) = cell_results(Cell("tiny", 50, 0.5), of)
    assert (line.points, line.without_lag, line.lag.value) == (4, 1, 0.25)
    assert line.verdicts == {"recompute": "undetermined"}


def test_a_lag_beyond_what_is_looked_for_counts_as_the_bound_and_is_counted_apart() -> None:
    ahead = [outcome("line", -200.0, at) for at in (500, 700, 900, 1100)]
    beyond = [dataclasses.replace(one, beyond=True) for one in ahead]
    behind = dataclasses.replace(outcome("line", 200.0, 1300), beyond=True)
    asked = dataclasses.replace(SELECTION, intervals=(50,), fractions=(0.5,))
    lead = summarise(asked, {}, ("line",), {TINY.name: beyond}).mean("line")
    both = summarise(asked, {}, ("line",), {TINY.name: [*beyond, behind]}).mean("line")
    assert lead is not None
    assert both is not None
    assert (lead.untold, lead.beyond_ahead, lead.beyond_behind, lead.lag.value) == (0, 4, 0, -5.0)
    assert (both.beyond_ahead, both.beyond_behind, both.lag.value) == (4, 1, -3.0)


def test_what_was_declined_is_counted_and_costs_the_horizon() -> None:
    of = [outcome("line", 40.0, at, predicted=False) for at in (500, 600, 700, 800)]
    (line,) = cell_results(Cell("tiny", 50, 0.5), of)
    assert (line.declined, line.lag.value, line.verdicts) == (4, 1.0, {"recompute": "not worse"})


def test_failures_close_to_each_other_are_one_cluster() -> None:
    of = [outcome("line", 10.0, at) for at in (500, 520, 540, 560, 650, 700)]
    assert {sample.cluster for sample in samples_of(of)} == {(0, 5), (0, 6), (0, 7)}


def test_an_interval_draws_clusters_not_points() -> None:
    spread = [Sample((0, at), float(at % 2)) for at in range(40)]
    paired = [Sample((0, at // 10), float(at // 10 % 2)) for at in range(40)]
    assert mean_interval(spread).value == mean_interval(paired).value == 0.5
    wide, narrow = mean_interval(paired), mean_interval(spread)
    assert wide.low == 0.0
    assert narrow.low is not None
    assert 0.3 < narrow.low < 0.4  # 0.5 - 1.96 * 0.5 / sqrt(40) = 0.345


def test_too_few_points_give_no_interval_and_no_verdict() -> None:
    mean = mean_interval([Sample((0, at), 0.0) for at in range(3)])
    assert mean == Mean(0.0, None, None)
    assert verdict(mean) == "undetermined"
    with pytest.raises(ValueError, match="no samples"):
        mean_interval([])


def test_cells_of_a_grid_count_alike() -> None:
    many = [Sample((0, at), 1.0) for at in range(30)]
    few = [Sample((0, at), 0.0) for at in range(4)]
    assert grid_mean([many, few]) == Mean(0.5, 0.5, 0.5)
    assert grid_mean([many, few[:3]]) == Mean(0.5, None, None)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.01, 0.3, "worse"), (-0.3, -0.01, "better"), (-0.2, 0.1, "not worse"), (-0.2, 0.11, "undetermined")],
)
def test_verdicts_follow_the_interval(low: float, high: float, expected: str) -> None:
    assert verdict(Mean(0.0, low, high)) == expected
    assert verdict(Mean(0.0, low, high), missing=1) == "undetermined"


def test_a_call_leaves_figures_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(dataclasses.replace(SELECTION, intervals=(50,), points=4), tmp_path / "cache", tmp_path / "out" / "tiny.json")
    report = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert {cell["method"] for cell in report["cells"]} == set(METHODS)
    assert {method: len(lags) for method, lags in report["lags"][TINY.name].items()} == dict.fromkeys(METHODS, 4)
    assert report["machine"]["cpu_model"]
    for name in ("tiny.png", "tiny-gap.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "a checkpoint every 50 iterations" in text
    assert "against stale" in text
