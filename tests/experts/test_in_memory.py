"""Which experts snapshots in host memory copy: those with the most to lose, the same on ranks that share them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from tests.rank_processes import free_port
from tests.replay.lives import TOKENS

CHECKPOINT, KILLED = 20, 36
PORT = free_port()


def configuration(run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "checkpoint": {"interval_iterations": CHECKPOINT},
        "memory": {"interval_iterations": 1},
        "experts": {"policy": "moetion"},
    }


def ranks_of(
    config: dict[str, Any], ranks: int, kill_at: int | None = None, machines: Sequence[Path] = ()
) -> list[Any]:
    """One life on so many ranks; what each has printed last.

    Args:
        config: of the run.
        ranks: how many.
        kill_at: iteration.
        machines: their shared memories, by rank; empty: all are on this one.
    """
    command = [sys.executable, "-m", "tests.experts.memory_lives", json.dumps(config)]
    command += [] if kill_at is None else [str(kill_at)]
    processes = []
    for rank in range(ranks):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT if kill_at is None else PORT + 1)}
        if machines:
            machines[rank].mkdir(parents=True, exist_ok=True)
            environment |= {"CPSR_NODE": machines[rank].name, "CPSR_SHARED_MEMORY": str(machines[rank])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
    ended = [process.communicate(timeout=300) for process in processes]
    assert all(found for found, _ in ended), [error[-3000:] for _, error in ended]
    return [json.loads(found.splitlines()[-1]) for found, _ in ended]


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
    config = configuration(tmp_path / "run")
    try:
        trained = ranks_of(config, ranks, KILLED)
        found = ranks_of(config, ranks)
    finally:
        remove_memory_states(run_id(tmp_path / "run"))
    expected = by_popularity(CHECKPOINT, found[0]["iteration"])
    for rank, began in enumerate(found):
        assert began["method"] == "older experts"
        assert KILLED - 1 <= began["iteration"] <= KILLED
        taken = [began["ages"].get(f"0.experts.{expert}.weight", began["iteration"]) for expert in range(len(TOKENS))]
        assert taken == expected
        for name, weights in began["weights"].items():
            assert weights == trained[rank][str(began["ages"].get(name, began["iteration"]))][name], name
        missed = [(began["iteration"] - at) * tokens * ranks for at, tokens in zip(expected, TOKENS, strict=True)]
        assert began["lost"]["layers"][0]["lost_tokens"] == sum(missed)


def test_a_slow_link_takes_the_experts_with_the_most_to_lose(tmp_path: Path) -> None:
    """A machine is lost: the other holds all of its iteration but an expert, of which it has an older copy."""
    config, machines = configuration(tmp_path / "run"), [tmp_path / "memory" / name for name in "abc"]
    config["checkpoint"]["interval_iterations"] = checkpoint = 8
    trained = ranks_of(config, 2, killed := 14, machines)
    shutil.rmtree(machines[1])
    first, second = ranks_of(config, 2, machines=[machines[0], machines[2]])
    assert (first["method"], second["method"]) == ("older experts", "older experts")
    assert killed - 4 <= first["iteration"] == second["iteration"] <= killed
    assert first["ages"] == {}, "a step hides the copies of all"
    (age,) = set(second["ages"].values())
    assert checkpoint <= age < second["iteration"]
    for rank, began in enumerate((first, second)):
        for name, weights in began["weights"].items():
            assert weights == trained[rank][str(began["ages"].get(name, began["iteration"]))][name], name
    assert [layer["stale_experts"] for layer in first["lost"]["layers"]] == [1]
    assert first["lost"]["layers"][0]["lost_tokens"] > 0
