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
import time
import typing
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import JournalError
from cpsr.journal import (
    Beginning,
    CheckpointRow,
    EventRow,
    FailureRow,
    FitRow,
    Journal,
    JournalReader,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    StepRow,
    open_journal,
    writer,
)
from cpsr.journal.database import SCHEMA_VERSION, filesystem_of, is_network
from cpsr.journal.rows import Row, decode, encode
from cpsr.ranks.group import Group

FLUSH_SECONDS = 20.0


def step(iteration: int, life: int = 0, loss: float | None = 1.5) -> StepRow:
    return StepRow(life=life, iteration=iteration, loss=loss, learning_rate=1e-3, seconds=0.25, applied=True)


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
    rows: list[Any] = [
        CheckpointRow(life=0, iteration=50, status="committed", bytes=1 << 40, stall_seconds=0.01, origin="predicted"),
        FailureRow(life=0, iteration=92, checkpoint_iteration=None, description="rank 1 was killed"),
        PlanRow(life=0, from_iteration=0, interval_iterations=50, origin="young", explanation={"bound": "none"}),
        EventRow(life=0, rank=3, kind="note", message="ümlaut and 'quotes'", iteration=7),
        PhaseRow(life=0, phase=2, first_iteration=120, last_iteration=300, xi=1e-9, last_xi=9e-10, ended_by="change"),
        FitRow(life=0, iteration=300, kind="loss", result={"family": "power", "coefficients": {"d": 1.5}}),
    ]
    journal.record(*rows)
    journal.record(FitRow(life=0, iteration=300, kind="failure_rate", result={"mean_per_second": 1e-5}))
    journal.record(recovery(), recovery(id="r2"), recovery(outcome="rolled_back"))  # the first one's newest row counts
    journal.record(*[step(1), step(2, loss=None)])
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        found = [*reader.checkpoints(), *reader.failures(), reader.latest_plan(), *reader.events()]
        assert [*found, *reader.phases(), *reader.newest(FitRow, 9, kind="loss")] == rows
        assert [fit.kind for fit in reader.newest(FitRow, 9)] == ["failure_rate", "loss"]
        read, other = reader.recoveries()
        assert dataclasses.replace(read, created_unix_seconds=0) == recovery(
            outcome="rolled_back", created_unix_seconds=0
        )
        assert (other.id, other.outcome) == ("r2", "watching")
        assert reader.losses() == [step(1), step(2, loss=None)]
        (life,) = reader.lives()
        assert reader.restored_iterations() == {0: 92}
    assert (life.mode, life.pid, life.ending) == ("predict", os.getpid(), "running")


def test_losses_are_the_newest_of_each_iteration(path: Path, journal: Journal) -> None:
    journal.record(*[step(i, life=0, loss=float(i)) for i in range(1, 7)])
    journal.record(*[step(i, life=1, loss=-float(i)) for i in (3, 4)])
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert [row.loss for row in reader.losses()] == [1, 2, -3, -4, 5, 6]
        assert [row.iteration for row in reader.losses(start=2, stop=4)] == [2, 3]
        assert [row.iteration for row in reader.recent_steps(3)] == [4, 3, 6]


@pytest.mark.parametrize(
    ("method", "beginning", "labelled"),
    [
        ("scratch", Beginning.SCRATCH, False),
        ("exact", Beginning.EXACT, False),
        ("departure", Beginning.EMERGENCY_DUMP, False),
        ("older experts", Beginning.OLDER_EXPERTS, True),
        ("line", Beginning.PREDICTED, True),
        ("vitp", Beginning.PREDICTED, True),
    ],
)
def test_the_text_of_the_journal_says_what_the_state_was(method: str, beginning: Beginning, labelled: bool) -> None:
    assert recovery(method=method).beginning is beginning
    assert beginning.labelled == labelled


def test_a_stale_state_is_told_from_the_older_experts_that_had_that_name() -> None:
    assert recovery(method="stale", settings={"method": "stale"}).beginning is Beginning.PREDICTED
    before = decode(RecoveryRow, json.dumps({**json.loads(encode(recovery())), "method": "stale"}))
    assert (before.method, before.beginning) == ("older experts", Beginning.OLDER_EXPERTS)


def test_how_long_each_life_has_trained_and_what_checkpoints_took(path: Path, journal: Journal) -> None:
    journal.record(step(1, 0), step(2, 0), step(2, 1), step(50_000, 1), step(50_000, 1))  # a jump, a repeated step
    for iteration, status in ((50, "committed"), (100, "committed"), (150, "skipped")):
        size = 1000 if status == "committed" else None
        row = CheckpointRow(life=0, iteration=iteration, status=status, bytes=size, stall_seconds=0.25)  # type: ignore[arg-type]
        journal.record(row)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.life_seconds() == {0: 0.5, 1: 0.75}
        totals = reader.checkpoint_totals()
    assert {status: (one["count"], one["bytes"], one["stall_seconds"]) for status, one in totals.items()} == {
        "committed": (2, 2000, 0.5),
        "skipped": (1, 0, 0.25),
    }


def test_the_newest_rows_of_a_kind(path: Path, journal: Journal) -> None:
    rows = [
        FitRow(life=0, iteration=1, kind=kind, result={}, created_unix_seconds=at)  # type: ignore[arg-type]
        for at, kind in ((1.0, "loss"), (2.0, "predictor"), (3.0, "loss"), (4.0, "predictor"))
    ]
    journal.record(*rows)
    journal.record(EventRow(life=0, rank=0, kind="note", message=""), EventRow(life=0, rank=0, kind="x", message=""))
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.newest(FitRow, 2) == [rows[3], rows[2]]
        assert reader.newest(FitRow, 9, kind="loss") == [rows[2], rows[0]]
        assert (reader.count(FitRow), reader.count(PlanRow)) == (4, 0)
        assert [(one.number, one.row) for one in reader.after(1, 2)] == [(2, rows[1]), (3, rows[2])]
        assert [event.kind for event in reader.events("x")] == ["x"]


def test_a_bad_row_is_dropped_counted_and_reported_once(
    path: Path, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    bad = CheckpointRow(life=0, iteration=1, status="lost")  # type: ignore[arg-type]  # the point of the test
    wrong_type = CheckpointRow(life=0, iteration="x", status="skipped")  # type: ignore[arg-type]
    taken_kind = EventRow(life=0, rank=0, kind="plan", message="the word for another row")
    too_large = CheckpointRow(life=0, iteration=2**70, status="skipped")
    journal.record(bad, wrong_type, taken_kind, too_large)
    journal.record(CheckpointRow(life=0, iteration=2, status="skipped", reason="slow disk"))
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert [row.iteration for row in reader.checkpoints()] == [2]
    assert journal.dropped_rows == 4
    first, second = caplog.messages
    assert str(path) in first
    assert "EventRow" in second


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
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text("abc")),
)
def test_rows_survive_their_json(iteration: int, lag: float | None, settings: dict[str, Any]) -> None:
    guard = {"a": [math.inf, 0.5], "b": -math.inf}
    row = recovery(restored_iteration=iteration, expected_end_cost_iterations=lag, settings=settings, guard=guard)
    assert decode(RecoveryRow, encode(row)) == row
    of_numpy = {"a": [math.inf, numpy.float32(0.5)], "b": -math.inf}
    assert encode(dataclasses.replace(row, guard=of_numpy)) == encode(row)


def test_rows_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "journal_rows.md").read_text(encoding="utf-8")
    for row_type in typing.get_args(Row):
        section = page.split(f"## `{getattr(row_type, 'KIND', 'event')}`")[1].split("\n## ")[0]
        missing = [field.name for field in dataclasses.fields(row_type) if f"`{field.name}`" not in section]
        assert not missing, f"{row_type.__name__} lacks {missing}"


def test_rollback_journal_is_used_on_network_disks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsr.journal.database.filesystem_of", lambda _: "nfs4")
    journal = Journal.open(path)
    journal.start_life("auto")
    journal.record(*[step(1)])
    journal.close()
    with JournalReader(path) as reader:
        assert len(reader.losses()) == 1
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
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


def test_rows_wait_out_a_foreign_lock(path: Path, journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
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
    (failure,) = caplog.messages
    assert "training goes on" in failure


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from cpsr.journal import Journal, StepRow, EventRow, JournalReader, writer
def step(i): return StepRow(life=0, iteration=i, loss=1.0, learning_rate=1e-3, seconds=0.1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer.WAITING_MAX = 10
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
    assert done.stderr.count("cannot write") == 1


FULL_FROM_THE_START = """
import resource, signal, sys, time
from pathlib import Path
from cpsr.journal import Journal, StepRow, JournalReader
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
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
journal.end_life("clean")
journal.close()
assert journal.dropped_rows == 3
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # space again
journal = Journal.open(path)
assert journal.start_life("auto", after=life) == life + 1
journal.close()
with JournalReader(path) as reader:
    assert [one.life for one in reader.lives()] == [*range(before), before + 1]
print("survived")
"""


def test_a_disk_that_is_full_at_the_start_keeps_nobody_from_training(path: Path) -> None:
    command = [sys.executable, "-c", FULL_FROM_THE_START, str(path), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "survived" in done.stdout
    assert done.stderr.count("there is no room on its disk") == 1, "reported once"


def test_a_defect_in_the_thread_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(path)
    monkeypatch.setattr(journal, "_commit_batch", lambda _: 1 / 0)
    journal.record(*[step(0)])
    assert not journal.flush(FLUSH_SECONDS)
    assert "ZeroDivisionError" in caplog.text
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


def test_a_damaged_journal_is_set_aside_and_another_begins(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text(path)
    content = path.read_bytes()
    journal = open_journal(path.parent, Group(), "auto")
    assert journal.life == 0
    journal.close("clean")
    (aside,) = path.parent.glob("journal.db.damaged-*")
    assert aside.read_bytes() == content
    assert aside.name in caplog.text
    with JournalReader(path) as reader:
        assert [life.ending for life in reader.lives()] == ["clean"]
