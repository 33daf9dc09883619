"""A tiny run leaves its figures."""

import json
from pathlib import Path

from cpsr.benchmarks.durable.run import main
from cpsr.benchmarks.durable.ways import CACHE, CPSR, RAW


def test_a_tiny_run_leaves_its_figures(tmp_path: Path) -> None:
    result = tmp_path / "durable.json"
    main(result, rounds=2, workdir=tmp_path, megabytes=[2])
    figures = json.loads(result.read_text())
    (size,) = figures["sizes"]
    assert size["samples"].keys() == {CPSR, RAW, CACHE}
    assert all(len(own) == 2 for own in size["samples"].values())
    assert size["ratio"]["value"] > 0
