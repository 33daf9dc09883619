"""The benchmark of windows, small."""

import json
from pathlib import Path

from cpsr.benchmarks.replay.job import Shape
from cpsr.benchmarks.replay.run import main, variants


def test_every_variant_is_measured(tmp_path: Path) -> None:
    shape = Shape(width=16, layers=2, experts=2, tokens=64)
    path = tmp_path / "replay.json"
    main(path, rounds=1, steps=6, windows=(2,), shape=shape, workdir=tmp_path, parts=["windows"])
    assert set(json.loads(path.read_text())["ratios"]) == {"alone", *variants((2,))}
