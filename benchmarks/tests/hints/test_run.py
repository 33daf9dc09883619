"""The benchmark of resumable functions, small."""

import json
from pathlib import Path

from cpsr.benchmarks.hints.run import main

LENGTHS = {"loop": 2, "digits": 8, "long loop": 4}


def test_killed_functions_end_alike_and_their_checkpoints_are_counted(tmp_path: Path) -> None:
    main(tmp_path / "hints.json", rounds=1, kills=1, workdir=tmp_path, lengths=LENGTHS, allowances=[0.2])
    found = json.loads((tmp_path / "hints.json").read_text())
    assert found["costs"]["long loop"]["0.1"]["overhead"]["value"] > 0
    assert min(found["checks_seconds"].values()) > 0
    for name in ("loop", "digits"):
        assert found["costs"][name]["0.2"]["overhead"]["value"] > 0
        assert found["costs"][name]["0.2"]["repeated_seconds"]["value"] > 0
        killed = found["kills"][name]["0.2"]
        assert killed["same"]
        assert len(killed["after_seconds"]) == 1
