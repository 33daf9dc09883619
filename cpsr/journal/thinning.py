"""Thins out old steps: the older they are, the fewer are kept, so that the journal stays small in a long run.

The newest N steps are all kept. Of those with N later ones every second iteration is, of those with 2 N every fourth,
and so on: every doubling of the run adds N / 2 rows. The iteration decides, not the row number: of an iteration that
was trained more than once, the newest step is never deleted first.
"""

import sqlite3

__all__ = ["THINNED_SECONDS", "thin"]

# Most rows deleted in a transaction: some milliseconds, while new rows wait in their queue.
SLICE_ROWS = 2_000
THINNED_SECONDS = "thinned_seconds"  # in `meta`: wall time of the deleted steps
_DONE = "steps_thinned:{every}"  # in `meta`: up to which row only one of so many iterations was kept


def thin(connection: sqlite3.Connection, full_steps: int) -> bool:
    """Delete one slice of steps; False if there is no complete slice to delete.

    Args:
        connection: a writing one, outside of a transaction.
        full_steps: number of newest steps that stay.

    Raises:
        sqlite3.Error: nothing was deleted; a transaction may be open.
        ValueError: a value in `meta` is no number; nothing was deleted.
    """
    (newest,) = connection.execute("SELECT COALESCE(MAX(row), 0) FROM steps").fetchone()
    # The finest level first: after it, a slice of the next level has as many rows although it is twice as long.
    every = 2
    while (boundary := newest - full_steps * (every // 2)) > 0:
        key = _DONE.format(every=every)
        found = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        done = 0 if found is None else int(found[0])
        until = done + SLICE_ROWS * (every // 2)
        if until <= boundary:
            delete_steps(connection, done, until, every, key)
            return True
        every *= 2
    return False


def delete_steps(connection: sqlite3.Connection, done: int, until: int, every: int, key: str) -> None:
    chosen = "FROM steps WHERE row > ? AND row <= ? AND iteration % ? != 0"
    range_ = (done, until, every)
    connection.execute("BEGIN IMMEDIATE")
    (seconds,) = connection.execute(f"SELECT TOTAL(seconds) {chosen}", range_).fetchone()
    before = connection.execute("SELECT value FROM meta WHERE key = ?", (THINNED_SECONDS,)).fetchone()
    connection.execute(f"DELETE {chosen}", range_)
    facts = {key: str(until), THINNED_SECONDS: repr(seconds + (0.0 if before is None else float(before[0])))}
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())
    connection.execute("COMMIT")
