"""How a life of a run began, and what follows from that for labels, checks and messages."""

import enum

__all__ = ["Beginning"]


class Beginning(enum.Enum):
    """What the state is with which a life, or a roll-back inside one, began.

    The values are the journal's texts for `method`. A predicted state is recorded under the name of what predicted it:
    `line`, `vitp`, others in older journals. So every other text stands for one.
    """

    SCRATCH = "scratch"
    EXACT = "exact"
    #: Every tensor as the ranks left it when their group broke; the small state is stepped ahead from the checkpoint.
    EMERGENCY_DUMP = "departure"
    #: What the checkpoint holds, with some experts that were saved before it.
    OLDER_EXPERTS = "stale"
    #: The state of at least one rank was predicted.
    PREDICTED = "predicted"

    @classmethod
    def of(cls, method: str) -> "Beginning":
        """The beginning behind a journal's text, of any version."""
        return next((beginning for beginning in cls if beginning.value == method), cls.PREDICTED)

    @property
    def predicted(self) -> bool:
        """Whether a predictor formed the state, or a part of it."""
        return self is Beginning.PREDICTED

    @property
    def labelled(self) -> bool:
        """Whether the run never had this state as a whole, so that checkpoints taken from here on say `predicted`."""
        return self in (Beginning.OLDER_EXPERTS, Beginning.PREDICTED)

    @property
    def watched(self) -> bool:
        """Whether the first iterations are watched, after which the state is kept or given up."""
        return self is Beginning.PREDICTED
