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
from cpsr.predictor.calibration import STALE, Context, Setting, Table, table
from cpsr.predictor.network import PARAMETERS

SHIPPED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "2026-11-29-prior"


def drawn(families: int, failures: int, noise: float) -> tuple[list[Measured], list[float]]:
    """Moves that save a share of the reach, by family, skips that are the cheaper the more they do; and the shares."""
    draw = numpy.random.default_rng(0)
    shares = list(draw.normal(0.6, 0.1, families))
    found = []
    for number in range(families * failures):
        family = number // failures
        context = Context(draw.uniform(20, 90), draw.uniform(600, 2000), draw.uniform(0.2, 1.0))
        name = f"family-{family}"
        skip = context.horizon_iterations * context.learning_rate_ratio * (1.6 - shares[family])
        skip += draw.normal(0.0, noise)
        found.append(Measured(name, name, number, context, STALE, skip, 2.0))
        for reach in draw.uniform(10, 200, 4):
            setting = Setting(300.0, reach)
            move = -shares[family] * reach + draw.normal(0.0, noise)
            found.append(Measured(name, name, number, context, setting, skip + move, 2.0, move))
    return found, shares


def test_the_fit_finds_the_means_and_how_families_differ() -> None:
    measured, shares = drawn(families=8, failures=12, noise=4.0)
    found = fit(measured, {})
    context, setting = Context(40, 1500, 0.6), Setting(300, 100)
    skip = 40 * 0.6 * (1.6 - numpy.mean(shares))
    assert found.expected(context, STALE).end_cost_iterations == pytest.approx(skip, abs=2.0)
    expected = found.expected(context, setting)
    assert expected.move_iterations == pytest.approx(-100 * numpy.mean(shares), abs=4.0)
    assert 0.5 < expected.deviation_iterations / (100 * numpy.std(shares, ddof=1)) < 2.0
    wild = [replace(measured[0], cost_iterations=5000.0), *measured[1:]]
    assert fit(wild, {}).expected(context, STALE).end_cost_iterations == pytest.approx(skip, abs=3.0)
    # The network's direction is not fitted to these.
    bent = replace(setting, direction="vitp")
    assert found.expected(context, bent).move_iterations - expected.move_iterations == pytest.approx(-0.64)


def test_each_family_is_judged_without_itself() -> None:
    measured, shares = drawn(families=6, failures=8, noise=2.0)
    judged = judge(measured)
    assert [one.family for one in judged] == [f"family-{number}" for number in range(6)]
    for one in judged:
        assert one.failures == 8
        assert 0.3 < one.stale < 1.0
        assert one.chosen < 0.0
        assert 0.0 <= one.regret < 0.1
    far = min(range(6), key=lambda number: shares[number])
    assert judged[far].surprise > 0.5, "its skips are dearer than the others', which must not know of it"


def test_collecting_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior, "INTERVALS", (20, 50))
    monkeypatch.setattr(prior, "SHARD_EVERY", 2)
    run = PriorRun(TINY, 100, "tiny")
    with one_thread(), Workers(1) as pool:
        (first,) = collect([(run, 0)], tmp_path, pool)
        times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/drawn/*.json")}
        assert len(times) == 1
        again, second = collect([(run, 0), (run, 1)], tmp_path, pool)
    assert again == first
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    kinds = [(one["setting"] is None, one.get("alone", False)) for one in first["recoveries"]]
    assert kinds == [(True, False), (False, True), (False, False), (False, True)]
    worth = IterationWorth(2e-5, 1e-6, TINY.iterations)
    stale, alone, predicted, *_ = measured_of([first, second], {TINY.name: worth}, {TINY.name: "tiny"})
    assert stale.cost_iterations == pytest.approx(first["recoveries"][0]["final_gap_nats"] / worth.nats)
    assert alone.move_iterations is not None
    assert alone.cost_iterations == pytest.approx(stale.cost_iterations + alone.move_iterations)
    assert predicted.move_iterations == pytest.approx(predicted.cost_iterations - stale.cost_iterations)
    assert alone.setting == predicted.setting
    assert first["lost_share"] == 1.0
    assert second["lost_share"] in (pytest.approx(share, abs=0.01) for share in (1 / 2, 1 / 4, 1 / 8, 1 / 16))
    assert not any(one.get("alone", False) for one in second["recoveries"]), "nothing is moved alone beside a shard"


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
    assert len(set(named.values())) == len(RUNS) == 29
    kinds = "cosine-4", "cosine10+0", "wsd+1", "sgd-cosine10-2", "descriptions-cosine10+0", "muon-cosine10+0"
    assert [named[f"prior-gpt-0.1M-{kind}"] for kind in kinds] == [100, 106, 111, 112, 115, 116]
    assert (named["prior-conv-0.1M-sgd-cosine10-2"], named["prior-lstm-0.2M-wsd+0"]) == (124, 131)


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
