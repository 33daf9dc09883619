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
from cpsr.benchmarks.recovery.grid import FULL, QUICK, Point, points, selection
from cpsr.benchmarks.recovery.measure import PointMeasurement
from cpsr.benchmarks.recovery.methods import roster as methods
from cpsr.benchmarks.recovery.methods.baselines import PlainLine
from cpsr.benchmarks.recovery.methods.roster import Method
from cpsr.benchmarks.recovery.run import main
from cpsr.benchmarks.recovery.task import Task
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.benchmarks.recovery.workload import WORKLOADS
from cpsr.benchmarks.tests.recovery.tiny import METHODS, SELECTION, TINY, TinyTask, measured
from cpsr.errors import ConfigError, CPSRError
from cpsr.fitter.end_cost import IterationWorth
from cpsr.predictor.line import LinePredictor

POINT = Point(interval=50, fraction=0.5, checkpoint=450, failure=488)
WORTH = IterationWorth(2e-5, 1e-6, TINY.iterations)
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
    trajectory(cache).extend(TINY.iterations)
    torch.set_num_threads(threads)
    return cache


def trajectory(cache: Path, seed: int = 0, task: Task | None = None) -> Trajectory:
    return Trajectory(TINY, task or TinyTask(), seed, cache)


def measurement(run: Trajectory, point: Point = POINT) -> PointMeasurement:
    return PointMeasurement(run, point, WORTH)


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
    outcome = measurement(run).outcome("oracle")
    assert outcome.curve is not None
    recovered = numpy.array(outcome.curve["losses"])
    on_grid = [at for at in outcome.curve["iterations"] if at % 5 == 0]
    assert len(on_grid) == 32
    # The first one is the failure's own, which is no multiple of five.
    assert numpy.array_equal(recovered[1:], run.curve(on_grid[0], on_grid[-1]).losses)
    assert outcome.curve["gaps_nats"] == [0.0] * 33
    assert outcome.curve["lag"]["local_iterations"] == 0.0
    assert (outcome.final_gap_nats, outcome.end_cost_iterations) == (0.0, 0.0)


def test_an_oracle_that_differs_stops_the_benchmark(cache: Path) -> None:
    run = trajectory(cache)
    measurement(run).outcome("oracle")
    directory = run.directory / "points" / "T050-f00488"
    formed = json.loads((directory / f"formed-oracle-harness{methods.HARNESS_VERSION}.json").read_text())
    path = directory / f"curve-{formed['state']}.json"
    kept = path.read_text()
    curve = json.loads(kept)
    curve["losses"][20][3] += 1e-9
    path.write_text(json.dumps(curve | {"fitter": "another"}))
    with pytest.raises(CPSRError, match="fault-free losses"):
        measurement(run).outcome("oracle")
    path.write_text(kept)


def test_a_recovery_is_trained_to_the_end_and_costs_what_is_missing_there(cache: Path) -> None:
    run = trajectory(cache)
    outcome = measurement(run).outcome("stale")
    assert outcome.curve is not None
    end = run.trainer()
    end.load(dataclasses.replace(run.at(450).state(), iteration=POINT.failure))
    end.train_to(TINY.iterations)
    gap = float((end.final_losses() - run.at(TINY.iterations).final_losses()).mean())
    assert outcome.final_gap_nats == pytest.approx(gap, abs=1e-12)
    assert outcome.end_cost_iterations == pytest.approx(gap / WORTH.nats)


def test_controls_end_elsewhere_and_a_twin_is_the_run_on_other_batches(cache: Path) -> None:
    run = trajectory(cache)
    gaps = {name: measurement(run).outcome(name).final_gap_nats for name in ("twin", "doubled", "placebo", "line")}
    assert None not in gaps.values()
    assert len(set(gaps.values())) == 4
    twin = run.trainer()
    twin.load(run.at(POINT.checkpoint).state())
    for _ in range(POINT.horizon):
        twin.step(batches_of=1000)
    twin.train_to(TINY.iterations)
    assert gaps["twin"] == pytest.approx(float((twin.final_losses() - run.final_losses()).mean()), abs=1e-12)


def test_stale_starts_with_the_checkpoint_at_the_failures_place(cache: Path) -> None:
    run = trajectory(cache)
    outcome = measurement(run).outcome("stale")
    assert outcome.curve is not None
    # Right at injection it has the losses of the checkpoint, 38 iterations earlier.
    assert outcome.curve["losses"][0] == run.curve(450, 450).losses[0].tolist()
    assert outcome.curve["iterations"][0] == POINT.failure


def test_methods_with_the_same_prediction_share_one_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_here = measurement(trajectory(cache))
    plain = measured_here.outcome("line-x2")
    monkeypatch.setitem(methods.PREDICTORS, "again", Method(partial(PlainLine, 300, 2.0)))
    same = measured_here.outcome("again")
    assert plain.curve == same.curve
    assert plain.lag_iterations is not None


def test_a_changed_predictor_is_formed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_here = measurement(trajectory(cache))
    before = measured_here.outcome("line")
    monkeypatch.setitem(methods.PREDICTORS, "line", methods.PREDICTORS["line-8-1.5"])
    monkeypatch.setattr(measure, "predictor_source", lambda name: "changed")
    after = measured_here.outcome("line")
    assert after.curve != before.curve
    assert after.settings == measured_here.outcome("line-8-1.5").settings


def test_a_method_that_advises_against_itself_costs_the_horizon(cache: Path) -> None:
    early = Point(interval=50, fraction=0.25, checkpoint=100, failure=148)  # two checkpoints
    outcome = measurement(trajectory(cache), early).outcome("line")
    assert not outcome.predicted
    assert (outcome.lag_iterations, outcome.end_cost_iterations, outcome.repeated_iterations) == (48.0, 48.0, 48)
    assert "3 usable checkpoints, and there are 2" in outcome.reason


def test_a_diverged_recovery_has_no_cost(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wild(LinePredictor):
        def predict(self, history: Any, forecast: Any) -> Any:
            return ((name, start, values * 1e20) for name, start, values in super().predict(history, forecast))

    monkeypatch.setitem(methods.PREDICTORS, "wild", Method(partial(Wild, 300, 1.0)))
    outcome = measurement(trajectory(cache)).outcome("wild")
    assert (outcome.lag_iterations, outcome.final_gap_nats, outcome.end_cost_iterations) == (None, None, None)
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


def test_options_change_the_quick_and_the_full_selection() -> None:
    assert selection() == QUICK
    assert selection(full=True) == FULL
    chosen = selection(points=2, workloads="gpt-0.4M,gpt-0.4M-cosine10-lower", methods="line,stale", infeasible=True)
    assert chosen.workloads == ("gpt-0.4M-cosine10", "gpt-0.4M-cosine10-lower")
    assert (chosen.points, chosen.methods, chosen.intervals) == (2, ("line", "stale"), (50, 300, 500))
    assert selection(intervals="100, 20,100").intervals == (100, 20)
    for wrong in ({"workloads": "gpt"}, {"methods": "lime"}):
        with pytest.raises(ConfigError, match=r"no (workload|method) is called '(gpt|lime)'"):
            selection(**wrong)  # type: ignore[arg-type]  # one of two names


def test_a_call_leaves_figures_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(dataclasses.replace(SELECTION, intervals=(50,), points=4), tmp_path / "cache", tmp_path / "out" / "tiny.json")
    report = json.loads((tmp_path / "out" / "tiny.json").read_text())
    assert {cell["method"] for cell in report["cells"]} == set(METHODS)
    assert {method: len(of) for method, of in report["failures"][TINY.name].items()} == dict.fromkeys(METHODS, 4)
    assert report["worths"][TINY.name]["nats"] > 3 * report["worths"][TINY.name]["standard_error_nats"] > 0
    assert report["machine"]["cpu_model"]
    for name in ("tiny.png", "tiny-gap.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "a checkpoint every 50 iterations" in text
    assert "against stale" in text
