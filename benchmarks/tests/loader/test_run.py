"""The benchmark of loaders, small."""

import json
from pathlib import Path

from cpsr.benchmarks.loader.run import KINDS, WORKERS, main


def test_every_loader_goes_on_with_the_next_item(tmp_path: Path) -> None:
    main(tmp_path / "loader.json", batches=48, rounds=1)
    found = json.loads((tmp_path / "loader.json").read_text())
    assert set(found["seconds"]) == set(KINDS)
    for row in found["seconds"].values():
        assert set(row) == {str(workers) for workers in WORKERS}
        assert all(one["value"] > 0 for one in row.values())
