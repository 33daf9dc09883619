"""A job with windows is killed, and comes back bit for bit: the whole way, with real processes."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, MixtureOfExperts, TorchAdapter
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.journal.reader import JournalReader
from tests.engines.optimizer_cases import Stacked
from tests.replay.lives import TOKENS, LifeOf, Routed

RUNS = {
    "uninterrupted": [LifeOf(enabled=False)],  # without windows: that they change nothing shows as well
    # Windows begin at 1, 4, 7, 10 and 13; the last that is whole ends at 12, or before.
    "killed at 12": [LifeOf(12), LifeOf()],
    "killed at 13": [LifeOf(13, logged=True), LifeOf(logged=True)],
    "killed at 14": [LifeOf(14), LifeOf()],
    "killed again": [LifeOf(15), LifeOf(11), LifeOf(13), LifeOf()],
    # The second life replays the window from 10 to 12, and takes its own from 12 on.
    "killed after a replay": [LifeOf(15, awaited=10), LifeOf(21, awaited=18), LifeOf()],
    "damaged": [LifeOf(15), LifeOf(damage=True)],
    "checkpoints": [LifeOf(12, 3, 11, awaited=11), LifeOf(24, 3, 11), LifeOf(None, 3, 11)],
    "another training": [LifeOf(15, logged=True), LifeOf(factor=2.0, logged=True, replicated=True), LifeOf()],
    "measured": [LifeOf(17, None, 9), LifeOf(None, None, 9)],
    "mixture": [LifeOf(enabled=False, mixture=True)],
    "popular experts": [LifeOf(17, 3, 6, mixture=True), LifeOf(None, 3, 6, mixture=True)],
    "writes to weights": [LifeOf(15, shrinks=True), LifeOf(shrinks=True)],
}

Lives = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    wanted = json.dumps({name: [asdict(life) for life in lives] for name, lives in RUNS.items()})
    command = [sys.executable, "-m", "tests.replay.lives", str(tmp_path_factory.mktemp("runs")), wanted]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    found = defaultdict(list)
    for life in map(json.loads, ended.stdout.splitlines()):
        found[life["run"]].append(life)
    assert {name: len(found[name]) for name in RUNS} == {name: len(ones) for name, ones in RUNS.items()}, ended.stderr[
        -3000:
    ]
    return found


def require_rest(life: Mapping[str, Any], lives: Lives, run: str = "uninterrupted") -> None:
    """From its beginning on it is the uninterrupted run, bit for bit."""
    (uninterrupted,) = lives[run]
    assert life["losses"] == {at: loss for at, loss in uninterrupted["losses"].items() if int(at) > life["iteration"]}
    assert life["digest"] == uninterrupted["digest"]


@pytest.mark.parametrize("killed_at", [12, 13, 14])
def test_the_state_is_that_of_a_run_that_nothing_happened_to(lives: Lives, killed_at: int) -> None:
    killed, back = lives[f"killed at {killed_at}"]
    (uninterrupted,) = lives["uninterrupted"]
    assert killed["losses"] == {at: uninterrupted["losses"][at] for at in killed["losses"]}
    assert back["repeated"] == f"exact, checked over {killed_at - back['iteration']} repeated steps"
    assert back["iteration"] in (7, 10)  # whether the one that ended last was sealed before the kill
    assert "window" in back["reason"]
    require_rest(back, lives)


def test_a_kill_during_the_replay_and_right_after_it_goes_back_to_the_same_window(lives: Lives) -> None:
    _, second, third, last = lives["killed again"]
    assert second["iteration"] == third["iteration"] == last["iteration"] == 10
    require_rest(last, lives)


def test_windows_of_a_life_that_began_with_a_replay_are_as_good(lives: Lives) -> None:
    _, second, last = lives["killed after a replay"]
    assert (second["iteration"], last["iteration"]) == (10, 18)
    require_rest(last, lives)


def test_a_damaged_window_is_not_used_and_the_one_before_is(lives: Lives) -> None:
    _, back = lives["damaged"]
    assert back["iteration"] == 7
    require_rest(back, lives)


def test_a_newer_checkpoint_goes_first_and_a_due_one_waits_for_the_whole_state(lives: Lives) -> None:
    """Of the checkpoints every 11 iterations, that of 22 falls into the replay of the window from 22 to 24."""
    _, at_checkpoint, back = lives["checkpoints"]
    assert at_checkpoint["iteration"] == 11
    assert "window" not in at_checkpoint["reason"]
    require_rest(back, lives)


def test_another_training_than_the_first_time_ends_the_life_and_the_window(lives: Lives) -> None:
    _, refused, back = lives["another training"]
    assert "iteration 11 was repeated from the window of iterations 10 to 12" in refused["error"]
    assert "in step 11, which the restart repeats, the loss differs first" in refused["repeated"]
    assert back["iteration"] == 0
    require_rest(back, lives)


def test_a_loop_that_writes_to_the_weights_after_a_step_is_found_out(lives: Lives) -> None:
    _, refused = lives["writes to weights"]
    assert "the loop has written to it since" in refused["error"]


def test_the_number_of_iterations_is_measured(lives: Lives) -> None:
    _, back = lives["measured"]
    assert back["iteration"] > 0
    require_rest(back, lives)


@pytest.mark.parametrize(("mode", "policy", "checkpoint"), [("auto", "sequential", 4), ("exact", "none", 1000)])
def test_popular_experts_have_their_turns_last(tmp_path: Path, mode: str, policy: str, checkpoint: int) -> None:
    """Whatever a checkpoint holds; tokens are first counted after ten iterations."""
    model = nn.Sequential(Routed(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(40, 8)
    config = {
        "run_dir": str(tmp_path / "run"),
        "mode": mode,
        "checkpoint": {"interval_iterations": checkpoint},
        "replay": {"enabled": True, "window_iterations": 5},
        "experts": {"policy": policy},
    }
    adapter = TorchAdapter(model, optimizer, experts=MixtureOfExperts(counts_of=lambda layer: layer.counts))  # type: ignore[arg-type, return-value]
    with CPSRRecovery(adapter, config) as recovery:
        try:
            for (batch,) in recovery.resume(DataLoader(TensorDataset(inputs), sum(TOKENS)), repeat=True):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                if recovery.iteration == 21:
                    break
            states = [state for state in Arena(run_id(tmp_path / "run")).list() if state.kind == "window"]
            anchors = max(states, key=lambda state: state.iteration).ages
        finally:
            remove_memory_states(run_id(tmp_path / "run"))
    order = sorted(range(4), key=lambda expert: anchors[f"0.experts.{expert}.weight"])
    assert order == [1, 3, 2, 0]


def test_no_window_is_kept_where_the_optimizer_has_tensors_of_several_parameters(tmp_path: Path) -> None:
    """It would have them of its first iteration, and the operators of later ones."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = Stacked(model.parameters())
    config = {"run_dir": str(tmp_path / "run"), "replay": {"enabled": True, "window_iterations": 3}}
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        try:
            for (batch,) in recovery.resume(DataLoader(TensorDataset(torch.randn(40, 8)), 4), repeat=True):
                optimizer.zero_grad()
                torch.autograd.backward(model(batch).square().mean())
                optimizer.step()
                if recovery.iteration == 10:
                    break
            assert not [state for state in Arena(run_id(tmp_path / "run")).list() if state.kind == "window"]
        finally:
            remove_memory_states(run_id(tmp_path / "run"))
    with JournalReader(tmp_path / "run" / "journal.db") as reader:
        assert [event.kind for event in reader.events()].count("window not kept") == 1


def test_windows_in_the_order_of_popularity_give_the_same_state(lives: Lives) -> None:
    """Tokens are counted at checkpoints 6 and 12; the window that is replayed begins after."""
    _, back = lives["popular experts"]
    assert back["iteration"] == 13
    assert "window" in back["reason"]
    require_rest(back, lives, "mixture")
