"""How a launcher ends."""

__all__ = ["HOW_IT_ENDS", "JobEndedError"]

HOW_IT_ENDS = "[docs/launching.md#how-it-ends]"  # what explains a last line


class JobEndedError(Exception):
    """The launcher ends now, without another restart.

    Args:
        status: its exit status.
        message: one line for the user.
        alone: the launchers of other machines go on.
    """

    def __init__(self, status: int, message: str, *, alone: bool = False) -> None:
        super().__init__(message)
        self.status, self.alone = status, alone
