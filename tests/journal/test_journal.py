import dataclasses
import json
import math
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import JournalError
from cpsr.journal import (
    SCHEMA_VERSION,
    BacktestRow,
    BubbleRow,
    CheckpointRow,
    EventFile,
    EventRow,
    FailureRow,
    FitRow,
    Journal,
    JournalReader,
    LearningRow,
    LifeRow,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    StepRow,
    json_ready,
    writer,
)
from cpsr.journal.rows import columns, from_sql, to_sql
from cpsr.journal.schema import TABLES, filesystem_of, is_network

FLUSH_SECONDS = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal.open(path)
    yield journal
    journal.close()


def step(iteration: int, life: int = 0, loss: float | None = 1.5) -> StepRow:
    return StepRow(life=life, iteration=iteration, loss=loss, learning_rate=1e-3, seconds=0.25, applied=True)


def bubbles(**changes: Any) -> BubbleRow:
    row = BubbleRow(
        life=0,
        rank=1,
        iteration=50,
        iterations=49,
        seconds=10.0,
        bubble_seconds=4.0,
        used_seconds=1.5,
        late_seconds=0.01,
        outside_seconds=0.0,
        slices=300,
        late_slices=2,
        copied_seconds=0.25,
        copied_bytes=1 << 33,
        copied_beside_bytes=4096,
        created_unix_seconds=2.0,
    )
    return dataclasses.replace(row, **changes)


def recovery(**changes: Any) -> RecoveryRow:
    row = RecoveryRow(
        id="r1",
        life=0,
        failure_iteration=92,
        checkpoint_iteration=50,
        restored_iteration=92,
        method="line",
        requested_mode="predict",
        feasible=("exact", "line"),
        expected_end_cost_iterations=3.5,
        settings={"gain": 2.0, "window_iterations": 300},
        reason="predicted from 6 checkpoints",
        load_seconds=0.5,
        predict_seconds=0.25,
        inject_seconds=0.125,
        guard={"probe_loss_nats": 0.05},
        outcome="watching",
        sources=(
            RecoverySource(rank=0, source="disk", iteration=50),
            RecoverySource(rank=1, source="peer", iteration=50),
        ),
    )
    return dataclasses.replace(row, **changes)


def test_every_row_is_read_back_as_it_was_written(path: Path, journal: Journal) -> None:
    assert journal.start_life("predict") == 0
    rows = [
        CheckpointRow(life=0, iteration=50, status="committed", bytes=1 << 40, stall_seconds=0.01, origin="predicted"),
        FailureRow(life=0, iteration=92, checkpoint_iteration=None, description="rank 1 was killed"),
        PlanRow(life=0, from_iteration=0, interval_iterations=50, origin="young", explanation={"bound": "none"}),
        EventRow(life=0, rank=3, kind="note", message="ümlaut and 'quotes'", iteration=7),
        PhaseRow(life=0, phase=2, first_iteration=120, last_iteration=300, xi=1e-9, last_xi=9e-10, ended_by="change"),
        FitRow(life=0, iteration=300, kind="loss", result={"family": "power", "coefficients": {"d": 1.5}}),
        bubbles(copied_seconds=None, copied_bytes=None, copied_beside_bytes=None),
    ]
    journal.record(rows[0])  # type: ignore[arg-type]  # a list of seven types
    journal.record(rows[1])  # type: ignore[arg-type]
    journal.record(rows[2])  # type: ignore[arg-type]
    journal.record(rows[3])  # type: ignore[arg-type]
    journal.record(rows[4])  # type: ignore[arg-type]
    journal.record(rows[5])  # type: ignore[arg-type]
    journal.record(rows[6])  # type: ignore[arg-type]
    journal.record(FitRow(life=0, iteration=300, kind="failure_rate", result={"mean_per_second": 1e-5}))
    journal.record(recovery())
    journal.record(*[step(1), step(2, loss=None)])
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        found = [*reader.checkpoints(), *reader.failures(), reader.latest_plan(), *reader.events()]
        assert [*found, *reader.phases(), *reader.newest(FitRow, 9, kind="loss"), *reader.newest(BubbleRow, 9)] == rows
        assert [fit.kind for fit in reader.newest(FitRow, 9)] == ["failure_rate", "loss"]
        (read,) = reader.recoveries()
        assert dataclasses.replace(read, created_unix_seconds=0) == recovery(created_unix_seconds=0)
        assert reader.losses() == [step(1), step(2, loss=None)]
        (life,) = reader.lives()
    assert (life.mode, life.pid, life.ending, life.restored_iteration) == ("predict", os.getpid(), "running", 92)
    assert journal.failures() == []


def test_lives_are_numbered_on_and_keep_their_ending(path: Path) -> None:
    for number, ending in enumerate(("clean", "sigterm", "error")):
        journal = Journal.open(path)
        assert journal.start_life("exact") == number
        journal.end_life(ending)  # type: ignore[arg-type]  # mypy widens the literal in a loop
        journal.close()
    with JournalReader(path) as reader:
        assert [life.ending for life in reader.lives()] == ["clean", "sigterm", "error"]
        assert all(life.ended_unix_seconds for life in reader.lives())


def test_losses_are_the_newest_of_each_iteration(path: Path, journal: Journal) -> None:
    journal.record(*[step(i, life=0, loss=float(i)) for i in range(1, 7)])
    journal.record(*[step(i, life=1, loss=-float(i)) for i in (3, 4)])
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert [row.loss for row in reader.losses()] == [1, 2, -3, -4, 5, 6]
        assert [row.iteration for row in reader.losses(start=2, stop=4)] == [2, 3]
        assert [row.iteration for row in reader.recent_steps(3)] == [4, 3, 6]


def test_recovery_outcome_is_updated_and_an_unknown_one_is_reported(path: Path, journal: Journal) -> None:
    journal.record(recovery())
    journal.update_recovery("r1", "rolled_back", {"excess_nats": math.inf})
    journal.update_recovery("other", "kept", {})
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        latest = reader.latest_recovery()
    assert latest is not None
    assert (latest.outcome, latest.guard) == ("rolled_back", {"excess_nats": math.inf})
    (failure,) = journal.failures()
    assert "no recovery 'other'" in failure


def test_recoveries_of_earlier_lives_come_newest_first_with_their_sources(path: Path, journal: Journal) -> None:
    for number, life in enumerate((0, 1, 1, 2)):
        journal.record(dataclasses.replace(recovery(), id=f"r{number}", life=life))
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        found = reader.recoveries_before(2)
        assert next(found).id == "r2"
        assert reader.lives() == []  # another query while the first is under way
        assert [row.id for row in found] == ["r1", "r0"]
        assert [row.sources for row in reader.recoveries_before(1)] == [recovery().sources]


def test_committed_checkpoints_of_a_life_within_some_iterations(path: Path, journal: Journal) -> None:
    for life, iteration, status, origin in (
        (0, 10, "committed", "trained"),
        (0, 20, "committed", "predicted"),
        (0, 30, "skipped", "trained"),
        (1, 20, "committed", "trained"),
    ):
        journal.record(CheckpointRow(life=life, iteration=iteration, status=status, origin=origin))  # type: ignore[arg-type]  # mypy widens the literals
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.committed_in(0, 10, 40) == reader.committed_in(0, 20, 21)
        newest = reader.committed_in(0, 0, 20)
        assert newest is not None
        assert newest.iteration == 10
        assert reader.committed_in(0, 21, 40) is None
        assert [reader.is_predicted(iteration) for iteration in (10, 20, 30)] == [False, True, False]


def test_what_was_learned_last_and_the_checkpoints_that_lead_here(path: Path, journal: Journal) -> None:
    first = LearningRow(life=0, iteration=None, first_iteration=0, checkpoints=0, updates=0)
    journal.record(first)
    for iteration, status in ((50, "committed"), (100, "committed"), (150, "skipped"), (100, "committed")):
        journal.record(CheckpointRow(life=0, iteration=iteration, status=status))  # type: ignore[arg-type]
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.latest_learning() == first
        assert [reader.committed_between(0, *between) for between in ((0, 999), (51, 100), (0, 99))] == [2, 1, 1]
        assert reader.committed_between(1, 0, 999) == 0
    newer = LearningRow(life=0, iteration=100, first_iteration=51, checkpoints=1, updates=8)
    journal.record(newer)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.latest_learning() == newer


def test_a_phase_that_ended_again_after_a_restart_counts_once(path: Path, journal: Journal) -> None:
    first, second = (
        PhaseRow(life=life, phase=3, first_iteration=100, last_iteration=last, xi=1.0, last_xi=2.0, ended_by="change")
        for life, last in ((0, 250), (1, 260))
    )
    later = dataclasses.replace(second, phase=4, first_iteration=260, last_iteration=400)
    with JournalReader(path) as reader:
        assert reader.latest_phase() is None
    for row in (first, later, second):
        journal.record(row)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.phases() == [second, later]
        assert reader.latest_phase() == second


def test_a_backtest_that_is_recorded_again_is_kept_once(path: Path, journal: Journal) -> None:
    first = BacktestRow(life=0, iteration=50, checkpoints=3, result={"line_cosine": 0.5})
    other = dataclasses.replace(first, result={"line_cosine": 0.6})
    journal.record(*[first])
    journal.record(*[dataclasses.replace(first, life=1, created_unix_seconds=9.0), other])
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.newest(BacktestRow, 9) == [other, first]


def test_the_newest_rows_of_a_time_and_a_kind(path: Path, journal: Journal) -> None:
    rows = [
        EventRow(life=0, rank=0, kind=kind, message="", created_unix_seconds=at)
        for at, kind in ((1.0, "a"), (2.0, "b"), (3.0, "a"), (4.0, "b"))
    ]
    for row in rows:
        journal.record(row)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.newest(EventRow, 2) == [rows[3], rows[2]]
        assert reader.newest(EventRow, 9, since_unix_seconds=2.0, until_unix_seconds=4.0) == [rows[2], rows[1]]
        assert reader.newest(EventRow, 9, kind="a") == [rows[2], rows[0]]
        assert (reader.count(EventRow, 2.0, 4.0), reader.count(EventRow, kind="b")) == (2, 2)
        numbered = reader.after(EventRow, 1, 2)
        assert [row for _, row in numbered] == rows[1:3]
        assert [number for number, _ in numbered] == [2, 3]
        assert (reader.last_row(EventRow), reader.last_row(PlanRow)) == (4, 0)
        assert reader.tally(EventRow, ("kind",), ("rank",)) == [("a", 2, 0.0), ("b", 2, 0.0)]
        with pytest.raises(ValueError, match="no columns"):
            reader.tally(EventRow, ("kind; DROP TABLE events",))


def test_the_plan_that_took_a_plans_place(path: Path, journal: Journal) -> None:
    plans = [PlanRow(life=0, from_iteration=at, interval_iterations=9, origin="x") for at in (0, 5, 9)]
    for plan in plans:
        journal.record(plan)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert [reader.plan_after(plan) for plan in plans] == [plans[1], plans[2], None]


def test_a_bad_row_is_dropped_counted_and_reported_once(path: Path, journal: Journal) -> None:
    bad = CheckpointRow(life=0, iteration=1, status="lost")  # type: ignore[arg-type]  # the point of the test
    wrong_type = CheckpointRow(life=0, iteration="1", status="skipped")  # type: ignore[arg-type]
    too_large = CheckpointRow(life=0, iteration=2**70, status="skipped")
    for row in (bad, wrong_type, too_large):
        journal.record(row)
    journal.record(CheckpointRow(life=0, iteration=2, status="skipped", reason="slow disk"))
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert [row.iteration for row in reader.checkpoints()] == [2]
    assert journal.dropped_rows == 3
    (failure,) = journal.failures()
    assert str(path) in failure
    assert journal.failures() == []


def test_steps_that_came_together_are_stored_together_or_not_at_all(path: Path, journal: Journal) -> None:
    journal.record(*[step(1), step(-1), step(2)])
    journal.record(*[step(3)])
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert [row.iteration for row in reader.losses()] == [3]
    assert journal.dropped_rows == 3


def test_nan_loss_is_not_read_as_unknown(path: Path, journal: Journal) -> None:
    journal.record(*[step(1, loss=math.nan), step(2, loss=math.inf), step(3, loss=None)])
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        nan, infinite, unknown = [row.loss for row in reader.losses()]
    assert nan is not None
    assert math.isnan(nan)
    assert (infinite, unknown) == (math.inf, None)


@given(
    st.integers(0, 2**63 - 1),
    st.none() | st.floats(allow_nan=False),
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
)
def test_rows_survive_their_sql_form(iteration: int, lag: float | None, settings: dict[str, Any]) -> None:
    row = recovery(restored_iteration=iteration, expected_end_cost_iterations=lag, settings=settings, sources=())
    assert from_sql(RecoveryRow, to_sql(row)) == row


def test_tables_and_rows_have_the_same_columns(path: Path, journal: Journal) -> None:
    connection = sqlite3.connect(path)
    for row_type, table in TABLES.items():
        found = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
        assert found - {"row", "recovery_id"} == set(columns(row_type))
    connection.close()


def test_tables_are_documented() -> None:
    pages = sorted((Path(__file__).parents[2] / "docs").glob("journal*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for row_type, table in TABLES.items():
        section = text.split(f"## `{table}`")[1].split("\n## ")[0]
        missing = [name for name in columns(row_type) if f"`{name}`" not in section]
        assert not missing, f"{table} lacks {missing}"
    assert f"Schema version {SCHEMA_VERSION}" in text


def test_reader_works_while_rows_are_written(path: Path, journal: Journal) -> None:
    journal.start_life("auto")
    stop = threading.Event()

    def write() -> None:
        iteration = 0
        while not stop.is_set():
            journal.record(*[step(iteration := iteration + 1)])
            time.sleep(0.001)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = []
        for _ in range(30):
            with JournalReader(path) as reader:
                seen.append(len(reader.losses()))
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_wal_is_used_on_local_disks_and_logged(path: Path, journal: Journal) -> None:
    with JournalReader(path) as reader:
        assert reader.meta()["journal_mode"] == "wal"
        assert not is_network(reader.meta()["filesystem"])


def test_rollback_journal_is_used_on_network_disks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsr.journal.schema.filesystem_of", lambda _: "nfs4")
    journal = Journal.open(path)
    journal.start_life("auto")
    journal.record(*[step(1)])
    journal.close()
    with JournalReader(path) as reader:
        assert (reader.meta()["journal_mode"], reader.meta()["filesystem"]) == ("delete", "nfs4")
        assert len(reader.losses()) == 1
    assert not list(path.parent.glob("*-wal"))


def test_filesystem_is_that_of_the_innermost_mount() -> None:
    mounts = [("/", "ext4"), ("/data", "xfs"), ("/data", "nfs4"), ("/data/scratch", "fuse.sshfs"), ("/da", "tmpfs")]
    assert filesystem_of(Path("/home/x/journal.db"), mounts) == "ext4"
    assert filesystem_of(Path("/data/run/journal.db"), mounts) == "nfs4"
    assert filesystem_of(Path("/data/scratch/journal.db"), mounts) == "fuse.sshfs"
    assert filesystem_of(Path("/data"), []) == "unknown"
    assert [is_network(kind) for kind in ("ext4", "nfs4", "fuse.sshfs", "lustre", "overlay")] == [0, 1, 1, 1, 0]
    if Path("/dev/shm").is_mount():
        assert filesystem_of(Path("/dev/shm/x")) == "tmpfs"


def newer(path: Path) -> None:
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()


def foreign(path: Path) -> None:
    path.parent.mkdir(parents=True)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    connection.close()


def text(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("once upon a time " * 100)


def truncated(path: Path) -> None:
    journal = Journal.open(path)
    journal.record(*[step(i) for i in range(2000)])
    journal.close()
    os.truncate(path, path.stat().st_size // 2)


UNUSABLE = [
    (newer, "use the cpsr version that wrote it"),
    (foreign, "another program"),
    (text, "not a CPSR journal"),
    (truncated, "truncated"),
]


@pytest.mark.parametrize(("spoil", "words"), UNUSABLE)
def test_unusable_journals_are_refused_and_left_alone(path: Path, spoil: Any, words: str) -> None:
    spoil(path)
    before = path.read_bytes()
    for use in (JournalReader, Journal.open):
        with pytest.raises(JournalError, match=words) as refusal:
            use(path)
        assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


def test_absent_and_empty_journals_are_refused_by_the_reader(path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        JournalReader(path)
    path.parent.mkdir()
    path.touch()
    with pytest.raises(JournalError, match="is empty"):
        JournalReader(path)
    Journal.open(path).close()


def test_rows_wait_out_a_foreign_lock(path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.start_life("auto")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    journal.record(*[step(1)])
    assert not journal.flush(writer.BUSY_SECONDS + 1)
    connection.execute("ROLLBACK")
    connection.close()
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.losses() == [step(1)]
    (failure,) = journal.failures()
    assert "training goes on" in failure


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from cpsr.journal import Journal, StepRow, EventRow, JournalReader, writer
def step(i): return StepRow(life=0, iteration=i, loss=1.0, learning_rate=1e-3, seconds=0.1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer.STEP_WRITES_MAX = 10
writer.RETRY_SECONDS = 0.05
path = Path(sys.argv[1])
journal = Journal.open(path)
assert journal.start_life("auto") == 0
full = path.with_name("journal.db-wal").stat().st_size
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (full, hard))  # the disk is full
journal.record(EventRow(life=0, rank=0, kind="note", message="while full"))
assert not journal.flush(0.5)
for i in range(50):
    journal.record(*[step(i)])
failures = journal.failures()
assert any("cannot write" in failure for failure in failures), failures
assert journal.dropped_rows == 40, journal.dropped_rows
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # space again
assert journal.flush(20)
journal.close()
with JournalReader(path) as reader:
    assert [row.iteration for row in reader.losses()] == list(range(40, 50))
    assert [(row.kind, row.message.split()[0]) for row in reader.events()] == [
        ("note", "while"), ("journal_rows_dropped", "40")]
print("survived")
"""


def test_a_full_disk_keeps_what_fits_the_queue_and_counts_the_rest(path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout


FULL_FROM_THE_START = """
import resource, signal, sys, threading, time
from pathlib import Path
from cpsr.journal import Journal, StepRow, JournalReader, EventFile, EventRow, writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer.RETRY_SECONDS = 0.05
path, before = Path(sys.argv[1]), int(sys.argv[2])
for life in range(before):
    journal = Journal.open(path)
    journal.start_life("auto")
    journal.close()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # the disk is full
began = time.monotonic()
journal = Journal.open(path)
life = journal.start_life("auto", after=before - 1)
assert time.monotonic() - began < 2, "nobody waits for room"
assert life == before, life
journal.record(*[StepRow(life=life, iteration=1, loss=1.0, learning_rate=1e-3, seconds=0.1)])
assert not journal.flush(0.3)
(failure,) = journal.failures()
assert "cannot be opened" in failure and "training goes on" in failure, failure
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # space again
assert journal.flush(20)
journal.end_life("clean")
journal.close()
with JournalReader(path) as reader:
    assert [(one.life, one.ending) for one in reader.lives()][before:] == [(before, "clean")]
    assert [row.iteration for row in reader.losses()] == [1]
    (late,) = reader.events()
    assert (late.kind, late.life) == ("journal_late", before)
assert journal.dropped_rows == 0
print("survived")
"""


@pytest.mark.parametrize("lives_before", [0, 2])
def test_a_disk_that_is_full_at_the_start_keeps_nobody_from_training(path: Path, lives_before: int) -> None:
    command = [sys.executable, "-c", FULL_FROM_THE_START, str(path), str(lives_before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout
    assert done.stderr.count("rows wait for room on its disk") == 1, "reported once"


def test_a_file_that_turns_out_to_be_newer_is_left_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk had no room to look into it at first."""
    newer(path)
    content = path.read_bytes()
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.02)
    journal = Journal(path, None, 7)
    assert journal.start_life("auto") == 7
    assert not journal.flush(FLUSH_SECONDS)
    assert any(f"schema {SCHEMA_VERSION + 1}" in failure for failure in journal.failures())
    journal.close()
    assert path.read_bytes() == content


def test_a_life_that_took_an_earlier_ones_number_records_nothing_and_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the disk did not even let the file be read when the number was given."""
    for _ in range(3):
        earlier = Journal.open(path)
        earlier.start_life("auto")
        earlier.close()
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.3)
    journal = Journal(path, None, 0)
    assert journal.start_life("auto", after=0) == 1
    journal.record(EventRow(life=1, rank=0, kind="note", message="of the late life"))
    assert not journal.flush(FLUSH_SECONDS)
    (failure,) = journal.failures()
    for words in ("number 1", "lives up to 2", "is kept", "nothing is recorded in this life", "restart the job"):
        assert words in failure
    journal.record(*[step(1, life=1)])
    assert journal.failures() == []
    assert len(caplog.records) == 1
    journal.close()
    assert journal.dropped_rows == 3
    with JournalReader(path) as reader:
        assert [life.life for life in reader.lives()] == [0, 1, 2]
        assert (reader.events(), reader.losses()) == ([], [])


def test_a_life_that_begins_after_the_late_file_was_opened_takes_the_next_number(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Journal.open(path)
    earlier.start_life("auto")
    earlier.close()
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.0)
    journal = Journal(path, None, 0)
    journal.record(EventRow(life=0, rank=0, kind="note", message="before the life"))
    assert journal.flush(FLUSH_SECONDS)
    assert journal.start_life("auto") == 1
    journal.close()
    assert journal.failures() == []


def test_openings_keep_their_order_where_the_clock_goes_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openings = []
    for now_seconds in (1000.0, 500.0, 500.0, 2000.0):
        with monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda now_seconds=now_seconds: now_seconds)
            Journal.open(path).close()
        with JournalReader(path) as reader:
            openings = [opened for opened, _ in reader.openings()]
    assert openings == [1_000_000_000, 1_000_000_001, 1_000_000_002, 2_000_000_000]


def test_rows_after_close_are_counted_not_raised(path: Path) -> None:
    journal = Journal.open(path)
    journal.close()
    journal.record(*[step(1), step(2)])
    assert journal.dropped_rows == 2
    assert "after the journal had closed" in journal.failures()[0]
    journal.close()


def test_a_defect_in_the_thread_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(path)
    monkeypatch.setattr(writer, "statement", lambda *_: lambda _: 1 / 0)
    journal.record(*[step(0)])
    assert not journal.flush(FLUSH_SECONDS)
    (failure,) = journal.failures()
    assert "ZeroDivisionError" in failure
    assert "nothing more is recorded" in caplog.text
    journal.record(*[step(1)])
    journal.close()
    assert journal.dropped_rows == 2


# Writes to its own stdout what is certainly in the file: the number of its life and the last flushed iteration.
RECORDER = """
import sys
from pathlib import Path
from cpsr.journal import CheckpointRow, Journal, RecoveryRow, StepRow
journal = Journal.open(Path(sys.argv[1]))
life = journal.start_life("auto")
print("life", life, flush=True)
iteration = 0
while True:
    rows = []
    for _ in range(20):
        iteration += 1
        rows.append(StepRow(life=life, iteration=iteration, loss=1.0, learning_rate=1e-3, seconds=0.1))
    journal.record(*rows)
    journal.record(CheckpointRow(life=life, iteration=iteration, status="committed", bytes=iteration))
    assert journal.flush(20)
    print("flushed", iteration, flush=True)
"""


def test_sigkill_at_random_moments_loses_nothing_that_was_flushed(path: Path) -> None:
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    for expected_life in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", RECORDER, str(path)], stdout=subprocess.PIPE, text=True
        ) as recorder:
            assert recorder.stdout is not None
            assert recorder.stdout.readline() == f"life {expected_life}\n"
            time.sleep(moments.uniform(0.0, 0.15))
            recorder.send_signal(signal.SIGKILL)
            flushed = [int(line.split()[1]) for line in recorder.stdout if line.endswith("\n")]
        last = flushed[-1] if flushed else 0
        with JournalReader(path) as reader:
            life = reader.lives()[-1]
            steps = [row.iteration for row in reader.losses() if row.life == expected_life]
            checkpoints = [row.iteration for row in reader.checkpoints() if row.life == expected_life]
        assert (life.life, life.ending) == (expected_life, "running"), f"seed {seed}"
        assert set(range(1, last + 1)) <= set(steps), f"seed {seed}"
        assert checkpoints[: last // 20] == list(range(20, last + 1, 20)), f"seed {seed}"
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",), f"seed {seed}"
        connection.close()
    journal = Journal.open(path)
    assert journal.start_life("auto") == 12
    journal.close()


CREATOR = """
import itertools, sys
from pathlib import Path
from cpsr.journal import Journal
print("ready", flush=True)
for number in itertools.count():
    Journal.open(Path(sys.argv[1]) / str(number) / "journal.db").start_life("auto")
    print(number, flush=True)
"""


def test_sigkill_while_a_journal_is_created_leaves_one_that_opens(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    for attempt in range(10):
        directory = tmp_path / str(attempt)
        command = [sys.executable, "-c", CREATOR, str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as creator:
            assert creator.stdout is not None
            assert creator.stdout.readline() == "ready\n"
            time.sleep(moments.uniform(0.0, 0.05))
            creator.send_signal(signal.SIGKILL)
            complete = len([line for line in creator.stdout if line.endswith("\n")])
        for path in directory.glob("*/journal.db"):
            journal = Journal.open(path)
            life = journal.start_life("auto")
            journal.close()
            assert life == 1 or (int(path.parent.name) >= complete and life == 0), f"seed {seed}, {path}"


@pytest.fixture
def open_path() -> Iterator[Path]:
    """In a folder that other users may enter; pytest's own are closed to them, the more so below an xdist worker."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run" / "journal.db"
        path.parent.mkdir()
        for folder in path.parents[:2]:
            folder.chmod(0o755)
        yield path


def test_another_user_reads_the_journal_while_it_is_written_and_after(open_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = "import os, sys; from pathlib import Path; from cpsr.journal import JournalReader;"
    code += "os.setgid(65534); os.setuid(65534); print(len(JournalReader(Path(sys.argv[1])).losses()))"
    journal = Journal.open(open_path)
    journal.record(step(1), step(2))
    assert journal.flush(FLUSH_SECONDS)
    for moment in ("while", "killed", "after"):
        if moment == "killed":
            journal.close()
            with subprocess.Popen([sys.executable, "-c", RECORDER, str(open_path)], stdout=subprocess.PIPE) as recorder:
                assert recorder.stdout is not None
                recorder.stdout.readline()
                recorder.kill()
            assert open_path.with_name("journal.db-wal").exists()
        if moment == "after":
            Journal.open(open_path).close()
            assert not open_path.with_name("journal.db-wal").exists()
        done = subprocess.run(
            [sys.executable, "-c", code, str(open_path)], capture_output=True, text=True, timeout=60, check=False
        )
        assert int(done.stdout or 0) >= 2, f"{moment}: {done.stderr}"


def event(number: int, rank: int = 1) -> EventRow:
    return EventRow(
        life=0, rank=rank, kind="note", message=f"line {number}", iteration=number, created_unix_seconds=number
    )


def test_event_lines_arrive_exactly_once(path: Path, journal: Journal) -> None:
    directory = path.parent / "events"
    files = [EventFile(directory / f"rank-{rank:05}.jsonl") for rank in (1, 2)]
    recorded = []
    for round_ in range(3):
        for rank, file in enumerate(files, 1):
            row = event(round_, rank)
            file.append(row)
            recorded.append(row)
        journal.import_events(directory)
        journal.import_events(directory)
        assert journal.flush(FLUSH_SECONDS)
    for file in files:
        file.close()
    with JournalReader(path) as reader:
        assert reader.events() == recorded
    journal.close()
    again = Journal.open(path)
    again.import_events(directory)
    again.close()
    with JournalReader(path) as reader:
        assert reader.events() == recorded


def test_other_ranks_leave_word_of_their_bubbles_among_their_events(path: Path, journal: Journal) -> None:
    file = EventFile(path.parent / "events" / "rank-00001.jsonl")
    file.append(event(0))
    file.append(bubbles())
    file.append(event(1))
    file.close()
    data = json.dumps({**dataclasses.asdict(bubbles()), "table": "lives"}, sort_keys=True).encode()
    with file.path.open("ab") as lines:  # a table that is no rank's to write
        lines.write(f"{xxhash.xxh3_64_hexdigest(data)} ".encode() + data + b"\n")
    journal.import_events(file.path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.newest(BubbleRow, 9) == [bubbles()]
        first, second, damage = reader.events()
    assert [first, second] == [event(0), event(1)]
    assert "line 4 is damaged" in damage.message


def test_events_are_found_by_kind_and_iteration(path: Path, journal: Journal) -> None:
    rows = [
        EventRow(life=0, rank=0, kind=kind, message="", iteration=at)
        for at, kind in ((1, "a"), (2, "b"), (3, "a"), (3, "c"), (9, "a"), (None, "a"))
    ]
    for row in rows:
        journal.record(row)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.events_of([1, 9, 2], ["a"]) == [rows[0], rows[4]]
        assert reader.events_of([3], ["a", "c"]) == rows[2:4]
        assert reader.events_of([], ["a"]) == []


def test_what_is_read_at_one_time_is_of_one_moment(path: Path, journal: Journal) -> None:
    with JournalReader(path) as reader:
        with reader.at_one_time():
            assert reader.last_row(EventRow) == 0
            journal.record(event(0))
            assert journal.flush(FLUSH_SECONDS)
            assert reader.events() == []
        assert reader.events() == [event(0)]


def test_a_torn_tail_waits_and_a_damaged_line_is_named(path: Path, journal: Journal) -> None:
    file_path = path.parent / "events" / "rank-00007.jsonl"
    file = EventFile(file_path)
    for number in range(3):
        file.append(event(number))
    file.close()
    lines = file_path.read_bytes().splitlines(keepends=True)
    file_path.write_bytes(lines[0] + lines[1].replace(b"line 1", b"line 9") + lines[2][:-10])
    journal.import_events(file_path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        first, damage = reader.events()
    assert first == event(0)
    assert (damage.kind, damage.rank) == ("event_file_damaged", 7)
    assert "rank-00007.jsonl line 2" in damage.message
    with file_path.open("ab") as tail:
        tail.write(lines[2][-10:])
    journal.import_events(file_path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.events()[2:] == [event(2)]


def test_a_line_after_a_torn_one_is_kept(path: Path, journal: Journal) -> None:
    file_path = path.parent / "events" / "rank-00001.jsonl"
    file_path.parent.mkdir()
    file_path.write_bytes(b"0123456789abcdef {torn by a ki")
    file = EventFile(file_path)
    file.append(event(1))
    file.close()
    journal.import_events(file_path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        damage, kept = reader.events()
    assert "line 1 is damaged" in damage.message
    assert kept == event(1)


def test_an_event_file_that_lost_its_tail_is_reported_and_not_imported_twice(path: Path, journal: Journal) -> None:
    file_path = path.parent / "events" / "rank-00001.jsonl"
    file = EventFile(file_path)
    for number in range(3):
        file.append(event(number))
    journal.import_events(file_path.parent)
    assert journal.flush(FLUSH_SECONDS)
    os.truncate(file_path, len(file_path.read_bytes().splitlines(keepends=True)[0]))
    journal.import_events(file_path.parent)
    assert journal.flush(FLUSH_SECONDS)
    file.append(event(3))
    file.close()
    journal.import_events(file_path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        messages = [row.message for row in reader.events()]
    assert messages[:3] == ["line 0", "line 1", "line 2"]
    assert "lost its tail" in messages[3]
    assert messages[4:] == ["line 3"]


def test_an_event_file_on_a_full_disk_reports_once_and_never_raises() -> None:
    file = EventFile(Path("/dev/full"))
    for number in range(3):
        file.append(event(number))
    file.close()
    assert file.failed_appends == 3
    (failure,) = file.failures()
    assert "No space left" in failure


def test_json_ready_names_what_json_has_no_number_for() -> None:
    assert json_ready({"a": [math.nan, 1.0], "b": (math.inf,)}) == {"a": ["nan", 1.0], "b": ["inf"]}


def test_life_rows_need_no_more_than_they_say() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LifeRow(life=0, mode="auto", pid=1, host="h").life = 1  # type: ignore[misc]  # the point of the test
