"""What a life's notes say of its end."""

from pathlib import Path

import pytest

from cpsr.ranks.exits import Exit, cause_of, exits_of, forget_exits, note_exit

LOST = "RuntimeError: Connection reset by peer"


@pytest.mark.parametrize(
    ("exits", "ranks", "cause"),
    [
        ([], 2, "the job was killed (no rank recorded how)"),
        ([Exit(0, error=LOST, unix_seconds=1.0)], 2, "rank 1 was killed"),
        ([Exit(0, error=LOST, unix_seconds=1.0)], 4, "ranks 1 to 3 were killed"),
        ([Exit(0, error=LOST, unix_seconds=1.0)], None, f"rank 0 lost another rank ({LOST})"),
        ([Exit(0, error="ValueError: bad", unix_seconds=1.0)], 1, "rank 0 failed (ValueError: bad)"),
        # The others hung until they were ended, and recorded nothing.
        ([Exit(0, error="ValueError: bad", unix_seconds=1.0)], 8, "rank 0 failed (ValueError: bad)"),
        (
            [Exit(0, error=LOST, unix_seconds=1.0), Exit(1, error="ValueError: bad", unix_seconds=2.0)],
            2,
            "rank 1 failed (ValueError: bad)",
        ),
        ([Exit(1, signal="SIGKILL"), Exit(0, error=LOST)], 2, "rank 1 was killed (SIGKILL)"),
        ([Exit(1, signal="SIGKILL"), Exit(0, error=LOST), Exit(0, status=1)], None, "rank 1 was killed (SIGKILL)"),
        (
            [Exit(0, signal="SIGSEGV"), Exit(2, signal="SIGKILL"), Exit(1, error=LOST)],
            3,
            "ranks 0 and 2 were killed (SIGKILL, SIGSEGV)",
        ),
        # The watchdog of a rank that waits for a failed one aborts it.
        (
            [Exit(0, status=1), Exit(1, signal="SIGABRT"), Exit(0, error="ValueError: bad")],
            2,
            "rank 0 failed (ValueError: bad)",
        ),
        ([Exit(1, status=3, unix_seconds=1.0)], 2, "rank 1 ended with status 3"),
        (
            [Exit(0, left="rank 1 sent no heartbeat for 3 s"), Exit(1, signal="SIGKILL")],
            2,
            "rank 0 left because rank 1 sent no heartbeat for 3 s",
        ),
    ],
)
def test_the_cause_is_named_in_one_clause(exits: list[Exit], ranks: int | None, cause: str) -> None:
    assert cause_of(exits, ranks) == cause
    assert cause_of(exits[::-1], ranks) == cause


def test_notes_of_ranks_and_launcher_stay_apart_until_they_are_forgotten(tmp_path: Path) -> None:
    note_exit(tmp_path, 3, Exit(1, error="RuntimeError: reset"))
    note_exit(tmp_path, 3, Exit(1, signal="SIGKILL", unix_seconds=5.0))
    note_exit(tmp_path, 4, Exit(0, status=1, unix_seconds=6.0))
    found = exits_of(tmp_path, 3)
    assert {(one.error, one.signal) for one in found} == {("RuntimeError: reset", None), (None, "SIGKILL")}
    forget_exits(tmp_path, 4)
    assert exits_of(tmp_path, 3) == []
    assert exits_of(tmp_path, 4) == [Exit(0, status=1, unix_seconds=6.0)]
