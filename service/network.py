"""The predictor's network: how far it has kept pace with the checkpoints."""

from pydantic import BaseModel, Field

from cpsr.journal import JournalReader

__all__ = ["NETWORK_EXAMPLE", "Network", "network_of"]

NETWORK_EXAMPLE = {"checkpoints_taken_in": 9, "checkpoints_committed": 9, "updates": 72}


class Network(BaseModel):
    """What the predictor has taken in of this run."""

    checkpoints_taken_in: int
    checkpoints_committed: int = Field(description="That lead to the present state, each iteration once.")
    updates: int = Field(description="Of the network on this run; it starts from weights pretrained on others.")


def network_of(reader: JournalReader) -> Network | None:
    """As the journal has it; None where nothing learns, or the journal is of an older version.

    Raises:
        JournalError: the journal cannot be read.
    """
    newest = reader.latest_learning()
    if newest is None:
        return None
    return Network(
        checkpoints_taken_in=newest.checkpoints,
        checkpoints_committed=reader.committed_since(newest.first_iteration),
        updates=newest.updates,
    )
