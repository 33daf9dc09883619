"""Measuring recoveries for the prior table, and fitting it."""

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery import network, prior
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.prior import RUNS, PriorRun, collect
from cpsr.benchmarks.recovery.prior_fit import Recoveries, fit, leave_one_group_out, recoveries_of
from cpsr.benchmarks.recovery.workload import WORKLOADS
from cpsr.benchmarks.tests.recovery.tiny import TINY, one_thread
from cpsr.predictor.calibration import FEATURES, Context, Setting, Table, features, table
from cpsr.predictor.network import PARAMETERS

SHIPPED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "2026-11-24-prior"
BENT = FEATURES.index("reach * bent")


def drawn(runs: int, failures: int, settings: int, noise: float) -> tuple[Recoveries, list[float]]:
    """Recoveries whose cost is the horizon less a share of the reach that differs by run; and these shares."""
    draw = numpy.random.default_rng(0)
    shares = list(draw.normal(0.6, 0.1, runs))
    terms, costs, horizons, names, numbers = [], [], [], [], []
    for run, share in enumerate(shares):
        for failure in range(failures):
            context = Context(draw.uniform(5, 90), draw.uniform(300, 2000), draw.choice([20, 50, 100]), draw.uniform())
            for place in range(settings):
                reach = 0.0 if place == 0 else draw.uniform(10, 200)
                setting = Setting(draw.choice([200, 300, 400]), reach)
                terms.append(features(context, setting))
                costs.append(context.horizon_iterations - share * reach + draw.normal(0.0, noise))
                horizons.append(context.horizon_iterations)
                names.append(f"run-{run}")
                numbers.append(run * failures + failure)
    values = numpy.array(costs)
    whole = numpy.ones(len(values))
    return Recoveries(*map(numpy.array, (terms, values, horizons, whole, names, numbers))), shares


def test_the_fit_finds_the_mean_and_how_runs_differ() -> None:
    recoveries, shares = drawn(runs=8, failures=12, settings=8, noise=4.0)
    found = fit(recoveries, {})
    at = features(Context(40, 1500, 50, 0.6), Setting(300, 100))
    assert at @ found.mean == pytest.approx(40 - 100 * numpy.mean(shares), abs=6.0)
    deviation = numpy.sqrt(at @ found.covariance @ at)
    assert 0.5 < deviation / (100 * numpy.std(shares, ddof=1)) < 2.0
    assert 2.0 < found.noise_iterations < 14.0
    recoveries.costs[7] += 5000.0  # a wild one
    assert at @ fit(recoveries, {}).mean == pytest.approx(at @ found.mean, abs=3.0)
    # The network's direction was not drawn.
    assert (found.mean[BENT], found.covariance[BENT, BENT]) == (0.0, pytest.approx(0.04))
    assert not numpy.delete(found.covariance[BENT], BENT).any()


def test_each_group_is_judged_without_itself() -> None:
    recoveries, _ = drawn(runs=6, failures=8, settings=6, noise=2.0)
    alone = {f"run-{number}": f"run-{number}" for number in range(6)}
    for left in leave_one_group_out(recoveries, alone):
        assert left.correlation > 0.9
        assert len(left.chosen_over_horizon) == 8
        assert numpy.mean(left.chosen_over_horizon) < left.stale_over_horizon
    of_two = {f"run-{number}": f"group-{number // 2}" for number in range(6)}
    recoveries.costs[numpy.isin(recoveries.runs, ("run-0", "run-1"))] *= 5.0
    strange, others = leave_one_group_out(recoveries, of_two), leave_one_group_out(recoveries, alone)
    assert strange[0] != others[0], "the run beside it in the group must not help"


def test_collecting_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior, "INTERVALS", (20, 50))
    monkeypatch.setattr(prior, "SHARD_EVERY", 2)
    runs = [PriorRun(TINY, 100, "tiny")]
    with one_thread(), Workers(1) as pool:
        (first,) = collect(runs, 1, 2, tmp_path, pool)
        times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/drawn/*.json")}
        assert len(times) == 1
        again, second = collect(runs, 2, 2, tmp_path, pool)
    assert again == first
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    stale, *lines = first["recoveries"]
    assert (stale["setting"], len(lines)) == (None, 2)
    worth = IterationWorth(2e-5, 1e-6, TINY.iterations)
    found = recoveries_of([first, second], {TINY.name: worth})
    assert len(found.costs) == 6
    assert found.costs[0] == pytest.approx(stale["final_gap_nats"] / worth.nats)
    assert first["lost_share"] == 1.0
    assert second["lost_share"] in (pytest.approx(share, abs=0.01) for share in (0.5, 0.25, 0.125))
    whole = recoveries_of([first, second | {"lost_share": 1.0}], {TINY.name: worth})
    assert numpy.allclose(found.terms[3:], second["lost_share"] * whole.terms[3:]), "a part costs its share"


def test_the_command_fits_what_is_there_and_writes_the_table(tmp_path: Path) -> None:
    prior.main(0, SHIPPED, tmp_path, tmp_path / "table.json", tmp_path / "prior.json")
    written = Table.from_json((tmp_path / "table.json").read_text())
    assert numpy.allclose(written.mean, table().mean, rtol=1e-4, atol=1e-6), "the shipped table is not of these data"
    report = json.loads((tmp_path / "prior.json").read_text())
    assert {one["run"] for one in report["left_out"]} == {run.workload.name for run in RUNS}


def test_no_run_of_the_prior_is_one_that_is_reported_and_each_keeps_its_seed() -> None:
    """Recoveries in the cache are of the name and the seed."""
    assert not {run.workload.name for run in RUNS} & set(WORKLOADS)
    named = {run.workload.name: run.seed for run in RUNS}
    assert len(set(named.values())) == len(RUNS) == 17
    kinds = "cosine-4", "cosine10+0", "wsd+1", "sgd-cosine10-2", "descriptions-cosine10+0", "muon-cosine10+0"
    assert [named[f"prior-gpt-0.1M-{kind}"] for kind in kinds] == [100, 106, 111, 112, 115, 116]


def test_the_network_is_pretrained_alike_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "STEPS", 3)
    runs = [PriorRun(TINY, 100, "first")]
    weights = tmp_path / "weights.safetensors"
    with one_thread():
        network.main(weights, tmp_path, 1, runs=runs)
        content = weights.read_bytes()
        network.main(weights, tmp_path, 1, runs=runs)
    assert weights.read_bytes() == content, "the same runs give the same file"
    assert load_file(weights)["parameters"].shape == (PARAMETERS,)
