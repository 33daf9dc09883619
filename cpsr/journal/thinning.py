"""Thinning out old steps: the older they are, the fewer are kept, so that a journal does not grow with its run.

The newest N steps are all kept. Of those with N later ones every second iteration is, of those with 2 N every fourth,
and so on: every doubling of the run adds N / 2 rows. What is kept depends on the iteration, and not on the number of
the row, so that of an iteration that was stepped more than once the newest step is never the one that goes first.
"""

import sqlite3

__all__ = ["THINNED_SECONDS", "thin"]

# Deleted in a transaction at most: some milliseconds, for which records wait in their queue.
SLICE_ROWS = 2_000
THINNED_SECONDS = "thinned_seconds"  # in `meta`: wall time of the steps that are gone
_DONE = "steps_thinned:{every}"  # in `meta`: up to which row only one of so many iterations was kept


def thin(connection: sqlite3.Connection, full_steps: int) -> bool:
    """Delete one slice of the steps that are to go; False where no whole slice is.

    Args:
        connection: that writes, outside of a transaction.
        full_steps: how many of the newest steps stay.

    Raises:
        sqlite3.Error: nothing was deleted; a transaction may be open.
        ValueError: `meta` holds what is no number; nothing was deleted.
    """
    (newest,) = connection.execute("SELECT COALESCE(MAX(row), 0) FROM steps").fetchone()
    # The finest first: where its slices are done, a slice of the next has no more rows although it is twice as long.
    every = 2
    while (boundary := newest - full_steps * (every // 2)) > 0:
        key = _DONE.format(every=every)
        found = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        done = 0 if found is None else int(found[0])
        until = done + SLICE_ROWS * (every // 2)
        if until <= boundary:
            _delete(connection, done, until, every, key)
            return True
        every *= 2
    return False


def _delete(connection: sqlite3.Connection, done: int, until: int, every: int, key: str) -> None:
    chosen = "FROM steps WHERE row > ? AND row <= ? AND iteration % ? != 0"
    range_ = (done, until, every)
    connection.execute("BEGIN IMMEDIATE")
    (seconds,) = connection.execute(f"SELECT TOTAL(seconds) {chosen}", range_).fetchone()
    before = connection.execute("SELECT value FROM meta WHERE key = ?", (THINNED_SECONDS,)).fetchone()
    connection.execute(f"DELETE {chosen}", range_)
    facts = {key: str(until), THINNED_SECONDS: repr(seconds + (0.0 if before is None else float(before[0])))}
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", facts.items())
    connection.execute("COMMIT")
