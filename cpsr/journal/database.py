"""The SQLite file of the journal: its tables, its identity, and SQLite's settings for its file system."""

import errno
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

from cpsr.errors import JournalDamagedError, JournalError

__all__ = ["SCHEMA_VERSION", "check_identity", "filesystem_of", "is_network", "lacks_room", "prepare"]
__all__ += ["unreadable"]

SCHEMA_VERSION = 1
APPLICATION_ID = int.from_bytes(b"CPSR", "big")  # tells a journal from any other SQLite file
NO_SPACE = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])  # no room on the disk, by quota, or for the file

# `row` keeps the order of recording: after a restart or a roll-back the same iteration is trained and checkpointed
# again, and both rows stay. One transaction, so that a kill leaves a journal or an empty file.
TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS steps (
    row INTEGER PRIMARY KEY, life INTEGER NOT NULL, iteration INTEGER NOT NULL CHECK (iteration >= 0), loss REAL,
    learning_rate REAL, seconds REAL NOT NULL, applied INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS steps_by_iteration ON steps (iteration);
CREATE TABLE IF NOT EXISTS events (
    row INTEGER PRIMARY KEY, kind TEXT NOT NULL, life INTEGER NOT NULL CHECK (life >= 0),
    iteration INTEGER CHECK (iteration >= 0), unix_seconds REAL NOT NULL, content TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_kind ON events (kind);
CREATE TABLE IF NOT EXISTS event_files (name TEXT PRIMARY KEY, bytes_read INTEGER NOT NULL);
PRAGMA application_id={APPLICATION_ID};
PRAGMA user_version={SCHEMA_VERSION};
COMMIT
"""

# File systems whose memory maps are not shared with other hosts, as WAL's index requires. Everything under FUSE counts
# as one of them: the rollback journal is only slower, WAL would corrupt.
# fmt: off
_NETWORK_FILESYSTEMS = frozenset([
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs3", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
])
# fmt: on

_MEANINGS = {  # of SQLite's errors, by how their names begin
    "SQLITE_BUSY": "is locked by another process; nothing was changed; try again, or end the process that locks it",
    "SQLITE_NOTADB": "is not a CPSR journal (no SQLite file); nothing was changed; name a run directory's journal.db",
    "SQLITE_CORRUPT": "is damaged or truncated; checkpoints are stored elsewhere and are not affected; move it (and "
    "its -wal) away, and the run starts a new one",
    "SQLITE_CANTOPEN": "cannot be opened; nothing was changed; if its directory is read-only, copy the file to a "
    "writable one",
}


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
    """Set up a writing connection: journal mode, and the tables of a new file.

    Raises:
        JournalError: the file is no journal, or has another schema; it is not changed.
    """
    if connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]:
        check_identity(connection, path)
    wanted = "delete" if is_network(filesystem_of(path)) else "wal"
    (mode,) = connection.execute(f"PRAGMA journal_mode={wanted}").fetchone()
    # NORMAL survives a kill at any point; after a power cut WAL may lack the last rows, never more.
    connection.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
    connection.executescript(TABLES)


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
    """Whether the disk prevents writing the file `path`: it is full, fails, or a quota of bytes or files is used up."""
    if isinstance(error, OSError):
        return error.errno in NO_SPACE
    name = getattr(error, "sqlite_errorname", "")
    if not name.startswith("SQLITE_CANTOPEN"):
        return bool(name.startswith(("SQLITE_FULL", "SQLITE_IOERR")))
    try:  # SQLite does not say why it cannot create a file
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".room-"):
            return False
    except OSError as refused:
        return refused.errno in NO_SPACE


def unreadable(path: Path, error: sqlite3.Error | OSError) -> JournalError:
    """Translate an error of SQLite or of the disk into a message about the journal `path` for its user."""
    name = getattr(error, "sqlite_errorname", "") or type(error).__name__
    meaning = next((said for begin, said in _MEANINGS.items() if name.startswith(begin)), "cannot be used")
    kind = JournalDamagedError if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")) else JournalError
    return kind(f"the journal {path} {meaning} ({name}: {error})")
