"""The recovery benchmark: paired to the bit, resumable anywhere, and each way to come back is what it says."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery import measure, tune
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.ending import final_loss, worths
from cpsr.benchmarks.recovery.failure import Failure
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.lost import lost_part
from cpsr.benchmarks.recovery.measure import Outcome, outcomes_at
from cpsr.benchmarks.recovery.methods import form
from cpsr.benchmarks.recovery.result import Group, difference, pooled, summarise
from cpsr.benchmarks.recovery.run import main
from cpsr.benchmarks.recovery.selection import FULL, QUICK, selection
from cpsr.benchmarks.recovery.tasks import TASKS, gpt_task
from cpsr.benchmarks.recovery.trainer import Trainer
from cpsr.benchmarks.recovery.trajectory import Run, Trajectory
from cpsr.benchmarks.recovery.workload import OPTIMIZERS, WORKLOADS, OptimizerName, Workload
from cpsr.benchmarks.tests.recovery.tiny import METHODS, SELECTION, TINY, TinyTask, measured, one_thread
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError, CPSRError

HORIZON = 40
POINT = Point(interval=50, fraction=0.5, checkpoint=450, failure=488)
WORTH = IterationWorth(2e-5, 1e-6, TINY.iterations)
SHORT = dataclasses.replace(TINY, name="short", iterations=200)
SMALL = Workload("small", lambda: gpt_task(GPTConfig(layers=3, heads=1, width=8, context=16)), "cosine", 1e-2, 100)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(WORKLOADS, SHORT.name, SHORT)
    monkeypatch.setitem(TASKS, "tiny", TinyTask)
    with one_thread():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trajectory:
    with one_thread():
        return Run(TINY, 0, tmp_path_factory.mktemp("cache")).trajectory()


def outcome(run: Trajectory, method: str, point: Point = POINT) -> Outcome:
    (found,) = outcomes_at(run, point, (method,), WORTH)
    return found


def end_gap(run: Trajectory, trainer: Trainer) -> float:
    """Final loss over that of the fault-free run."""
    trainer.train_to(TINY.iterations)
    return float((trainer.final_losses() - run.final_losses()).mean())


def test_a_call_leaves_figures_and_a_finished_one_measures_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = dataclasses.replace(SELECTION, workloads=(SHORT.name,), intervals=(20,), points=1)
    main(one, tmp_path / "cache", tmp_path / "first.json", 1)
    report = json.loads((tmp_path / "first.json").read_text())
    assert {cost["group"]["method"] for cost in report["costs"]} == set(METHODS)
    assert {method: len(of) for method, of in report["failures"][SHORT.name].items()} == dict.fromkeys(METHODS, 1)
    assert report["worths"][SHORT.name]["nats"] > 0
    assert (tmp_path / "first.png").stat().st_size > 0
    monkeypatch.setattr(measure, "form", None)  # calling it would raise
    main(one, tmp_path / "cache", tmp_path / "second.json", 1)
    assert measured(tmp_path / "first.json") == measured(tmp_path / "second.json")


def test_an_oracle_that_differs_stops_the_benchmark(run: Trajectory) -> None:
    found = outcome(run, "oracle")
    assert (found.final_gap_nats, found.end_cost_iterations) == (0.0, 0.0)
    (path,) = (run.directory / "points" / "T050-f00488").glob("oracle-*.json")
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | {"final_gap_nats": 1e-12}))
    with pytest.raises(CPSRError, match="fault-free losses"):
        outcome(run, "oracle")
    path.write_text(kept)


def test_a_recovery_is_trained_to_the_end_and_costs_what_is_missing_there(run: Trajectory) -> None:
    found = outcome(run, "stale")
    trainer = run.trainer()
    trainer.load(dataclasses.replace(run.at(450).state(), iteration=POINT.failure))
    assert found.final_gap_nats == end_gap(run, trainer)
    assert found.final_gap_nats is not None
    assert found.end_cost_iterations == pytest.approx(found.final_gap_nats / WORTH.nats)


def test_the_control_moves_the_true_state_as_far_and_is_taken_off_the_prediction(run: Trajectory) -> None:
    failure = Failure(run, POINT)
    predicted, moved = form("predicted", failure).state, form("moved", failure).state
    assert predicted is not None
    assert moved is not None
    for name, values in moved.weights.items():
        expected = failure.exact.weights[name] + (predicted.weights[name] - failure.checkpoint.weights[name])
        torch.testing.assert_close(values, expected)
    cost, control = outcome(run, "predicted"), outcome(run, "moved")
    assert cost.end_cost_iterations is not None
    assert control.end_cost_iterations is not None
    assert cost.net_iterations == pytest.approx(cost.end_cost_iterations - control.end_cost_iterations)
    again = outcome(run, "moved-then-recompute")
    trainer = run.trainer()
    trainer.load(dataclasses.replace(failure.checkpoint, weights=predicted.weights))
    assert again.final_gap_nats == end_gap(run, trainer)
    assert again.final_gap_nats is not None
    assert again.end_cost_iterations == pytest.approx(POINT.horizon + again.final_gap_nats / WORTH.nats)
    part = outcome(run, "moved-then-recompute", dataclasses.replace(POINT, lost="1/4"))
    assert (part.formed, part.net_iterations) == (False, POINT.horizon)


def test_auto_costs_what_the_way_costs_that_it_takes(run: Trajectory) -> None:
    auto = outcome(run, "auto")
    taken = outcome(run, auto.reason.split(":")[0])
    assert (auto.end_cost_iterations, auto.net_iterations) == (taken.end_cost_iterations, taken.net_iterations)


def test_a_rate_that_was_skipped_is_made_up(run: Trajectory) -> None:
    formed, made_up = form("stale", Failure(run, POINT)), form("made-up", Failure(run, POINT))
    assert formed.state is not None
    assert made_up.state is not None
    assert formed.state.digest() == made_up.state.digest()
    trainer = run.trainer()
    trainer.load(made_up.state)
    trainer.scale_rates(made_up.rate_factor, made_up.rate_until)
    skipped = TINY.times[POINT.failure] - TINY.times[POINT.checkpoint]
    over = TINY.times[made_up.rate_until] - TINY.times[POINT.failure]
    assert (made_up.rate_factor - 1.0) * over == pytest.approx(skipped)
    assert outcome(run, "made-up").final_gap_nats == end_gap(run, trainer)
    assert outcome(run, "made-up").control_iterations == outcome(run, "made-up-exact").end_cost_iterations


def test_a_method_that_advises_against_itself_costs_the_horizon(run: Trajectory) -> None:
    early = Point(interval=50, fraction=0.25, checkpoint=100, failure=148)  # two checkpoints
    found = outcome(run, "auto", early)
    assert (found.formed, found.end_cost_iterations) == (False, 48.0)


def test_weights_that_differ_from_the_cached_run_stop_the_benchmark(tmp_path: Path) -> None:
    run = Run(TINY, 0, tmp_path).trajectory()
    tensors = load_file(run.path)
    tensors["weights/60/0.bias"][3] += 1e-6
    save_file(tensors, run.path)
    assert run.at(55).iteration == 55
    with pytest.raises(CPSRError, match=r"iteration 60 .*'0\.bias'"):
        run.at(65)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_cache_restores_every_optimizer_bit_by_bit(optimizer: OptimizerName, tmp_path: Path) -> None:
    workload = dataclasses.replace(SMALL, optimizer=optimizer)
    trainer = Trainer(workload, workload.task(), 0)
    trainer.train_to(65)
    assert Run(workload, 0, tmp_path).trajectory().at(65).state().digest() == trainer.state().digest()
    assert all(values.any() for tensors in trainer.state().moments.values() for values in tensors.values())


def test_survivors_keep_their_exact_state_and_only_what_was_lost_is_formed(run: Trajectory) -> None:
    point = dataclasses.replace(POINT, lost="1/4")
    failure, checkpoint = run.at(488).state(), run.at(450).state()
    state = lost_part("1/4", failure, point.checkpoint // point.interval).complete(checkpoint)
    changed = sum(int((state.weights[name] != values).sum()) for name, values in failure.weights.items())
    assert 0 < changed <= -(-sum(values.numel() for values in failure.weights.values()) // 4)
    trainer = run.trainer()
    trainer.load(state)
    outcomes = {one.method: one for one in outcomes_at(run, point, ("stale", "predicted", "scar", "oracle"), WORTH)}
    assert outcomes["stale"].final_gap_nats == end_gap(run, trainer)
    assert outcomes["oracle"].end_cost_iterations == 0.0


def test_a_running_checkpoint_is_made_of_recent_parts(run: Trajectory) -> None:
    saved = form("scar", Failure(run, POINT)).state
    assert saved is not None
    recent = {at: run.at(at).state() for at in range(350, 488, 10)}
    ages = set()
    for name, values in saved.weights.items():
        matches = [at for at, state in recent.items() if torch.equal(state.weights[name], values)]
        assert matches, f"{name} is no part of a recent state"
        ages.update(matches)
    assert max(ages) == 480
    assert len(ages) > 1


def test_a_lost_block_is_the_mean_of_its_neighbours(tmp_path: Path) -> None:
    run = Run(SMALL, 0, tmp_path).trajectory()
    stage = Point(interval=20, fraction=0.5, checkpoint=40, failure=53, lost="stage")
    formed = form("checkfree", Failure(run, stage)).state
    assert formed is not None
    one, two, three = (formed.weights[f"blocks.{place}.mlp.0.weight"] for place in range(3))
    share = float(((two - three) / (one - three)).median())
    assert 0 < share < 1
    torch.testing.assert_close(two, share * one + (1 - share) * three, rtol=1e-3, atol=1e-5)
    assert form("checkfree", Failure(run, dataclasses.replace(stage, lost="1/2"))).state is None


def test_options_change_the_quick_and_the_full_selection() -> None:
    assert selection() == QUICK
    assert selection(full=True) == FULL
    chosen = selection(points=2, workloads="gpt-0.4M,gpt-0.4M-cosine10-lower", methods="auto,stale", lost="1/4,all")
    assert chosen.workloads == ("gpt-0.4M-cosine10", "gpt-0.4M-cosine10-lower")
    assert (chosen.points, chosen.methods, chosen.lost) == (2, ("auto", "stale"), ("all", "1/4"))
    for wrong in ({"workloads": "gpt"}, {"methods": "lime"}, {"lost": "1/3"}, {"intervals": "25"}):
        with pytest.raises(ConfigError):
            selection(**wrong)  # type: ignore[arg-type]  # one of four names


def test_a_longer_training_ends_lower_and_one_that_does_not_has_no_worth(tmp_path: Path) -> None:
    own = final_loss(Run(SHORT, 0, tmp_path))
    assert own is not None
    with Workers(1) as pool:
        found = worths({Run(SHORT, 0, tmp_path): own}, tmp_path, pool, lambda done, total: None)["short"]
        assert found.nats > 3 * found.standard_error_nats > 0
        for rate, words in ((1e-12, "short: one more iteration"), (1e30, "diverged")):
            wrong = Run(dataclasses.replace(SHORT, peak_learning_rate=rate), 0, tmp_path)
            with pytest.raises(CPSRError, match=words):
                worths({wrong: 0.1}, tmp_path, pool, lambda done, total: None)


def test_the_best_rate_has_two_on_either_side_and_is_kept(tmp_path: Path) -> None:
    chosen = [tune.Setting("tiny", schedule, 60) for schedule in ("cosine", "wsd")]
    tune.main(chosen, 2, tmp_path / "cache", tmp_path / "tune.json", 1)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    for setting in json.loads((tmp_path / "tune.json").read_text())["settings"]:
        peaks = [rate["peak_learning_rate"] for rate in setting["rates"]]
        assert 2 <= peaks.index(setting["best_peak_learning_rate"]) <= len(peaks) - 3
    tune.main(chosen, 2, tmp_path / "cache", workers=1)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == times


def scored(method: str, cost: float | None, seed: int = 0, control: float = 0.0, horizon: int = HORIZON) -> Outcome:
    point = Point(50, 0.5, 500, 500 + horizon)
    gap = None if cost is None else 0.0
    return Outcome(method, TINY.name, seed, point, cost != horizon, "", gap, cost, control)


def test_costs_are_pooled_net_of_their_controls_and_paired_by_failure() -> None:
    costs = [(10.0, 30.0), (-10.0, 20.0), (20.0, 34.0), (40.0, 16.0)]
    of = [scored("auto", auto, seed, -4.0 * (auto != HORIZON)) for seed, (auto, _) in enumerate(costs)]
    of += [scored("stale", stale, seed) for seed, (_, stale) in reversed([*enumerate(costs)])]
    of.append(scored("auto", None, 9))
    asked = dataclasses.replace(SELECTION, intervals=(50,), fractions=(0.5,), methods=("auto", "stale"))
    found = summarise(asked, of)
    for group in (Group("auto"), Group("auto", "all", TINY.name, 0.5, 50)):
        auto = found[group]
        assert (auto.failures, auto.diverged, auto.declined) == (4, 1, 1)
        assert (auto.end_cost.value, auto.net.value) == pytest.approx((60 / 160, 72 / 160))
    less = difference(of, "auto", "stale")
    assert less is not None
    assert less.value == pytest.approx((72 - 100) / 160)
    assert difference(of, "auto", "scar") is None


def test_long_failures_count_more_and_seeds_give_the_interval() -> None:
    costs = [1.0, 2.0, 4.0]
    of = [
        scored("stale", cost * horizon, seed, horizon=horizon)
        for seed, cost in enumerate(costs)
        for horizon in (10, 30)
    ]
    found = pooled(of, lambda one: one.end_cost_iterations or 0.0)
    expected = stats.t.interval(0.95, 2, numpy.mean(costs), stats.sem(costs))
    assert (found.value, found.low, found.high) == pytest.approx((numpy.mean(costs), *expected))
    assert pooled(of[:4], lambda one: 1.0).low is None
    uneven = [scored("stale", 10.0, 0, horizon=10), scored("stale", 0.0, 0, horizon=30)]
    assert pooled(uneven, lambda one: one.end_cost_iterations or 0.0).value == pytest.approx(0.25)
