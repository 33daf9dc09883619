"""The table and the file of the campaign, and that it refuses clearly where it cannot inject."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.faults.campaign import PARTS
from cpsr.benchmarks.faults.outcome import Outcome
from cpsr.benchmarks.faults.run import main
from cpsr.benchmarks.faults.scenarios import FIXED, REPLAYED
from cpsr.benchmarks.faults.selection import AT_LEAST, SAMPLE, SAMPLED_JOBS, Selection, parts_asked_for, select
from cpsr.benchmarks.faults.tracing import why_no_strace
from cpsr.errors import ConfigError, CPSRError


@pytest.mark.skipif(why_no_strace() is not None, reason=str(why_no_strace()))
def test_a_small_campaign_leaves_its_figures_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, workdir = tmp_path / "out" / "faults.json", tmp_path / "work"
    main(Selection({"kill: restart": 4}, ()), path, workdir)
    shown = capsys.readouterr().out
    assert "kill: restart" in shown
    assert "not injected: power cut" in shown
    report = json.loads(path.read_text())
    (row,) = report["scenarios"]
    assert row["tried"] == row["injected"] == row["survived"] == row["state_equal"] >= 2
    assert row["median_seconds"] > 0
    assert (report["not_survived"], report["not_injected"]) == ([], [])
    assert "power cut" in report["never_injected"]
    assert list(workdir.iterdir()) == []


def test_a_word_stands_for_all_names_that_begin_with_it_and_sparse_for_every_part_with_sparse_checkpoints() -> None:
    assert parts_asked_for("kill") == [name for name in PARTS if name.startswith("kill: ")]
    assert "sparse error: EIO" not in parts_asked_for("error")
    names = parts_asked_for("sparse,live")
    assert {"kill: sparse chain", "sparse error: EIO", "sparse restart: EIO", "sparse damage", "live"} <= set(names)
    assert all("sparse" in name for name in names if name != "live")


def test_an_unknown_part_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'kill: nothing'; there are kill: save and commit, "):
        select("kill: nothing")


def test_without_strace_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CPSRError, match="apt-get install strace"):
        main(select())


def test_the_sample_names_parts_and_jobs_that_there_are() -> None:
    assert set(SAMPLE) <= set(PARTS)
    assert set(AT_LEAST) <= set(PARTS)
    assert set(SAMPLED_JOBS) <= {scenario.name for scenario in FIXED}
    assert select("live", sample=True).parts == {}
    assert len(select("live", sample=True).scenarios) == len(SAMPLED_JOBS)
    assert select("error", sample=True).scenarios == ()


def test_replay_stands_for_jobs_with_windows_alone() -> None:
    found = select("replay")
    assert (found.parts, found.scenarios) == ({}, REPLAYED)
    assert all(scenario.window_iterations is None for scenario in select("live").scenarios)


def test_fewer_faults_than_there_have_to_be_are_named() -> None:
    met = [Outcome("kill: retention", str(number), True, True, True, 0.1) for number in range(20)]
    damage = [Outcome("exchange: between ranks", str(number), True, True, True, 0.1) for number in range(1500)]
    assert Selection({"kill: retention": 4, "damage": 1}, ()).missing([*met, *damage]) == []
    assert Selection({"kill: retention": 3}, ()).missing(met) == ["kill: retention: 20 faults, of at least 25"]
