"""The benchmark of windows, small."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.replay.job import Shape
from cpsr.benchmarks.replay.run import WINDOW, main, variants
from cpsr.errors import CPSRError


def test_every_variant_is_measured_and_every_failure_comes_back(tmp_path: Path) -> None:
    shape = Shape(width=16, layers=2, experts=2, tokens=64)
    path, parts = tmp_path / "replay.json", ("windows", "failures")
    main(path, rounds=1, steps=6, windows=(2,), shape=shape, workdir=tmp_path, parts=parts)
    found = json.loads((tmp_path / "replay.json").read_text())
    assert set(found["ratios"]) == {"alone", *variants((2,))}
    assert len(found["failures"]) == WINDOW
    assert all(WINDOW <= one["killed_at"] - one["began_at"] <= 2 * WINDOW for one in found["failures"])


def test_a_part_that_there_is_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(CPSRError, match="no part speed"):
        main(parts=["windows", "speed"], workdir=tmp_path)
