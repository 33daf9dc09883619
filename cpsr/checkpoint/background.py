"""Threads that take the processor time that training leaves."""

import os

__all__ = ["NICENESS", "yield_to_training"]

# On a busy core a tenth of the time remains, so that no save starves. Beyond it, a thread that is displaced while it
# has the interpreter's lock keeps training waiting for longer.
NICENESS = 10


def yield_to_training() -> None:
    """Lower the priority of the calling thread, until it ends; Linux then lowers that of its transfers as well."""
    os.nice(NICENESS)
