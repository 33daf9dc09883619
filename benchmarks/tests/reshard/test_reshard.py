"""The measurement of resharded loads, small."""

import json
from pathlib import Path

from cpsr.benchmarks.reshard.run import main


def test_every_case_loads_what_was_saved(tmp_path: Path) -> None:
    main(tmp_path / "reshard.json", rounds=2, workdir=tmp_path, width=16, layers=2)
    found = json.loads((tmp_path / "reshard.json").read_text())
    assert [(row["saved_by"], row["ranks"]) for row in found["cases"]] == [(2, 3), (4, 2), (1, 4)]
    assert all(row["read_over_held"]["value"] > 0 for row in found["cases"])
