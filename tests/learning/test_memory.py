"""What is allotted to the predictor when a life begins, in a real life on one rank."""

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr.config import CPSRConfig
from cpsr.engines.torch import TorchAdapter
from cpsr.journal import JournalReader
from cpsr.learning import learning as module
from cpsr.learning.learning import history_checkpoints
from cpsr.predictor.vitp import host_memory_bytes
from cpsr.recovery import CPSRRecovery
from cpsr.restart.restore import Restored
from tests.two_ranks import run

PATIENCE_SECONDS = 10.0


OPERATORS = 2
INTERVAL = 5


def life(run_dir: Path, mode: str = "predict", **learning: Any) -> tuple[CPSRRecovery, Callable[[], None]]:
    """One life of a linear model, and a step of it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    adapter = TorchAdapter(model, optimizer)
    settings = {
        "run_dir": run_dir,
        "mode": mode,
        "learning": learning,
        # What a life leaves in memory is exact, and would spare the next one its prediction.
        "checkpoint": {"interval_iterations": INTERVAL, "shared_memory": False},
    }

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()

    return CPSRRecovery(adapter, settings), step


def events(run_dir: Path, kind: str) -> list[str]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [event.message for event in journal.events() if event.kind == kind]


def limit_memory(monkeypatch: pytest.MonkeyPatch, run_dir: Path, *, learns: bool, spare_bytes: int = 0) -> None:
    """Allow what the line, or learning, takes in such a life, and so many bytes more."""
    config = CPSRConfig.load({"run_dir": run_dir, "checkpoint": {"interval_iterations": INTERVAL}})
    needed = host_memory_bytes(OPERATORS, history_checkpoints(config), learns=learns)
    monkeypatch.setattr(module, "LIMIT_BYTES", needed + spare_bytes)


def fail_and_come_back(run_dir: Path, iterations: int, **settings: Any) -> Restored:
    """A life that ends in its training loop, and how the next one begins."""
    with pytest.raises(ZeroDivisionError):
        fail(*life(run_dir, **settings), iterations)
    recovery, _ = life(run_dir, **settings)
    with recovery:
        return recovery.restored


def fail(recovery: CPSRRecovery, step: Callable[[], None], iterations: int) -> None:
    with recovery:
        for _ in range(iterations):
            take(recovery, step)
        raise ZeroDivisionError


def take(recovery: CPSRRecovery, step: Callable[[], None]) -> None:
    step()
    recovery.life.saver.finish()
    wait_until_written(recovery)


def wait_until_written(recovery: CPSRRecovery) -> None:
    """Or a busy disk would decide how many checkpoints the prediction has."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    # A loop that draws its batches itself ends an iteration with its next forward, and then its checkpoint begins.
    due = (recovery.iteration - 1) // INTERVAL * INTERVAL
    while due and recovery.life.saver.saved_iteration != due:
        recovery.life.saver.surface()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_life_says_what_the_predictor_may_take(tmp_path: Path) -> None:
    with life(tmp_path)[0]:
        pass
    (message,) = events(tmp_path, "predictor memory")
    assert "at most" in message


def test_a_limit_too_small_for_learning_leaves_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, tmp_path, learns=False)
    restored = fail_and_come_back(tmp_path, 43)
    assert restored.predicted
    assert restored.restored_iteration == 43
    assert restored.forecast is not None
    assert restored.forecast.settings["direction"] == "line"
    messages = events(tmp_path, "predictor memory")
    assert [message.startswith("learning is off") for message in messages] == [True, True]  # once a life
    assert not events(tmp_path, "learning ended")


def test_a_limit_too_small_for_the_line_leaves_recomputing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, tmp_path, learns=False, spare_bytes=-1)
    restored = fail_and_come_back(tmp_path, 43)
    assert not restored.predicted
    assert restored.restored_iteration == 40
    messages = events(tmp_path, "predictor memory")
    assert [message.startswith("predicting is off") for message in messages] == [True, True]


SCRIPT = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    import torch.distributed as dist
    from cpsr.config import CPSRConfig
    from cpsr.learning.learning import choose_use
    from cpsr.ranks.group import Group
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group, found = Group(), []
    config = CPSRConfig.load({"run_dir": Path("run"), "checkpoint": {"interval_iterations": 10}})
    for operators in (10, 3000, 30000):
        messages = []
        report = lambda kind, message, level=0: messages.append(message)
        use = choose_use(operators if rank else 10, 0, config, group, report)
        found.append([use, messages])
    group.close()
    json.dump(found, open(sys.argv[1] + f".{rank}", "w"))
    dist.destroy_process_group()
    """
)


def test_what_does_not_fit_on_one_rank_is_off_on_all(tmp_path: Path) -> None:
    first, second = run(SCRIPT, tmp_path)
    assert [use for use, *_ in first] == [use for use, *_ in second] == ["learning", "line", "nothing"]
    assert [messages for *_, messages in second] == [[], [], []]
    assert [len(messages) for *_, messages in first] == [1, 1, 1]


def test_who_asks_for_no_learning_gets_the_line_and_is_not_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert fail_and_come_back(tmp_path, 43, budget_fraction=0).predicted
    assert "learning is off" not in caplog.text
