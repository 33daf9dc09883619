"""The benchmark of windows, small."""

import json
from pathlib import Path

from cpsr.benchmarks.harness.processes import in_own_process
from cpsr.benchmarks.replay.job import Shape
from cpsr.benchmarks.replay.repeated_step import FROZEN, KINDS, WHOLE, repeated_seconds
from cpsr.benchmarks.replay.run import main, variants


def test_every_variant_is_measured(tmp_path: Path) -> None:
    shape = Shape(width=16, layers=2, experts=2, tokens=64)
    path = tmp_path / "replay.json"
    main(path, rounds=1, steps=6, windows=(2,), shape=shape, workdir=tmp_path, parts=["windows"])
    assert set(json.loads(path.read_text())["ratios"]) == {"alone", *variants((2,))}


def test_repeated_steps_leave_gradients_out() -> None:
    seconds = in_own_process(repeated_seconds, next(iter(KINDS)), 1, 64)
    assert {name: len(one) for name, one in seconds.items()} == dict.fromkeys([WHOLE, *FROZEN], 1)
