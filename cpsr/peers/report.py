"""How threads of replication report what happens to the journal."""

from collections.abc import Callable

__all__ = ["Report", "brief"]

# Kind of the event, one sentence, iteration, level of logging.
Report = Callable[[str, str, int | None, int], None]


def brief(error: Exception) -> str:
    """The first sentence of an error: gloo adds advice for whoever debugs training."""
    return str(error).partition(". ")[0]
