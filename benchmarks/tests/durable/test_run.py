"""A tiny run leaves its figures."""

import json
from pathlib import Path

from cpsr.benchmarks.durable.run import CPSR, RAW, main


def test_a_tiny_run_leaves_its_figures(tmp_path: Path) -> None:
    result = tmp_path / "durable.json"
    main(result, rounds=2, workdir=tmp_path, megabytes=[2])
    (size,) = json.loads(result.read_text())["sizes"]
    assert {name: len(own) for name, own in size["samples"].items()} == {CPSR: 2, RAW: 2}
    assert size["ratio"]["value"] > 0
