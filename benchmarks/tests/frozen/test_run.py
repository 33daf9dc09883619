"""The benchmark of frozen weights, small."""

import json
from pathlib import Path

from cpsr.benchmarks.frozen.run import LAYERS, main


def test_it_counts_what_each_checkpoint_writes(tmp_path: Path) -> None:
    width = 64
    main(tmp_path / "frozen.json", checkpoints=3, workdir=tmp_path, width=width, interval=2)
    found = json.loads((tmp_path / "frozen.json").read_text())
    base = LAYERS * width * width * 4
    assert found["frozen_bytes"] == base
    copied, frozen = found["ways"]["copied"], found["ways"]["frozen"]
    assert min(copied["bytes"]) > base + 3 * found["trained_bytes"]
    assert frozen["first_bytes"] > base
    assert max(frozen["bytes"]) < min(copied["bytes"]) - 0.95 * base
    assert (tmp_path / "frozen.png").exists()
