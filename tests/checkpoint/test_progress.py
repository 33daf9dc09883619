"""The step counter survives a SIGKILL at any moment and reports what it cannot know."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpsr.checkpoint.progress import (
    ProgressCounter,
    mark_life,
    newest_life,
    progress_path,
    read_for_all,
    read_progress,
)
from cpsr.ranks.group import Group

CHILD = """
import sys
from pathlib import Path
from cpsr.checkpoint.progress import ProgressCounter
counter = ProgressCounter(Path(sys.argv[1]))
iteration = 0
print("ready", flush=True)
while True:
    iteration += 1
    counter.publish(iteration, iteration * 3)
"""


def test_the_oldest_rank_is_the_failure_step(tmp_path: Path) -> None:
    for rank, steps in enumerate((range(1, 9), range(1, 8))):
        counter = ProgressCounter(progress_path(tmp_path, rank))
        for iteration in steps:
            counter.publish(iteration, iteration * 4)
        counter.close()
    progress = read_progress(tmp_path, 2)
    assert progress is not None
    assert progress.iteration == 7
    assert progress.ranks == {0: {7: 28, 8: 32}, 1: {6: 24, 7: 28}}
    assert progress.missing == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is absent"),
        (b"", "has 0 bytes"),
        (b"\1" * 31, "has 31 bytes"),
        (bytes(32), "holds nothing yet"),
        ((6).to_bytes(8, "little") + bytes(24), "the other's slot"),
    ],
)
def test_what_cannot_be_read_is_reported(tmp_path: Path, content: bytes | None, says: str) -> None:
    ProgressCounter(progress_path(tmp_path, 0)).publish(3, 30)
    if content is not None:
        progress_path(tmp_path, 1).write_bytes(content)
    progress = read_progress(tmp_path, 2)
    assert progress is not None
    assert progress.iteration == 3
    assert progress.ranks == {0: {3: 30}}
    assert says in progress.missing[1]
    progress_path(tmp_path, 0).unlink()
    assert read_progress(tmp_path, 2) is None


def test_what_an_earlier_process_goes_on_to_publish_is_lost(tmp_path: Path) -> None:
    earlier = ProgressCounter(progress_path(tmp_path, 0))
    earlier.publish(7, 8)
    later = ProgressCounter(progress_path(tmp_path, 0))
    earlier.publish(8, 9)  # it was stopped, and is continued
    progress = read_progress(tmp_path, 1)
    assert progress is not None
    assert progress.iteration == 7
    later.publish(5, 6)
    earlier.publish(9, 10)
    progress = read_progress(tmp_path, 1)
    assert progress is not None
    assert progress.ranks[0] == {5: 6}
    earlier.close()
    later.close()


def test_killed_while_publishing(tmp_path: Path) -> None:
    for attempt in range(2):
        path = progress_path(tmp_path, attempt)
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, env=os.environ)
        assert child.stdout is not None
        child.stdout.readline()
        seen = 0
        for _ in range(50):
            time.sleep(0.001)
            progress = read_progress(tmp_path, attempt + 1)
            if progress is not None and attempt in progress.ranks:
                assert max(progress.ranks[attempt]) >= seen
                seen = max(progress.ranks[attempt])
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        progress = read_progress(tmp_path, attempt + 1)
        assert progress is not None
        rank = progress.ranks[attempt]
        assert max(rank) >= seen > 0
        assert all(batches == iteration * 3 for iteration, batches in rank.items())


def test_the_newest_life_is_known_with_its_branch(tmp_path: Path) -> None:
    assert newest_life(tmp_path) == (-1, 0, False)
    mark_life(tmp_path, 7)
    assert newest_life(tmp_path) == (7, 0, False)
    mark_life(tmp_path, 7, branch=2, holds_states=True)
    assert newest_life(tmp_path) == (7, 2, True)


def test_that_a_run_went_back_outlives_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of what was given up do, too."""
    forced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    mark_life(tmp_path, 7)
    assert forced == []
    mark_life(tmp_path, 7, branch=1)
    assert forced == [tmp_path / "progress" / "life"]


def test_all_ranks_get_what_rank_0_reads(tmp_path: Path) -> None:
    ProgressCounter(progress_path(tmp_path, 0)).publish(7, 9)
    progress_path(tmp_path, 1).write_bytes(b"torn")
    assert read_for_all(tmp_path, 3, Group()) == read_progress(tmp_path, 3)
    assert read_for_all(tmp_path / "elsewhere", 3, Group()) is None
    progress_path(tmp_path, 2).mkdir()
    with pytest.raises(OSError, match="rank-00002"):
        read_for_all(tmp_path, 3, Group())
