"""A tiny run leaves everything behind, and kills lose no more than the interval."""

import json
from pathlib import Path

from cpsr.benchmarks.cadence.run import INTERVALS, Size, main


def test_a_tiny_run_leaves_its_figures(tmp_path: Path) -> None:
    result = tmp_path / "cadence.json"
    main(result, Size(runs=1, pairs=2, kills=1), workdir=tmp_path)
    figures = json.loads(result.read_text())
    assert len(figures["jobs"]) == 2 * len(INTERVALS)
    assert all(job["stall_seconds"][0] > 0 for job in figures["jobs"])
    assert figures["aims"] == {"lost at most the interval, exactly": True}
    assert [kill["interval_iterations"] for kill in figures["kills"]] == [*INTERVALS, None]
    assert figures["kills"][-1]["restored_iteration"] % figures["checkpoint_iterations"] == 0
