"""The predictor's network: how far it has kept pace with the checkpoints."""

from pydantic import BaseModel, Field

from cpsr.journal import JournalReader

__all__ = ["NETWORK_EXAMPLE", "Network", "network_of"]

NETWORK_EXAMPLE = {"checkpoints_taken_in": 9, "checkpoints_waiting": 0, "updates": 32}


class Network(BaseModel):
    """What the predictor has taken in of this run."""

    checkpoints_taken_in: int = Field(description="In all lives.")
    checkpoints_waiting: int = Field(description="Committed after the newest one that was taken in, in this life.")
    updates: int = Field(description="Of the network, on this run, in all lives.")


def network_of(reader: JournalReader, life: int) -> Network | None:
    """As the journal has it; None where this life does not learn, or the journal is of an older version.

    Raises:
        JournalError: the journal cannot be read.
    """
    newest, committed = reader.latest_learning(), reader.latest_checkpoint()
    if newest is None or newest.life != life:
        return None
    waiting = 0
    if committed is not None:  # what lies beyond it belongs to a branch that was given up
        first = newest.first_iteration if newest.iteration is None else newest.iteration + 1
        waiting = reader.committed_between(life, first, committed.iteration)
    return Network(
        checkpoints_taken_in=newest.checkpoints,
        checkpoints_waiting=waiting,
        updates=newest.updates,
    )
