"""SIGTERM to a job whose loaders have workers, sent as launchers send it, wherever its ranks are: nothing is lost."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cpsr.checkpoint.catalogue import scan
from cpsr.journal import JournalReader
from tests.recovery.terminated import SENDERS, losses, started
from tests.recovery.terminated_worker import Options, sent_path

PAUSE_SECONDS = 0.3  # for what is at the moment to begin, and for the signal to be heard
END_SECONDS = 10.0  # for a launcher's processes; orphaned workers end within one
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}  # each takes seconds to start
WORKERS = {"num_workers": 2}

# ranks, moment, who gets SIGTERM how often, the loaders' settings
QUICK = [(1, "evaluation", "every process", 1, PERSISTENT)]
MOMENTS = ("forward", "backward", "evaluation", "save", "next", "first step")
SLOW = [
    *((2, moment, "groups", 1, WORKERS) for moment in MOMENTS),
    *((1, moment, "every process", 2, PERSISTENT) for moment in MOMENTS),
    (2, "forward", "every process", 1, PERSISTENT),
    (2, "evaluation", "launcher", 1, PERSISTENT),
    (2, "next", "ranks", 1, WORKERS),
    (2, "backward", "launcher", 2, WORKERS),
    (1, "forward", "groups", 1, SPAWNED),
    (2, "evaluation", "groups", 2, SPAWNED),
]
CASES = [*QUICK, *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for case in SLOW)]

Reference = Callable[[int, dict[str, Any]], Path]


def options(directory: Path, ranks: int, loader: dict[str, Any], **more: Any) -> Options:
    return Options(str(directory), "deepspeed" if ranks > 1 else "torch", loader=loader, **more)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Where the run that nothing happened to has left what it did."""
    known: dict[str, Path] = {}

    def reference(ranks: int, loader: dict[str, Any]) -> Path:
        name = repr((ranks, loader))
        if name not in known:
            known[name] = tmp_path_factory.mktemp("uninterrupted")
            with started(options(known[name], ranks, loader), ranks) as life:
                assert life.wait() == 0, life.output()
        return known[name]

    return reference


@pytest.mark.parametrize(("ranks", "moment", "sender", "times", "loader"), CASES)
def test_the_state_is_committed_and_the_run_goes_on_bitwise(
    ranks: int,
    moment: str,
    sender: str,
    times: int,
    loader: dict[str, Any],
    tmp_path: Path,
    uninterrupted: Reference,
) -> None:
    with started(options(tmp_path, ranks, loader, moment=moment), ranks) as life:
        life.pids()
        time.sleep(PAUSE_SECONDS)
        processes = life.processes()
        for _ in range(times):
            SENDERS[sender](life)
            time.sleep(PAUSE_SECONDS)
        sent_path(tmp_path).touch()
        status = life.wait()
        assert ranks > 1 or status == 128 + 15, life.output()
        assert not psutil.wait_procs(processes, END_SECONDS)[1]
        output = life.output()
    ended = json.loads((tmp_path / "run" / "ended.json").read_text()) if "is committed" in output else {}
    assert ended.get("ending") == "sigterm", output
    left_at = ended["iteration"]
    assert scan(tmp_path / "run" / "checkpoints").checkpoints[-1].iteration == left_at

    with started(options(tmp_path, ranks, loader), ranks) as life:
        assert life.wait() == 0, life.output()
    with JournalReader(tmp_path / "run" / "journal.db") as journal:
        assert [one.ending for one in journal.lives()] == ["sigterm", "clean"]
        assert journal.failures() == []
    for rank in range(ranks):
        assert losses(tmp_path, rank) == losses(uninterrupted(ranks, loader), rank)


@pytest.mark.slow
def test_torchrun_restarts_a_rank_that_has_left(tmp_path: Path, uninterrupted: Reference) -> None:
    with started(options(tmp_path, 2, WORKERS, moment="forward"), 2, restarts=1) as life:
        SENDERS["groups"](life)
        sent_path(tmp_path).touch()
        assert life.wait() == 0, life.output()
    with JournalReader(tmp_path / "run" / "journal.db") as journal:
        assert [one.ending for one in journal.lives()] == ["sigterm", "clean"]
    for rank in range(2):
        mine, reference = losses(tmp_path, rank), losses(uninterrupted(2, WORKERS), rank)
        # A rank leaves in the forward, or after the step that it was in, whichever the signal meets.
        assert len(reference.keys() - mine.keys()) <= 1
        assert mine.items() <= reference.items()
