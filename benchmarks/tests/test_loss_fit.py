"""That runs are read as they were written, fits judged by what came after, and everything left behind."""

import json
import math
from pathlib import Path

import numpy
import pytest
import torch

from cpsr.benchmarks.loss_fit.losses import RunLosses, read_runs
from cpsr.benchmarks.loss_fit.result import fit_phases, summarise
from cpsr.benchmarks.loss_fit.run import main
from cpsr.benchmarks.tests.recovery.tiny import fault_free, one_thread
from cpsr.errors import CPSRError, JournalError
from cpsr.journal.rows import PhaseRow, StepRow
from cpsr.journal.writer import Journal

NOISE = 0.1


def losses_of(iterations: int) -> list[float]:
    noise = NOISE * numpy.random.default_rng(0).normal(size=iterations)
    return [float(2 + 2 * math.exp(-n / 150) + noise[n - 1]) for n in range(1, iterations + 1)]


def write_journal(directory: Path, losses: list[float], phases: tuple[tuple[int, int], ...] = ()) -> Path:
    directory.mkdir()
    journal = Journal.open(directory / "journal.db")
    life = journal.start_life("auto")
    journal.record(
        *[
            StepRow(life=life, iteration=n, loss=loss, learning_rate=1e-3, seconds=0.1)
            for n, loss in enumerate(losses, 1)
        ]
    )
    for number, (first, last) in enumerate(phases):
        interval = {"first_iteration": first, "last_iteration": last}
        journal.record(PhaseRow(life=life, phase=number, **interval, xi=1.0, last_xi=1.1, ended_by="change"))
    journal.close()
    return directory


def test_a_journal_gives_its_losses_and_phases_without_those_that_are_no_loss(tmp_path: Path) -> None:
    losses = losses_of(100)
    losses[9], losses[19] = math.nan, math.inf
    (run,) = read_runs(write_journal(tmp_path / "run", losses, ((1, 60),)))
    assert (run.kind, run.left_out, run.phases) == ("training", 2, ((1, 60, "change"),))
    assert run.iterations.tolist() == [n for n in range(1, 101) if n not in (10, 20)]
    assert run.losses.tolist() == [loss for loss in losses if math.isfinite(loss)]
    assert [(fit.first_iteration, fit.last_iteration, fit.ended_by) for fit in fit_phases(run, 500)] == [
        (1, 60, "change")
    ]


def test_a_cached_run_gives_both_curves_and_its_second_moments(tmp_path: Path) -> None:
    with one_thread():
        trajectory = fault_free(tmp_path, 150)
        training, validation = read_runs(trajectory.directory)
        state = trajectory.at(100).state()
    assert training.run == validation.run == "tiny-cosine-seed0"
    assert len(training.losses) == 150
    assert training.iterations.tolist() == list(range(1, 151))
    curve = trajectory.curve(0, 150)
    assert validation.iterations.tolist() == curve.iterations.tolist()
    assert validation.losses == pytest.approx(curve.losses.mean(axis=1))
    assert list(training.mean_exp_avg_sq) == [50, 100, 150]
    moments = torch.cat(list(state.moments["exp_avg_sq"].values()))
    assert training.mean_exp_avg_sq[100] == pytest.approx(float(moments.mean()))


def test_a_forecast_is_judged_by_the_losses_that_came_after() -> None:
    iterations, losses = numpy.arange(1, 801), numpy.array(losses_of(800))
    whole = RunLosses("run", "training", iterations, losses, 0)
    fits = fit_phases(whole, 300)
    assert [(fit.first_iteration, fit.last_iteration, fit.next_iteration) for fit in fits] == [
        (0, 300, 600),
        (300, 600, 800),
    ]
    for fit in fits:
        ahead = (iterations > fit.last_iteration) & (iterations <= fit.next_iteration)
        missed = losses[ahead] - fit.fit.at(iterations[ahead])
        assert fit.next_rmse_nats == pytest.approx(numpy.sqrt(numpy.mean(missed**2)))
        assert fit.next_rmse_nats < fit.unweighted_rmse_nats
        assert 0.85 < fit.coverage <= 1
    # What came later changes no fit.
    shorter = RunLosses("run", "training", iterations[:620], losses[:620], 0)
    assert fit_phases(shorter, 300)[0].to_json()["fit"] == fits[0].to_json()["fit"]
    (summary,) = summarise(fits)
    assert summary.forecasts == 2
    assert summary.coverage == pytest.approx((fits[0].coverage + fits[1].coverage) / 2)


def test_second_moments_end_phases_where_they_change() -> None:
    moments = {end: (1 - 0.999**end) * (1e-6 if end <= 200 else 2e-6) for end in range(50, 401, 50)}
    run = RunLosses("run", "training", numpy.arange(1, 401), numpy.array(losses_of(400)), 0, moments)
    assert [(fit.last_iteration, fit.ended_by) for fit in fit_phases(run, 1000)] == [(250, "change")]


def test_figures_and_a_plot_are_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures" / "fit.json"
    runs = [write_journal(tmp_path / name, losses_of(400)) for name in ("one", "two", "three")]
    main(runs, 150, path)
    report = json.loads(path.read_text())
    assert [(fit["run"].rpartition("/")[2], fit["last_iteration"]) for fit in report["results"]] == [
        (name, end) for name in ("one", "two", "three") for end in (150, 300)
    ]
    assert report["summaries"][0]["forecasts"] == 6
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "0.0824" in capsys.readouterr().out


def test_runs_that_cannot_be_judged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal"):
        main([tmp_path])
    short = write_journal(tmp_path / "short", losses_of(40))
    with pytest.raises(CPSRError, match="nothing was fitted"):
        main([short, write_journal(tmp_path / "empty", [])])
    (tmp_path / "identity.json").write_text("{}")
    with pytest.raises(CPSRError, match="has no segment"):
        main([tmp_path])
