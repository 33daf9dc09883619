"""The table and the file of the campaign, and that it refuses clearly where it cannot inject."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.faults.run import main, parts_asked_for
from cpsr.benchmarks.faults.tracing import why_no_strace
from cpsr.errors import ConfigError, CPSRError


@pytest.mark.skipif(why_no_strace() is not None, reason=str(why_no_strace()))
def test_a_small_campaign_leaves_its_figures_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, workdir = tmp_path / "out" / "faults.json", tmp_path / "work"
    main(path, every=3, only="kill: setting aside", workdir=workdir)
    shown = capsys.readouterr().out
    assert "kill: setting aside" in shown
    assert "not injected: power cut" in shown
    report = json.loads(path.read_text())
    (row,) = report["scenarios"]
    assert row["tried"] == row["injected"] == row["survived"] == row["state_equal"] >= 2
    assert row["median_seconds"] > 0
    assert (report["not_survived"], report["not_injected"]) == ([], [])
    assert "power cut" in report["never_injected"]
    assert list(workdir.iterdir()) == []


def test_sparse_stands_for_every_part_with_sparse_checkpoints() -> None:
    names = parts_asked_for("sparse,live")
    assert {"kill: sparse chain", "sparse error: EIO", "sparse restart: EIO", "sparse damage", "live"} <= set(names)
    assert all("sparse" in name for name in names if name != "live")


def test_an_unknown_part_is_refused_by_name() -> None:
    if why_no_strace() is not None:
        pytest.skip(str(why_no_strace()))
    with pytest.raises(ConfigError, match=r"'kill: nothing'; there are kill: save and commit, "):
        main(only="kill: nothing")


def test_without_strace_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CPSRError, match="apt-get install strace"):
        main()
