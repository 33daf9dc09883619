"""Measuring recoveries for the prior table, and fitting it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery import network, prior
from cpsr.benchmarks.recovery.end_cost import IterationWorth
from cpsr.benchmarks.recovery.prior import RUNS, PriorRun, collect
from cpsr.benchmarks.recovery.prior_fit import Measured, fit, judge, measured_of
from cpsr.benchmarks.recovery.workload import WORKLOADS
from cpsr.benchmarks.tests.recovery.tiny import TINY, one_thread
from cpsr.predictor.calibration import MOVE_TERMS, STALE, Context, Setting, Table, table
from cpsr.predictor.network import PARAMETERS

SHIPPED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "2026-11-24-prior"
BENT = MOVE_TERMS.index("reach * bent")


def drawn(families: int, failures: int, noise: float) -> tuple[list[Measured], list[float]]:
    """Skips that cost the horizon, and moves that save a share of the reach, by family; and these shares."""
    draw = numpy.random.default_rng(0)
    shares = list(draw.normal(0.6, 0.1, families))
    found = []
    for number in range(families * failures):
        family = number // failures
        context = Context(draw.uniform(20, 90), draw.uniform(600, 2000), draw.uniform())
        name = f"family-{family}"
        skip = context.horizon_iterations + draw.normal(0.0, noise)
        found.append(Measured(name, name, number, context, STALE, alone=False, cost_iterations=skip))
        for reach in draw.uniform(10, 200, 4):
            setting = Setting(300.0, reach)
            move = -shares[family] * reach + draw.normal(0.0, noise)
            found.append(Measured(name, name, number, context, setting, True, move, move))
            found.append(Measured(name, name, number, context, setting, False, skip + move, move))
    return found, shares


def test_the_fit_finds_the_means_and_how_families_differ() -> None:
    measured, shares = drawn(families=8, failures=12, noise=4.0)
    found = fit(measured, {})
    context, setting = Context(40, 1500, 0.6), Setting(300, 100)
    assert found.expected(context, STALE).end_cost_iterations == pytest.approx(40, abs=2.0)
    expected = found.expected(context, setting)
    assert expected.move_iterations == pytest.approx(-100 * numpy.mean(shares), abs=4.0)
    assert 0.5 < expected.deviation_iterations / (100 * numpy.std(shares, ddof=1)) < 2.0
    wild = [replace(measured[0], cost_iterations=5000.0), *measured[1:]]
    assert fit(wild, {}).expected(context, STALE).end_cost_iterations == pytest.approx(40, abs=3.0)
    # The network's direction was not drawn.
    assert (found.move.mean[BENT], found.move.covariance[BENT, BENT]) == (0.0, pytest.approx(0.04))
    assert not numpy.delete(found.move.covariance[BENT], BENT).any()


def test_each_family_is_judged_without_itself() -> None:
    measured, shares = drawn(families=6, failures=8, noise=2.0)
    judged = judge(measured)
    assert [one.family for one in judged] == [f"family-{number}" for number in range(6)]
    for one in judged:
        assert one.failures == 8
        assert one.stale == pytest.approx(1.0, abs=0.05)
        assert one.chosen < 0.0
        assert 0.0 <= one.regret < 0.1
    far = min(range(6), key=lambda number: shares[number])
    assert judged[far].surprise > 0.5, "it gains less than the others, which must not know of it"


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
    found = measured_of([first, second], {TINY.name: worth}, {TINY.name: "tiny"})
    assert len(found) == 6
    assert found[0].cost_iterations == pytest.approx(stale["final_gap_nats"] / worth.nats)
    assert found[1].move_iterations == pytest.approx(found[1].cost_iterations - found[0].cost_iterations)
    assert first["lost_share"] == 1.0
    assert second["lost_share"] in (pytest.approx(share, abs=0.01) for share in (0.5, 0.25, 0.125))


def test_the_command_fits_what_is_there_and_writes_the_table(tmp_path: Path) -> None:
    prior.main(0, SHIPPED, tmp_path, tmp_path / "table.json", tmp_path / "prior.json")
    written = Table.from_json((tmp_path / "table.json").read_text())
    for ours, shipped in ((written.skip, table().skip), (written.move, table().move)):
        assert numpy.allclose(ours.mean, shipped.mean, rtol=1e-4, atol=1e-6), "the shipped table is not of these data"
    report = json.loads((tmp_path / "prior.json").read_text())
    assert {one["family"] for one in report["held_out"]} == {run.family for run in RUNS}


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
