"""Which experts snapshots in host memory copy: those with the most to lose, the same on ranks that share them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from tests.replay.lives import TOKENS

CHECKPOINT, KILLED = 20, 36


def ranks_of(config: dict[str, Any], folder: Path, ranks: int, kill_at: int | None = None) -> list[Any]:
    """One life on so many ranks; what each has printed last."""
    life = folder / f"life-{kill_at}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--log-dir={life}", "--redirects=1", "-m", "tests.experts.memory_lives", json.dumps(config)]
    command += [] if kill_at is None else [str(kill_at)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    found = [log.read_text().splitlines() for log in sorted(life.rglob("stdout.log"))]
    assert [bool(lines) for lines in found] == [True] * ranks, ended.stderr[-3000:]
    return [json.loads(lines[-1]) for lines in found]


def by_popularity(first: int, last: int) -> list[int]:
    """Iteration at which each expert was copied last, where each snapshot copies the one with the most to lose."""
    unsaved, ages, taken = [0] * len(TOKENS), [0] * len(TOKENS), [first] * len(TOKENS)
    for iteration in range(first + 1, last + 1):
        unsaved = [old + new for old, new in zip(unsaved, TOKENS, strict=True)]
        chosen = min(range(len(TOKENS)), key=lambda expert: (-unsaved[expert], -ages[expert], expert))
        ages = [age + 1 for age in ages]
        unsaved[chosen] = ages[chosen] = 0
        taken[chosen] = iteration
    return taken


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_a_kill_experts_come_back_by_their_popularity(tmp_path: Path, ranks: int) -> None:
    """Two ranks hold copies of every expert: both choose the same."""
    config: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "checkpoint": {"interval_iterations": CHECKPOINT},
        "memory": {"interval_iterations": 1},
        "experts": {"policy": "moetion"},
    }
    try:
        trained = ranks_of(config, tmp_path, ranks, KILLED)
        found = ranks_of(config, tmp_path, ranks)
    finally:
        remove_memory_states(run_id(tmp_path / "run"))
    expected = by_popularity(CHECKPOINT, found[0]["iteration"])
    for rank, began in enumerate(found):
        assert began["method"] == "stale"
        assert KILLED - 1 <= began["iteration"] <= KILLED
        taken = [began["ages"].get(f"0.experts.{expert}.weight", began["iteration"]) for expert in range(len(TOKENS))]
        assert taken == expected
        for name, weights in began["weights"].items():
            assert weights == trained[rank][str(began["ages"].get(name, began["iteration"]))][name], name
        missed = [(began["iteration"] - at) * tokens * ranks for at, tokens in zip(expected, TOKENS, strict=True)]
        assert began["lost"]["layers"][0]["lost_tokens"] == sum(missed)
