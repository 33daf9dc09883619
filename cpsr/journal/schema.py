"""The journal's tables, its version, and SQLite's settings for its file system."""

import errno
import json
import sqlite3
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from cpsr.errors import JournalDamagedError, JournalError
from cpsr.journal.rows import (
    BacktestRow,
    BubbleRow,
    CheckpointRow,
    EventRow,
    FailureRow,
    FitRow,
    LearningRow,
    LifeRow,
    PhaseRow,
    PlanRow,
    RecoveryRow,
    RecoverySource,
    StepRow,
    TotalsRow,
    columns,
)

__all__ = [
    "NO_SPACE",
    "OPENED",
    "SCHEMA_VERSION",
    "TABLES",
    "check_identity",
    "filesystem_of",
    "insert_sql",
    "is_network",
    "lacks_room",
    "prepare",
    "select_sql",
    "unreadable",
]

SCHEMA_VERSION = 10
NO_SPACE = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])  # no room on the disk, by quota, or for the file
APPLICATION_ID = int.from_bytes(b"CPSR", "big")  # tells a journal from any other SQLite file

TABLES: dict[type[Any], str] = {
    LifeRow: "lives",
    StepRow: "steps",
    CheckpointRow: "checkpoints",
    FailureRow: "failures",
    RecoveryRow: "recoveries",
    RecoverySource: "recovery_sources",
    PhaseRow: "phases",
    FitRow: "fits",
    BacktestRow: "backtests",
    LearningRow: "learning",
    BubbleRow: "bubbles",
    PlanRow: "plans",
    EventRow: "events",
    TotalsRow: "totals",
}

_WITHOUT_ROWS = (LifeRow, RecoverySource)  # tables whose rows are not numbered in the order of their recording

# `row`, an INTEGER PRIMARY KEY without a field in the dataclasses, keeps the order of recording: after a restart or a
# roll-back the same iteration is trained and checkpointed again, and both rows stay.
STATEMENTS = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lives (
    life INTEGER PRIMARY KEY CHECK (life >= 0), mode TEXT NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL,
    started_unix_seconds REAL NOT NULL, ended_unix_seconds REAL,
    ending TEXT NOT NULL CHECK (ending IN ('running', 'clean', 'sigterm', 'error')), restored_iteration INTEGER,
    ranks INTEGER CHECK (ranks >= 1));
CREATE TABLE steps (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, iteration INTEGER NOT NULL CHECK (iteration >= 0), loss REAL,
    learning_rate REAL, seconds REAL NOT NULL, applied INTEGER NOT NULL);
CREATE INDEX steps_by_iteration ON steps (iteration);
CREATE TABLE checkpoints (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, iteration INTEGER NOT NULL CHECK (iteration >= 0),
    status TEXT NOT NULL CHECK (status IN ('committed', 'skipped', 'failed')), reason TEXT NOT NULL, bytes INTEGER,
    stall_seconds REAL, write_seconds REAL, commit_seconds REAL,
    origin TEXT NOT NULL CHECK (origin IN ('trained', 'predicted')), created_unix_seconds REAL NOT NULL);
CREATE INDEX checkpoints_by_iteration ON checkpoints (iteration);
CREATE TABLE failures (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, iteration INTEGER NOT NULL CHECK (iteration >= 0),
    checkpoint_iteration INTEGER, description TEXT NOT NULL, detected_unix_seconds REAL NOT NULL,
    scope TEXT CHECK (scope IN ('process', 'machine', 'everything')));
CREATE TABLE recoveries (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, life INTEGER NOT NULL, failure_iteration INTEGER,
    checkpoint_iteration INTEGER, restored_iteration INTEGER NOT NULL,
    method TEXT NOT NULL, requested_mode TEXT NOT NULL,
    feasible TEXT NOT NULL, expected_end_cost_iterations REAL, settings TEXT NOT NULL, reason TEXT NOT NULL,
    load_seconds REAL, predict_seconds REAL, inject_seconds REAL, guard TEXT NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome IN ('kept', 'vetoed', 'rolled_back', 'watching')),
    created_unix_seconds REAL NOT NULL);
CREATE TABLE recovery_sources (
    recovery_id TEXT NOT NULL, rank INTEGER NOT NULL, source TEXT NOT NULL, iteration INTEGER NOT NULL,
    PRIMARY KEY (recovery_id, rank, source)) WITHOUT ROWID;
CREATE TABLE plans (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, from_iteration INTEGER NOT NULL,
    interval_iterations INTEGER NOT NULL CHECK (interval_iterations >= 1), origin TEXT NOT NULL,
    mode TEXT CHECK (mode IN ('predict', 'recompute')), explanation TEXT NOT NULL, created_unix_seconds REAL NOT NULL,
    memory_interval_iterations INTEGER CHECK (memory_interval_iterations >= 1));
CREATE TABLE events (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, rank INTEGER NOT NULL, kind TEXT NOT NULL, message TEXT NOT NULL,
    iteration INTEGER, created_unix_seconds REAL NOT NULL);
CREATE TABLE phases (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, phase INTEGER NOT NULL CHECK (phase >= 0),
    first_iteration INTEGER NOT NULL, last_iteration INTEGER NOT NULL, xi REAL NOT NULL, last_xi REAL NOT NULL,
    ended_by TEXT NOT NULL CHECK (ended_by IN ('change', 'length')), created_unix_seconds REAL NOT NULL);
CREATE TABLE fits (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, iteration INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('loss', 'predictor', 'failure_rate')), result TEXT NOT NULL,
    created_unix_seconds REAL NOT NULL);
-- A life that continues from a checkpoint has the backtests up to there, and records them again.
CREATE TABLE backtests (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, iteration INTEGER NOT NULL CHECK (iteration >= 0),
    checkpoints INTEGER NOT NULL, result TEXT NOT NULL, created_unix_seconds REAL NOT NULL,
    UNIQUE (iteration, checkpoints, result));
CREATE TABLE bubbles (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, rank INTEGER NOT NULL,
    iteration INTEGER NOT NULL CHECK (iteration >= 0), iterations INTEGER NOT NULL, seconds REAL NOT NULL,
    bubble_seconds REAL NOT NULL, used_seconds REAL NOT NULL, late_seconds REAL NOT NULL,
    outside_seconds REAL NOT NULL, slices INTEGER NOT NULL, late_slices INTEGER NOT NULL, copied_seconds REAL,
    copied_bytes INTEGER, copied_beside_bytes INTEGER, created_unix_seconds REAL NOT NULL);
CREATE TABLE learning (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, iteration INTEGER, first_iteration INTEGER NOT NULL,
    checkpoints INTEGER NOT NULL, updates INTEGER NOT NULL, created_unix_seconds REAL NOT NULL);
CREATE TABLE totals (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL,
    moment TEXT NOT NULL CHECK (moment IN ('start', 'end', 'failure', 'first', 'step')), iteration INTEGER NOT NULL,
    reached_iteration INTEGER NOT NULL, repeated_until_iteration INTEGER NOT NULL, step_seconds REAL NOT NULL,
    repeated_seconds REAL NOT NULL, checkpoint_stall_seconds REAL NOT NULL, memory_stall_seconds REAL NOT NULL,
    repeated_stall_seconds REAL NOT NULL, memory_snapshots INTEGER NOT NULL, restart_seconds REAL NOT NULL,
    paused_seconds REAL NOT NULL, created_unix_seconds REAL NOT NULL);
-- Queries for the copies of checkpoints select events by kind.
CREATE INDEX events_by_kind ON events (kind);
"""
# In `meta`, once for each time that a writer opened the file: the last row of each table then. A reader with later rows
# has seen rows that a power cut has lost. The keys must keep their order even if the clock goes back.
OPENED = "opened:{microseconds}"
MICROSECONDS = 1e6

# File systems whose memory maps are not shared with other hosts, as WAL's index requires. Everything under FUSE counts
# as one of them: the rollback journal is only slower, WAL would corrupt.
# fmt: off
_NETWORK_FILESYSTEMS = frozenset([
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs3", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
])
# fmt: on


def insert_sql(row_type: type[Any], more: tuple[str, ...] = ()) -> str:
    """The INSERT for one row of a table; `more` names columns that the dataclass lacks, after its own."""
    names = columns(row_type) + more
    # Table and column names are this package's own, never input.
    return f"INSERT INTO {TABLES[row_type]} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608


def select_sql(row_type: type[Any]) -> str:
    """The SELECT of a table's columns in field order; the caller adds its clauses."""
    return f"SELECT {', '.join(columns(row_type))} FROM {TABLES[row_type]}"  # noqa: S608


def is_network(filesystem: str) -> bool:
    """Whether a file system of this type may be shared with other hosts, so that SQLite's WAL is unsafe on it."""
    return filesystem in _NETWORK_FILESYSTEMS or filesystem.startswith("fuse")


def filesystem_of(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> str:
    """Type of the file system that holds `path` (`ext4`, `nfs4`, ...), or `unknown`.

    Args:
        path: need not exist.
        mounts: mount point and type of every file system in mount order; by default those of this machine.
    """
    if mounts is None:
        mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    target = path.resolve()
    holding = [(mount, kind) for mount, kind in mounts if target.is_relative_to(mount)]
    # The longest mount point holds the path; where two share it, the later one hides the earlier.
    return max(enumerate(holding), key=lambda item: (len(item[1][0]), item[0]))[1][1] if holding else "unknown"


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Set up a writing connection: journal mode, tables of a new file, identity of an existing one.

    Raises:
        JournalError: the file is no journal, or has another schema; it is not changed.
    """
    if connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]:
        check_identity(connection, path)
    filesystem = filesystem_of(path)
    wanted = "delete" if is_network(filesystem) else "wal"
    (mode,) = connection.execute(f"PRAGMA journal_mode={wanted}").fetchone()
    # NORMAL survives a kill at any point; after a power cut WAL may lack the last rows, never more.
    connection.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        _execute(connection, STATEMENTS)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute("INSERT INTO meta VALUES ('created_unix_seconds', ?)", (repr(time.time()),))
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    facts = {"filesystem": filesystem, "journal_mode": mode, **_opened(connection)}
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())
    connection.execute("COMMIT")


def _opened(connection: sqlite3.Connection) -> dict[str, str]:
    last = {}
    for row_type, table in TABLES.items():
        if row_type not in _WITHOUT_ROWS:
            (last[table],) = connection.execute(f"SELECT COALESCE(MAX(row), 0) FROM {table}").fetchone()  # noqa: S608
    prefix = OPENED.format(microseconds="")
    keys = connection.execute("SELECT key FROM meta WHERE key GLOB ?", (f"{prefix}*",))
    earlier = max((int(key.removeprefix(prefix)) for (key,) in keys), default=0)
    return {OPENED.format(microseconds=max(round(time.time() * MICROSECONDS), earlier + 1)): json.dumps(last)}


def _execute(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        connection.execute(statement)


def check_identity(connection: sqlite3.Connection, path: Path) -> None:
    """Make sure that the file is a journal that this version can read.

    Raises:
        JournalError: it belongs to another program, is empty, or was written by another version.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()
        what = "is an SQLite file of another program, not a CPSR journal" if tables else "is empty, not a journal yet"
        raise JournalError(f"{path} {what}; nothing in it was changed; name the journal.db of a run directory")
    if version != SCHEMA_VERSION:
        raise JournalError(
            f"{path} has schema {version}, and this version of cpsr reads {SCHEMA_VERSION}; nothing in it was changed; "
            "use the cpsr version that wrote it"
        )


def lacks_room(error: sqlite3.Error | OSError, path: Path) -> bool:
    """Whether the disk prevents writing the file `path`: it is full, a quota is used up, or it fails."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    name = getattr(error, "sqlite_errorname", "")
    if name.startswith("SQLITE_CANTOPEN"):
        return _lacks_files(path.parent)
    return bool(name.startswith(("SQLITE_FULL", "SQLITE_IOERR")))


def _lacks_files(directory: Path) -> bool:
    """Whether no more files can be created, for lack of inodes or quota: SQLite does not report the reason."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".room-"):
            return False
    except OSError as error:
        return error.errno in NO_SPACE


def unreadable(path: Path, error: sqlite3.Error | OSError) -> JournalError:
    """Translate an error of SQLite or of the disk into a message about the journal `path` for its user."""
    name = getattr(error, "sqlite_errorname", "") or type(error).__name__
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        meaning = "is locked by another process; nothing was changed; try again, or end the process that locks it"
    elif name.startswith("SQLITE_NOTADB"):
        meaning = "is not a CPSR journal (no SQLite file); nothing was changed; name a run directory's journal.db"
    elif name.startswith("SQLITE_CORRUPT"):
        meaning = (
            "is damaged or truncated; checkpoints are stored elsewhere and are not affected; move it (and its -wal) "
            "away, and the run starts a new one"
        )
    elif name.startswith("SQLITE_CANTOPEN"):
        meaning = (
            "cannot be opened; nothing was changed; if its directory is read-only, copy the file to a writable one"
        )
    else:
        meaning = "cannot be used; nothing was changed"
    kind = JournalDamagedError if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")) else JournalError
    return kind(f"the journal {path} {meaning} ({name}: {error})")
